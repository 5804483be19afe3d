"""Bytes of storages that torch operations make: booked in the device's ledger while they live, exact at every moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from l2l_core._torch import TorchDispatchMode, pytree
from l2l_core.devices import Ledger
from l2l_core.strategies.frame_lifetimes import FrameRecorder


class AllocationMeter(TorchDispatchMode):
    """Counts every storage that is made while it is on, from its making to its end.

    Invariant: `now` is the sum of bytes of counted storages that are on the device; the ledger has as much more than before.

    Args:
        ledger: of the device; its budget is what raises `DeviceOutOfMemory`.
        exempt: tensors that are counted by somebody else.

    Attributes:
        high: the most bytes since `take_high`.
        seen: is told of storages that come and go, if there is one.
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
        """Do not count the storages of these, which are somebody else's."""
        self._exempt_keys.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._exempt_keys or key in self._live or not nbytes:
            return
        self._live[key] = _CountedStorage(weakref.ref(storage, partial(self._on_collected, key)), "activations")
        try:
            self._book(key, nbytes)
        except BaseException:
            del self._live[key]
            raise

    def _book(self, key: int, nbytes: int) -> None:
        self._ledger.book(self._live[key].category, "", nbytes)
        self._live[key].nbytes = nbytes
        self.current_bytes += nbytes
        self.high_water = max(self.high_water, self.current_bytes)
        if self.recorder:
            self.recorder.on_allocated(nbytes)

    def _on_collected(self, key: int, _: Any) -> None:
        if key in self._live:
            self.on_emptied(key)
            del self._live[key]

    def on_emptied(self, key: int) -> None:
        """A storage has been emptied, or is gone."""
        counted = self._live[key]
        self._ledger.release(counted.category, "", counted.nbytes)
        self.current_bytes -= counted.nbytes
        if self.recorder:
            self.recorder.on_freed(key, counted.nbytes)
        counted.nbytes = 0

    def on_refilled(self, key: int, nbytes: int) -> None:
        """A storage that has been emptied gets so many bytes again."""
        self._book(key, nbytes)

    def bytes_of(self, keys: Iterable[int]) -> int:
        """Return the bytes on the device of those storages that are counted."""
        return sum(self._live[key].nbytes for key in {*keys} if key in self._live)

    def storage(self, key: int) -> torch.UntypedStorage | None:
        """Return a counted storage that is on the device; None if it is gone, away, or somebody else's."""
        counted = self._live.get(key)
        return counted.ref() if counted and counted.nbytes else None

    def set_category(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Let the ledger know storages under another category."""
        for tensor in tensors:
            counted = self._live.get(tensor.untyped_storage()._cdata)
            if counted and counted.category != category:
                self._ledger.move(counted.category, "", category, "", counted.nbytes)
                counted.category = category

    def take_high_water(self) -> int:
        """Return the most bytes since the last call."""
        high, self.high_water = self.high_water, self.current_bytes
        return high

    def close(self) -> None:
        """Give back to the ledger what still lives; it is somebody else's from now on."""
        for key in list(self._live):
            self.on_emptied(key)
            del self._live[key]


class _CountedStorage:
    __slots__ = ("category", "nbytes", "ref")

    def __init__(self, ref: weakref.ref[torch.UntypedStorage], category: str) -> None:
        self.ref, self.category, self.nbytes = ref, category, 0
