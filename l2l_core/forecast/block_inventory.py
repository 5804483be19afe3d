"""What the EPS has of every block, and what of it each of several workers would have: counted, whole or in parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.eps import Updater
from l2l_core.eps.blocks import SHELL, Layout, TrainedParameters, Unit
from l2l_core.eps.optimizers import state_bytes
from l2l_core.simulator import BlockShards


@dataclass(frozen=True, slots=True)
class BlockInventory:
    """A block.

    Attributes:
        key: of the block.
        layout, trained: of its weights and of its gradient.
        state: of every parameter, bytes of the optimizer's state that follow its elements, and of the rest.
    """

    key: str
    layout: Layout
    trained: TrainedParameters
    state: tuple[tuple[int, int], ...]

    def state_bytes(self, part: Layout | None = None) -> int:
        """Count the bytes of the optimizer's state of a part of the block; default all of it."""
        part = self.layout if part is None else part
        total = 0
        for whole, here, (spread, rest) in zip(self.layout.pieces, part.pieces, self.state, strict=True):
            if here.size == whole.size:
                total += spread + rest
            elif math.prod(here.size):
                total += spread * math.prod(here.size) // math.prod(whole.size) + rest
        return total


@dataclass(frozen=True, slots=True)
class Inventory:
    """All blocks.

    Attributes:
        units: the blocks of every layer, and of the shell, by its key; a shared one is with each of them.
        elementwise: whether updates treat every element by itself, so that blocks can be cut anywhere.
    """

    blocks_by_unit: Mapping[str, tuple[BlockInventory, ...]]
    elementwise: bool

    @staticmethod
    def of(units: Sequence[Unit], updater: Updater, elementwise: bool) -> Inventory:
        """Look at what is there now, or will be after an update."""
        blocks = {block: _inventory_of(block, updater) for unit in units for block in unit.blocks}
        return Inventory({unit.key: tuple(blocks[block] for block in unit.blocks) for unit in units}, elementwise)

    def shard(self, count: int) -> dict[str, list[BlockShards]]:
        """Cut every block for so many workers."""
        return {
            key: [BlockShards.of(held.key, held.layout, held.trained, count, self.elementwise) for held in each]
            for key, each in self.blocks_by_unit.items()
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(held.state_bytes() for held in self._distinct_blocks())

    def worker_bytes(self, shards: Mapping[str, Sequence[BlockShards]], rank: int) -> dict[str, int]:
        """Count the bytes of masters and of the optimizer's state that a worker has."""
        cuts = {share.key: share.layout for each in shards.values() for share in each}
        return {
            "weights": sum(4 * cuts[held.key].shard_numel(rank) for held in self._distinct_blocks()),
            "optimizer": sum(held.state_bytes(cuts[held.key].shard(rank)) for held in self._distinct_blocks()),
        }

    def worker_layer_bytes(self, shards: Mapping[str, Sequence[BlockShards]], rank: int) -> dict[str, int]:
        """Count the same by layer, without what layers share; the shell is none."""
        found = {}
        for key, each in self.blocks_by_unit.items():
            pairs = zip(each, shards[key], strict=True)
            own = [(held, share.layout) for held, share in pairs if held.key == key]
            found[key] = sum(4 * cut.shard_numel(rank) + held.state_bytes(cut.shard(rank)) for held, cut in own)
        return {key: nbytes for key, nbytes in found.items() if key != SHELL}

    def _distinct_blocks(self) -> list[BlockInventory]:
        return list({held.key: held for each in self.blocks_by_unit.values() for held in each}.values())


def _inventory_of(block: Any, updater: Updater) -> BlockInventory:
    sizes = []
    for param, known in zip(block.params, updater.state_of(block), strict=True):
        spread = sum(v.nbytes for v in known.values() if isinstance(v, torch.Tensor) and v.shape == param.shape)
        sizes.append((spread, state_bytes(known) - spread))
    return BlockInventory(block.key, block.layout, block.trained, tuple(sizes))
