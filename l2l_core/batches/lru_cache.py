"""What was found out about kinds of batches, for as long as such batches come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """Values by key; at most `most` of them, those that were asked for or kept last."""

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """Return the value, or None if there is none (any more)."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Keep a value; the one that was not wanted for longest may have to go."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._maxsize:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
