"""Python's own generator of random numbers, taken and put at every turn.

Its state is a tuple of 625 numbers, and to make one takes as long as a small operation of a layer. Most turns draw nothing.
So its memory is looked at first, and of a state that is known to lie there no tuple is made anew.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

_WORDS = 624  # of a Mersenne Twister; before them lies a place among them
State = tuple[Any, ...]  # as `random.getstate` gives it


class PythonGenerator:
    """What lies in the generator, as far as is known.

    Invariant: `known` is the state whose bytes are `seen`.
    """

    def __init__(self) -> None:
        self._memory: Any = _memory()
        self._known: State | None = None
        self._seen: tuple[bytes, Any] | None = None

    def _look(self) -> tuple[bytes, Any] | None:
        # The spare number of `random.gauss` lies elsewhere.
        return None if self._memory is None else (bytes(self._memory), random._inst.gauss_next)  # type: ignore[attr-defined]

    def take(self) -> State:
        """Read the state."""
        now = self._look()
        if self._known is None or now is None or now != self._seen:
            self._known, self._seen = random.getstate(), now
        return self._known

    def put(self, state: State) -> None:
        """Set the state."""
        random.setstate(state)
        now = self._look()
        # Another thread may have drawn meanwhile.
        is_there = now is not None and (self._memory[0], self._memory[1]) == (state[1][_WORDS], state[1][0])
        self._known, self._seen = (state, now) if is_there else (None, None)


def _memory() -> Any:
    """Find where the generator keeps its place and its words; None if they are not where they are looked for."""
    generator = random._inst  # type: ignore[attr-defined]
    if type(generator).__basicsize__ < object.__basicsize__ + 4 * (1 + _WORDS):
        return None
    memory = (ctypes.c_uint32 * (1 + _WORDS)).from_address(id(generator) + object.__basicsize__)
    *words, place = random.getstate()[1]
    return memory if [place, *words] == list(memory) else None


PYTHON = PythonGenerator()
