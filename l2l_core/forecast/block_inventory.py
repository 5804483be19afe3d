"""Bytes of masters and optimizer state of every block, for the whole model or for one of several workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from l2l_core.eps import Updater
from l2l_core.eps.blocks import SHELL, Block, Layout, TrainedParameters, Unit
from l2l_core.eps.optimizers import state_bytes
from l2l_core.simulator import BlockShards


@dataclass(frozen=True, slots=True)
class BlockInventory:
    """Sizes of a block."""

    key: str
    layout: Layout
    trained: TrainedParameters
    state: tuple[tuple[int, int], ...]  # by parameter: bytes that are divided with its elements, and other bytes

    def state_bytes(self, part: Layout) -> int:
        """Return the bytes of optimizer state for a part of the block."""
        total = 0
        for whole, piece, (divided, rest) in zip(self.layout.pieces, part.pieces, self.state, strict=True):
            if piece.size == whole.size:
                total += divided + rest
            elif math.prod(piece.size):
                total += divided * math.prod(piece.size) // math.prod(whole.size) + rest
        return total


@dataclass(frozen=True, slots=True)
class Inventory:
    """Sizes of all blocks."""

    blocks_by_unit: Mapping[str, tuple[BlockInventory, ...]]  # a shared block is in each of its layers
    elementwise: bool  # updates treat every element separately, so that blocks can be divided anywhere

    @staticmethod
    def of(units: Sequence[Unit], updater: Updater, elementwise: bool) -> Inventory:
        """Measure the blocks of these units."""
        blocks = {block: _inventory_of(block, updater) for unit in units for block in unit.blocks}
        return Inventory({unit.key: tuple(blocks[block] for block in unit.blocks) for unit in units}, elementwise)

    def shard(self, count: int) -> dict[str, list[BlockShards]]:
        """Divide every block among `count` workers."""
        return {
            key: [BlockShards.of(b.key, b.layout, b.trained, count, self.elementwise) for b in blocks]
            for key, blocks in self.blocks_by_unit.items()
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state."""
        return sum(block.state_bytes(block.layout) for block in self._distinct_blocks())

    def worker_bytes(self, shards: Mapping[str, Sequence[BlockShards]], rank: int) -> dict[str, int]:
        """Return the bytes of masters ("weights") and of optimizer state ("optimizer") of a worker."""
        layouts = {shard.key: shard.layout for each in shards.values() for shard in each}
        blocks = self._distinct_blocks()
        return {
            "weights": sum(4 * layouts[block.key].shard_numel(rank) for block in blocks),
            "optimizer": sum(block.state_bytes(layouts[block.key].shard(rank)) for block in blocks),
        }

    def worker_layer_bytes(self, shards: Mapping[str, Sequence[BlockShards]], rank: int) -> dict[str, int]:
        """Return the bytes of a worker by layer, without shared blocks and the shell."""
        found = {}
        for key, blocks in self.blocks_by_unit.items():
            pairs = zip(blocks, shards[key], strict=True)
            own = [(block, shard.layout) for block, shard in pairs if block.key == key]
            found[key] = sum(4 * cut.shard_numel(rank) + block.state_bytes(cut.shard(rank)) for block, cut in own)
        return {key: nbytes for key, nbytes in found.items() if key != SHELL}

    def _distinct_blocks(self) -> list[BlockInventory]:
        return list({block.key: block for blocks in self.blocks_by_unit.values() for block in blocks}.values())


def _inventory_of(block: Block, updater: Updater) -> BlockInventory:
    sizes = []
    for param, state in zip(block.params, updater.state_of(block), strict=True):
        divided = sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.shape == param.shape)
        sizes.append((divided, state_bytes(state) - divided))
    return BlockInventory(block.key, block.layout, block.trained, tuple(sizes))
