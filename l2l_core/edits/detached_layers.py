"""Detached layers: weights and optimizer state of layers in no stack, in memory or on disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from l2l_core.devices import ForkGuard, Ledger, explain_full_disk, write_tensors
from l2l_core.eps import BlockContents, OptimizerEntry
from l2l_core.eps.blocks import Block, EmptyFn, Unit

_DISK_FULL_REMEDY = "Free some, or set TMPDIR to a folder on a larger disk; the layer is in memory as before"


@dataclass(eq=False)
class DetachedLayer:
    """A layer in no stack, with its optimizer state.

    Invariant: while `path` is set, weights and optimizer state are in that file and not in memory.
    """

    unit: Unit
    entries: dict[Block, OptimizerEntry]
    path: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(block.nbytes + entry.nbytes for block, entry in self.entries.items())

    def spill(self) -> None:
        """Move weights and state to a temporary file; it is deleted with the layer or the process.

        Raises:
            OSError: the disk is full; everything is in memory as before.
        """
        if self.path is not None or all(
            block.offloaded for block in self.entries
        ):  # already in the file, or on a shelf
            return
        states = [
            (f"{index}/{number}/{name}", state, name, value)
            for index, entry in enumerate(self.entries.values())
            for number, state in enumerate(entry.state.get(master, {}) for master in entry.masters)
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        ]
        tensors = {f"{index}/master": block.values for index, block in enumerate(self.entries)}
        tensors |= {label: value.contiguous() for label, _, _, value in states}
        handle, file = tempfile.mkstemp(prefix=f"parked-{self.unit.key}-", suffix=".safetensors")
        os.close(handle)
        with explain_full_disk(Path(file).parent, sum(t.nbytes for t in tensors.values()), _DISK_FULL_REMEDY):
            try:
                write_tensors(tensors, file)
            except BaseException:
                os.unlink(file)
                raise
        self.path = Path(file)  # the file is complete, and nothing below can fail
        self._delete = weakref.finalize(self, _delete, self.path, ForkGuard())
        self._drop_weights()
        for label, state, name, value in states:
            state[name] = _SpilledTensor(label, tuple(value.stride()))

    def close(self) -> None:
        """Delete the temporary file with the values in it."""
        if self.path is not None:
            self._delete()

    def free(self) -> None:
        """Free weights and state, even if the layer is still referenced."""
        self._drop_weights()
        for entry in self.entries.values():
            entry.state.clear()

    def _drop_weights(self) -> None:
        for block, entry in self.entries.items():
            block.drop_weights(entry.masters)

    def read_spilled(self) -> dict[Block, BlockContents]:
        """Return master and state of each parameter by block, memory-mapped from the file."""
        assert self.path is not None
        held = load_file(self.path)

        def read(value: Any) -> Any:
            if not isinstance(value, _SpilledTensor):
                return value
            saved = held[value.name]
            return torch.empty_strided(saved.shape, value.stride, dtype=saved.dtype).copy_(saved)

        found: dict[Block, BlockContents] = {}
        for index, (block, entry) in enumerate(self.entries.items()):
            states = [entry.state.get(master) for master in entry.masters]
            found[block] = (
                held[f"{index}/master"],
                [state and {name: read(value) for name, value in state.items()} for state in states],
            )
        return found

    def load(self, empty: EmptyFn) -> None:
        """Load weights and state from the file; `empty` allocates host buffers."""
        if self.path is None:
            return
        for block, (saved, states) in self.read_spilled().items():
            masters, state = self.entries[block].masters, self.entries[block].state
            # A copy: loaded tensors are mapped from the file, which is deleted below.
            block.set_master(empty(block.layout.numel, dtype=saved.dtype).copy_(saved), masters)
            for master, values in zip(masters, states, strict=True):
                state.get(master, {}).update(values or {})
        self._delete()
        self.path = None


class DetachedLayers:
    """The detached layers of one relay.

    Invariant: their bytes in memory are booked, and they have no statistics of steps.
    """

    def __init__(self, host: Ledger, empty: EmptyFn) -> None:
        self._host, self._empty = host, empty
        self._layers: dict[Unit, DetachedLayer] = {}
        self.entries: dict[Block, OptimizerEntry] = {}  # of the optimizer, for all detached blocks
        self._booked: dict[Unit, int] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._layers

    def __iter__(self) -> Iterator[DetachedLayer]:
        return iter(tuple(self._layers.values()))

    def __getitem__(self, unit: Unit) -> DetachedLayer:
        return self._layers[unit]

    def add(self, layer: DetachedLayer) -> None:
        """Add a layer and book its bytes."""
        self._layers[layer.unit] = layer
        layer.unit.stats.clear()
        self.entries.update(layer.entries)
        self._booked[layer.unit] = layer.nbytes
        self._host.book("other", f"parked {layer.unit.key}", layer.nbytes)

    def pop(self, unit: Unit) -> DetachedLayer:
        """Remove and return a layer; release its bytes."""
        self._host.release("other", f"parked {unit.key}", self._booked.pop(unit))
        layer = self._layers.pop(unit)
        for block in layer.entries:
            del self.entries[block]
        return layer

    def spill(self, unit: Unit) -> None:
        """Move a detached layer to disk; do nothing for a layer in a stack."""
        if unit in self._layers:
            self._change(unit, DetachedLayer.spill)

    def load(self, unit: Unit) -> None:
        """Load a layer into memory if it is on disk."""
        if unit in self._layers and self._layers[unit].path is not None:
            self._change(unit, lambda layer: layer.load(self._empty))

    def rebook(self) -> None:
        """Book the bytes of all layers anew, after values of another size were exchanged."""
        for unit in list(self._layers):
            self.add(self.pop(unit))

    def close(self) -> None:
        """Delete all temporary files."""
        for layer in self._layers.values():
            layer.close()

    def _change(self, unit: Unit, change: Callable[[DetachedLayer], None]) -> None:
        layer = self.pop(unit)
        try:
            change(layer)
        finally:  # after a failure, too: the layer is still detached
            self.add(layer)


def _delete(path: Path, fork_guard: ForkGuard) -> None:
    """Delete the file, except in a forked process."""
    if fork_guard.is_current:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _SpilledTensor:
    """Placeholder of a tensor of the optimizer's state that is in the file."""

    name: str
    stride: tuple[int, ...]
