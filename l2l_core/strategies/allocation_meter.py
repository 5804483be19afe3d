"""Meter of the storages that torch operations make; their bytes are booked in the device's ledger while they are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from l2l_core._torch import TorchDispatchMode, pytree
from l2l_core.devices import Ledger
from l2l_core.strategies.frame_lifetimes import FrameRecorder


@dataclass(eq=False, slots=True)
class _CountedStorage:
    ref: weakref.ref[torch.UntypedStorage]
    category: str = "activations"
    nbytes: int = 0  # 0 while it is offloaded


class AllocationMeter(TorchDispatchMode):
    """A dispatch mode that counts every storage made in it, from its allocation to its end.

    Invariant: `current_bytes` is the sum of the counted storages on the device, and the ledger holds as much for them.

    Args:
        ledger: ledger of the device; its budget raises `DeviceOutOfMemory`.
        exempt: tensors that are not counted.

    Attributes:
        current_bytes: bytes at this moment.
        high_water: peak bytes since `take_high_water`.
        recorder: records allocations and releases, if set.

    Example:
        >>> from l2l_core import EmulatedDevice
        >>> from l2l_core.strategies import AllocationMeter
        >>> with AllocationMeter(EmulatedDevice().ledger) as meter:
        ...     y = torch.zeros(100)
        ...     meter.current_bytes
        ...     del y
        ...     meter.current_bytes, meter.high_water
        400
        (0, 400)
    """

    def __init__(self, ledger: Ledger, exempt: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._ledger = ledger
        self._exempt_keys: set[int] = set()
        self.exempt(exempt)
        self._live: dict[int, _CountedStorage] = {}
        self.current_bytes = self.high_water = 0
        self.recorder: FrameRecorder | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._count(leaf.untyped_storage())
        return out

    def exempt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the storages of `tensors`, which are booked elsewhere or are on the host."""
        self._exempt_keys.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._exempt_keys or key in self._live or not nbytes:
            return
        self._live[key] = _CountedStorage(weakref.ref(storage, partial(self._on_collected, key)))
        try:
            self.on_refilled(key, nbytes)
        except BaseException:
            del self._live[key]
            raise

    def _on_collected(self, key: int, _: Any) -> None:
        if key in self._live:
            self.on_emptied(key)
            del self._live[key]

    def on_emptied(self, key: int) -> None:
        """Release the bytes of a storage that was emptied or has ended."""
        counted = self._live[key]
        self._ledger.release(counted.category, "", counted.nbytes)
        self.current_bytes -= counted.nbytes
        if self.recorder:
            self.recorder.on_freed(key, counted.nbytes)
        counted.nbytes = 0

    def on_refilled(self, key: int, nbytes: int) -> None:
        """Book the bytes of a storage that is new, or was emptied and has memory again."""
        self._ledger.book(self._live[key].category, "", nbytes)
        self._live[key].nbytes = nbytes
        self.current_bytes += nbytes
        self.high_water = max(self.high_water, self.current_bytes)
        if self.recorder:
            self.recorder.on_allocated(nbytes)

    def bytes_of(self, keys: Iterable[int]) -> int:
        """Return the bytes on the device of those storages that are counted."""
        return sum(self._live[key].nbytes for key in {*keys} if key in self._live)

    def storage(self, key: int) -> torch.UntypedStorage | None:
        """Return a counted storage that is on the device, else None."""
        counted = self._live.get(key)
        return counted.ref() if counted and counted.nbytes else None

    def set_category(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Move the storages of `tensors` to another category of the ledger."""
        for tensor in tensors:
            counted = self._live.get(tensor.untyped_storage()._cdata)
            if counted and counted.category != category:
                self._ledger.move(counted.category, "", category, "", counted.nbytes)
                counted.category = category

    def take_high_water(self) -> int:
        """Return the peak bytes since the last call."""
        high, self.high_water = self.high_water, self.current_bytes
        return high

    def close(self) -> None:
        """Release all bytes in the ledger; storages that are still alive are no longer counted."""
        for key in list(self._live):
            self._on_collected(key, None)
