"""Layers that are in no stack: their weights and what the optimizer knows of them, in memory or on disk, and the books."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from l2l_core.devices import ForkGuard, Ledger, disk_full_error, is_disk_full, write_tensors
from l2l_core.eps import BlockContents, OptimizerEntry
from l2l_core.eps.blocks import Block, EmptyFn, Unit

_DISK_FULL_REMEDY = "Free some, or let TMPDIR name a larger disk; the layer is in memory as before"


@dataclass(eq=False)
class DetachedLayer:
    """Is a layer that waits to be put into a stack.

    Invariant: while `path` is set, neither its weights nor their optimizer state are in memory.
    """

    unit: Unit
    entries: dict[Block, OptimizerEntry]
    path: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(block.nbytes + side.nbytes for block, side in self.entries.items())

    def spill(self) -> None:
        """Move weights and state to a temporary file, which is deleted with the layer or with the process.

        Raises:
            OSError: disk full (says how much is needed, and free); then everything is in memory as before.
        """
        if self.path is not None or all(block.offloaded for block in self.entries):  # a shelf has it on disk
            return
        tensors = self._tensors()
        handle, name = tempfile.mkstemp(prefix=f"parked-{self.unit.key}-", suffix=".safetensors")
        os.close(handle)
        try:
            write_tensors(tensors, name)
        except BaseException as error:
            os.unlink(name)
            if is_disk_full(error):
                raise disk_full_error(
                    error, Path(name).parent, sum(t.nbytes for t in tensors.values()), _DISK_FULL_REMEDY
                ) from error
            raise
        self.path = Path(name)  # from here on nothing fails: the file is whole, and memory may go
        self._delete = weakref.finalize(self, _delete, self.path, ForkGuard())
        self._drop_weights()
        for index, side in enumerate(self.entries.values()):
            for number, master in enumerate(side.masters):
                known = side.state.get(master, {})
                for key, value in known.items():
                    if isinstance(value, torch.Tensor):
                        known[key] = _SpilledTensor(f"{index}/{number}/{key}", tuple(value.stride()))

    def close(self) -> None:
        """Delete the temporary file; what is in it cannot be fetched any more."""
        if self.path is not None:
            self._delete()

    def free(self) -> None:
        """Let go of weights and state, wherever the layer is still known."""
        self._drop_weights()
        for side in self.entries.values():
            side.state.clear()

    def _drop_weights(self) -> None:
        for block, side in self.entries.items():
            block.drop_weights(side.masters)

    def read_spilled(self) -> dict[Block, BlockContents]:
        """Give master and state of each parameter of a layer that waits on disk, by block; they are mapped from there."""
        assert self.path is not None
        held = load_file(self.path)
        return {
            block: (
                held[f"{index}/master"],
                [
                    {key: _load_value(value, held) for key, value in side.state[master].items()}
                    if master in side.state
                    else None
                    for master in side.masters
                ],
            )
            for index, (block, side) in enumerate(self.entries.items())
        }

    def load(self, empty: EmptyFn) -> None:
        """Bring weights and state back to memory; `empty` makes a host buffer of so many elements of a `dtype`."""
        if self.path is None:
            return
        held = load_file(self.path)
        for index, (block, side) in enumerate(self.entries.items()):
            # A copy: what was loaded is mapped from the file, which is deleted below
            saved = held[f"{index}/master"]
            block.set_master(empty(block.layout.numel, dtype=saved.dtype).copy_(saved), side.masters)
            for known in side.state.values():
                known.update({key: _load_value(value, held) for key, value in known.items()})
        self._delete()
        self.path = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = {f"{i}/master": block.values for i, block in enumerate(self.entries)}
        for index, side in enumerate(self.entries.values()):
            for number, master in enumerate(side.masters):
                for key, value in side.state.get(master, {}).items():
                    if isinstance(value, torch.Tensor):
                        held[f"{index}/{number}/{key}"] = value.contiguous()  # the file has no strides; `_Away` has
        return held


class DetachedLayers:
    """Keeps the parked layers of one relay.

    Invariant: the bytes of a parked layer that are in memory are booked, and statistics of steps it has none.

    Args:
        host: gets the bytes booked.
        empty: makes a host buffer of so many elements of a `dtype`.
    """

    def __init__(self, host: Ledger, empty: EmptyFn) -> None:
        self._host, self._empty = host, empty
        self._layers: dict[Unit, DetachedLayer] = {}
        self._entries: dict[Block, OptimizerEntry] = {}
        self._booked: dict[Unit, int] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._layers

    def __iter__(self) -> Iterator[DetachedLayer]:
        return iter(tuple(self._layers.values()))

    def __getitem__(self, unit: Unit) -> DetachedLayer:
        return self._layers[unit]

    def entry_of(self, block: Block) -> OptimizerEntry | None:
        """Give what the optimizer holds of a parked block; None if it is not parked."""
        return self._entries.get(block)

    @property
    def entries(self) -> Mapping[Block, OptimizerEntry]:
        """What the optimizer holds of every parked block."""
        return self._entries

    def add(self, layer: DetachedLayer) -> None:
        """Take a layer in."""
        self._layers[layer.unit] = layer
        layer.unit.stats.clear()  # what steps tell of layers is of those that were in them
        self._entries.update(layer.entries)
        self._booked[layer.unit] = layer.nbytes
        self._host.book("other", f"parked {layer.unit.key}", layer.nbytes)

    def pop(self, unit: Unit) -> DetachedLayer:
        """Let a layer go."""
        self._host.release("other", f"parked {unit.key}", self._booked.pop(unit))
        parked = self._layers.pop(unit)
        for block in parked.entries:
            del self._entries[block]
        return parked

    def spill(self, unit: Unit) -> None:
        """Let a parked layer wait on disk; one that is in a stack stays where it is."""
        if unit in self._layers:
            self._change(unit, DetachedLayer.spill)

    def load(self, unit: Unit) -> None:
        """Bring a layer back to memory, if it waits on disk."""
        if unit in self._layers and self._layers[unit].path is not None:
            self._change(unit, lambda parked: parked.load(self._empty))

    def rebook(self) -> None:
        """Book anew what layers hold, after values have been exchanged: it may have another size."""
        for unit in list(self._layers):
            self.add(self.pop(unit))

    def close(self) -> None:
        """Leave nothing on disk."""
        for parked in self._layers.values():
            parked.close()

    def _change(self, unit: Unit, change: Callable[[DetachedLayer], None]) -> None:
        parked = self.pop(unit)
        try:
            change(parked)
        finally:  # also where it failed: the layer is still parked, and booked as it lies now
            self.add(parked)


def _delete(path: Path, fork_guard: ForkGuard) -> None:
    """Delete the file, but not from a process that was forked from ours, which counts on it."""
    if fork_guard.is_current:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _SpilledTensor:
    """Stands for a tensor of the optimizer's state that is in the file."""

    name: str
    stride: tuple[int, ...]


def _load_value(value: Any, held: dict[str, torch.Tensor]) -> Any:
    """Give a value of the optimizer's state, from the file if it is there."""
    if not isinstance(value, _SpilledTensor):
        return value
    saved = held[value.name]
    return torch.empty_strided(saved.shape, value.stride, dtype=saved.dtype).copy_(saved)
