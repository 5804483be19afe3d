"""A layer that is in no stack: its weights and what the optimizer knows of them, in memory or on disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from l2l_core.devices import Process, is_full, no_room, write_tensors
from l2l_core.eps import Side
from l2l_core.eps.blocks import Block, Unit

_AFTER_FULL = "Free some, or let TMPDIR name a larger disk; the layer is in memory as before"


@dataclass(eq=False)
class Parked:
    """A layer that waits to be put into a stack.

    Invariant: while `path` is set, neither its weights nor their optimizer state are in memory.
    """

    unit: Unit
    sides: dict[Block, Side]
    path: Path | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(block.nbytes + side.nbytes for block, side in self.sides.items())

    def spill(self) -> None:
        """Move weights and state to a temporary file, which is deleted with the layer or with the process.

        Raises:
            OSError: disk full (says how much is needed, and free); then everything is in memory as before.
        """
        if self.path is not None:
            return
        handle, name = tempfile.mkstemp(prefix=f"parked-{self.unit.key}-", suffix=".safetensors")
        os.close(handle)
        tensors = self._tensors()
        try:
            write_tensors(tensors, name)
        except BaseException as error:
            os.unlink(name)
            if is_full(error):
                raise no_room(error, Path(name).parent, sum(t.nbytes for t in tensors.values()), _AFTER_FULL) from error
            raise
        self.path = Path(name)
        self._delete = weakref.finalize(self, _delete, self.path, Process())
        self._empty_weights()
        for index, side in enumerate(self.sides.values()):
            for number, master in enumerate(side.masters):
                known = side.state.get(master, {})
                for key, value in known.items():
                    if isinstance(value, torch.Tensor):
                        known[key] = _Away(f"{index}/{number}/{key}", tuple(value.stride()))

    def close(self) -> None:
        """Delete the temporary file; what is in it cannot be fetched any more."""
        if self.path is not None:
            self._delete()

    def empty(self) -> None:
        """Let go of weights and state, wherever the layer is still known."""
        self._empty_weights()
        for side in self.sides.values():
            side.state.clear()

    def _empty_weights(self) -> None:
        for block, side in self.sides.items():
            block.master, block.views, block.cast = torch.empty(0), [], None
            for param in (*block.params, *side.masters):
                param.data = torch.empty(0)

    def contents(self) -> dict[Block, tuple[torch.Tensor, list[dict[str, Any] | None]]]:
        """Master and state of each parameter, by block; what is on disk is mapped from there."""
        held = {} if self.path is None else load_file(self.path)
        return {
            block: (
                held.get(f"{index}/master", block.master),
                [
                    {key: _bring(value, held) for key, value in side.state[master].items()}
                    if master in side.state
                    else None
                    for master in side.masters
                ],
            )
            for index, (block, side) in enumerate(self.sides.items())
        }

    def fetch(self, empty: Callable[[int], torch.Tensor]) -> None:
        """Bring weights and state back to memory; `empty` makes a float32 host buffer of so many elements."""
        if self.path is None:
            return
        held = load_file(self.path)
        for index, (block, side) in enumerate(self.sides.items()):
            block.hold(empty(block.layout.numel).copy_(held[f"{index}/master"]), side.masters)
            for known in side.state.values():
                known.update({key: _bring(value, held) for key, value in known.items()})
        self._delete()
        self.path = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = {f"{i}/master": block.master for i, block in enumerate(self.sides)}
        for index, side in enumerate(self.sides.values()):
            for number, master in enumerate(side.masters):
                for key, value in side.state.get(master, {}).items():
                    if isinstance(value, torch.Tensor):
                        held[f"{index}/{number}/{key}"] = value.contiguous()
        return held


def _delete(path: Path, process: Process) -> None:
    """A process that was forked from ours must not delete what ours counts on."""
    if process.is_this:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Away:
    """A tensor of the optimizer's state that is in the file."""

    name: str
    stride: tuple[int, ...]


def _bring(value: Any, held: dict[str, torch.Tensor]) -> Any:
    """A value of the optimizer's state, from the file if it is there."""
    if not isinstance(value, _Away):
        return value
    saved = held[value.name]
    return torch.empty_strided(saved.shape, value.stride, dtype=saved.dtype).copy_(saved)
