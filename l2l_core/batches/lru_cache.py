"""A cache of limited size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """Values by key; at most `maxsize` of them, the most recently used."""

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """Return the value, or None if it is absent or was evicted."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value; evict the least recently used one if the cache is full."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._maxsize:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
