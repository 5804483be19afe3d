"""Python's own generator of random numbers, taken and put at every turn.

Its state is a tuple of 625 numbers, and to make one takes as long as a small operation of a layer. Most turns draw nothing.
So its memory is looked at first, and of a state that is known to lie there no tuple is made anew.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

_WORDS = 624  # of a Mersenne Twister; before them lies a place among them
PythonState = tuple[Any, ...]  # as `random.getstate` gives it
MemoryImage = tuple[bytes, Any] | None


class PythonGenerator:
    """What lies in the generator, as far as is known. Other threads may draw at any moment."""

    def __init__(self) -> None:
        self._memory: Any = _memory()
        self._known: tuple[PythonState, MemoryImage] | None = (
            None  # a state, and what is seen where it lies; exchanged as one
        )

    def _read_memory(self) -> MemoryImage:
        # The spare number of `random.gauss` lies elsewhere.
        return None if self._memory is None else (bytes(self._memory), random._inst.gauss_next)  # type: ignore[attr-defined]

    def capture(self) -> PythonState:
        """Read the state."""
        now, known = self._read_memory(), self._known
        if known is not None and now is not None and known[1] == now:
            return known[0]
        state = random.getstate()
        self._remember(state, now)
        return state

    def restore(self, state: PythonState) -> None:
        """Set the state."""
        random.setstate(state)
        self._remember(state, self._read_memory())

    def _remember(self, state: PythonState, seen: MemoryImage) -> None:
        is_there = seen is not None and seen[0][:8] == struct.pack("=2I", state[1][_WORDS], state[1][0])
        self._known = (state, seen) if is_there else None


def _memory() -> Any:
    """Find where the generator keeps its place and its words; None if they are not where they are looked for."""
    generator = random._inst  # type: ignore[attr-defined]
    if type(generator).__basicsize__ < object.__basicsize__ + 4 * (1 + _WORDS):
        return None
    memory = (ctypes.c_uint32 * (1 + _WORDS)).from_address(id(generator) + object.__basicsize__)
    *words, place = random.getstate()[1]
    return memory if [place, *words] == list(memory) else None


PYTHON_RANDOM = PythonGenerator()
