"""Bytes in use in one memory, by category and owner, with a budget.

A ledger counts; it does not allocate. Memory charts, forecasts and out-of-memory messages read their numbers here.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from l2l_core.trace import format_bytes

_TRIED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")  # of PyTorch's message
_BINARY_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class DeviceOutOfMemory(MemoryError):
    """An allocation would exceed the device's byte budget.

    Attributes:
        requested_bytes: size of the allocation that failed.
        limit_bytes: the budget; without one, the bytes booked when the allocator failed.
        bytes_by_category: bytes in use at that moment.
        requested_for: purpose of the allocation and the activity, in words; empty if unknown.
        raised_s: time of the error, in seconds of `time.perf_counter`.
        remedy: last lines of the message; a relay replaces them with remedies that it has tried.
        settings: fields of `RelayConfig` with which the step was found to fit, if any.
        least_bytes: smallest budget found to fit, with any settings; None without a search.

    Example:
        >>> from l2l_core import DeviceOutOfMemory, EmulatedDevice
        >>> relay.close()  # a model belongs to one relay
        >>> small = EmulatedDevice(memory_bytes=10_000)
        >>> with Relay(model, device=small, loss=nn.CrossEntropyLoss()) as relay:
        ...     try:
        ...         result = relay.step(batch)
        ...     except DeviceOutOfMemory as error:
        ...         error.limit_bytes
        10000
    """

    def __init__(
        self,
        message: str,
        requested_bytes: int,
        limit_bytes: int,
        bytes_by_category: Mapping[str, int],
        requested_for: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.settings: Mapping[str, Any] = {}
        self.least_bytes: int | None = None
        self.requested_bytes = requested_bytes
        self.limit_bytes = limit_bytes
        self.bytes_by_category = dict(bytes_by_category)
        self.requested_for = requested_for
        self.raised_s = time.perf_counter()

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the allocation exceeded the budget."""
        return max(0, sum(self.bytes_by_category.values()) + self.requested_bytes - self.limit_bytes)

    def __str__(self) -> str:
        return "\n".join(filter(None, [super().__str__(), self.remedy]))


class Ledger:
    """Bytes in use in one memory ("device" or "host").

    Invariant: the total equals the sum over categories and never exceeds `limit_bytes`. Booking is thread-safe: storages may die,
    and so release their bytes, in any thread.

    Attributes:
        changes: number of bookings and releases; if unchanged, so is everything else.
    """

    def __init__(self, place: str, name: str, limit_bytes: int | None = None) -> None:
        self.place, self.name, self.limit_bytes = place, name, limit_bytes
        self.total = 0
        self.peak = 0
        self.changes = 0
        self.advise: Callable[[int], str] = lambda missing_bytes: ""
        self.activity: Callable[[], str] = lambda: ""
        self._owned: Counter[tuple[str, str]] = Counter()
        self._sums: Counter[str] = Counter()  # by category
        self._high_water: dict[str, int] = {}
        self._high_water_total = -1
        # Reentrant: the garbage collector may free a storage, which releases its bytes, while this thread books.
        self._lock = threading.RLock()

    def book(self, category: str, owner: str, nbytes: int) -> None:
        """Add `nbytes` to a category and owner.

        Raises:
            DeviceOutOfMemory: the budget would be exceeded; nothing is booked.
        """
        with self._lock:
            if self.limit_bytes is not None and self.total + nbytes > self.limit_bytes:
                raise self._out_of_memory(category, owner, nbytes)
            self._add(category, owner, nbytes)
            if self.total > self._high_water_total:
                self._high_water_total, self._high_water = self.total, {}
            self.peak = max(self.peak, self.total)

    def release(self, category: str, owner: str, nbytes: int) -> None:
        """Subtract `nbytes` from a category and owner."""
        with self._lock:
            if self.total == self._high_water_total and not self._high_water:
                self._high_water = self.by_category()  # copied only when the total leaves its peak
            self._add(category, owner, -nbytes)

    def move(self, category: str, owner: str, to_category: str, to_owner: str, nbytes: int) -> None:
        """Move bytes to another category or owner; the total stays."""
        with self._lock:
            self._add(category, owner, -nbytes)
            self._add(to_category, to_owner, nbytes)

    def _add(self, category: str, owner: str, nbytes: int) -> None:
        left = self._owned[category, owner] + nbytes
        assert left >= 0, f"{self.place}: {category} of {owner} released twice ({left} bytes)"
        self._owned[category, owner] = left
        if not left:
            del self._owned[category, owner]
        self._sums[category] += nbytes
        self.total += nbytes
        self.changes += 1

    def by_category(self) -> dict[str, int]:
        """Return the bytes in use by category, without zeros."""
        with self._lock:
            return {name: nbytes for name, nbytes in self._sums.items() if nbytes}

    def by_owner(self, category: str) -> dict[str, int]:
        """Return the bytes of one category in use now, by owner."""
        with self._lock:
            return {owner: nbytes for (c, owner), nbytes in self._owned.items() if c == category}

    def take_high_water(self) -> dict[str, int]:
        """Return the bytes by category at the highest total since the last call, and reset it."""
        with self._lock:
            high = self._high_water or self.by_category()
            self.reset_high_water()
            return high

    def reset_high_water(self) -> None:
        """Restart the search for the highest total from the bytes in use now."""
        with self._lock:
            self._high_water, self._high_water_total = {}, self.total

    def reset_peak(self) -> None:
        """Restart the peak from the bytes in use now."""
        with self._lock:
            self.peak = self.total
            self.reset_high_water()

    def allocator_error(self, error: BaseException) -> DeviceOutOfMemory:
        """Return the error for an allocation that the device's own allocator refused, with its message and the booked bytes."""
        found = _TRIED.search(str(error))
        nbytes = int(float(found[1]) * _BINARY_UNITS[found[2]]) if found else 0
        during = self._during()
        first = f"{self.name} has no memory left{during}; {format_bytes(self.total)} are booked. The allocator: {error}"
        return self._error(first, nbytes, self.limit_bytes or self.total, nbytes, f"memory{during}")

    def _during(self) -> str:
        activity = self.activity()
        return f" during {activity}" if activity else ""

    def _out_of_memory(self, category: str, owner: str, nbytes: int) -> DeviceOutOfMemory:
        assert self.limit_bytes is not None
        missing = self.total + nbytes - self.limit_bytes
        what, during = f"{category} for {owner or 'micro-batches'}", self._during()
        first = (
            f"{self.name} is full: {format_bytes(nbytes)} of {what} were being allocated{during}"
            f", but {format_bytes(self.total)} of {format_bytes(self.limit_bytes)} are in use "
            f"({format_bytes(missing)} too little)."
        )
        return self._error(first, nbytes, self.limit_bytes, missing, what + during)

    def _error(self, first: str, nbytes: int, limit_bytes: int, missing: int, what: str) -> DeviceOutOfMemory:
        """Return the error that lists `first`, the bytes in use by category, and a remedy."""
        lines = [first]
        for kind, booked in sorted(self.by_category().items(), key=lambda item: -item[1]):
            owners = sorted(self.by_owner(kind).items(), key=lambda item: -item[1])
            shown = ", ".join(f"{name or 'micro-batches'} {format_bytes(n)}" for name, n in owners[:4])
            more = f", and {len(owners) - 4} more" if len(owners) > 4 else ""
            lines.append(f"  {kind:<12} {format_bytes(booked):>10}  ({shown}{more})")
        return DeviceOutOfMemory("\n".join(lines), nbytes, limit_bytes, self.by_category(), what, self.advise(missing))
