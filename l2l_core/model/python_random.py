"""Fast capture and restore of the state of Python's random generator, at every turn.

Building the state, a tuple of 625 numbers, takes as long as a small operation of a layer, and most turns draw nothing. So
the generator's memory is compared first, and if it is unchanged, the cached tuple is returned.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

_WORDS = 624  # of a Mersenne Twister; in memory the current position precedes them
PythonState = tuple[Any, ...]  # as `random.getstate` gives it
MemoryImage = tuple[bytes, Any] | None


class PythonGenerator:
    """Python's random generator with a cache of its state; other threads may draw at any moment."""

    def __init__(self) -> None:
        self._memory: Any = _memory()
        # A state and its memory image; replaced together, for other threads.
        self._cached: tuple[PythonState, MemoryImage] | None = None

    def _read_memory(self) -> MemoryImage:
        # The spare number of `random.gauss` is stored elsewhere.
        return None if self._memory is None else (bytes(self._memory), _generator().gauss_next)

    def capture(self) -> PythonState:
        """Read the state."""
        now, cached = self._read_memory(), self._cached
        if cached is not None and now is not None and cached[1] == now:
            return cached[0]
        state = random.getstate()
        self._cache(state, now)
        return state

    def restore(self, state: PythonState) -> None:
        """Set the state."""
        random.setstate(state)
        self._cache(state, self._read_memory())

    def _cache(self, state: PythonState, image: MemoryImage) -> None:
        matches = image is not None and image[0][:8] == struct.pack("=2I", state[1][_WORDS], state[1][0])
        self._cached = (state, image) if matches else None


def _generator() -> Any:
    return random._inst  # type: ignore[attr-defined]  # the generator behind the functions of `random`


def _memory() -> Any:
    """Return a view of the generator's position and words in memory, or None if this Python stores them elsewhere."""
    generator = _generator()
    if type(generator).__basicsize__ < object.__basicsize__ + 4 * (1 + _WORDS):
        return None
    memory = (ctypes.c_uint32 * (1 + _WORDS)).from_address(id(generator) + object.__basicsize__)
    *words, place = random.getstate()[1]
    return memory if [place, *words] == list(memory) else None


PYTHON_RANDOM = PythonGenerator()
