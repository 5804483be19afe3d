"""Who reads weights of layers that were not called yet: code of the shell, or a hook before a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from l2l_core.eps.blocks import Unit
from l2l_core.step.graph import BufferOrder
from l2l_core.step.traffic import Stash, StashMode


class EarlyReadMode(StashMode):
    """The watch of a step depth first, which looks besides who reads weights of layers that were not called yet.

    Attributes:
        uncalled: these layers, by the storage that their weights lie in.
        read_early: keys of those that were read.
    """

    def __init__(self, stash: Stash, buffer_order: BufferOrder) -> None:
        super().__init__(stash, buffer_order)
        self.uncalled: dict[int, Unit] = {}
        self.early_read_layers: set[str] = set()

    def register(self, unit: Unit, shell: Unit) -> None:
        """Hear of a layer that is there before its first call; what it has in common with the shell is read anyway."""
        self.uncalled |= dict.fromkeys(_storage_keys(unit) - _storage_keys(shell), unit)

    def unregister(self, unit: Unit) -> None:
        """Hear of that call."""
        for key in _storage_keys(unit) & self.uncalled.keys():
            del self.uncalled[key]

    def _prepare_reads(self, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any]) -> None:
        self.early_read_layers.update(self.uncalled[key].key for key in self.uncalled.keys() & reads.keys())
        super()._prepare_reads(func, reads, args)


def _storage_keys(unit: Unit) -> set[int]:
    return {param.untyped_storage()._cdata for param in unit.params}
