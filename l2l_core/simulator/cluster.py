"""Workers that a step is planned with: how many, on which network, how slow some of them are, and what each holds of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from l2l_core.eps.blocks import Layout, TrainedParameters, aligned
from l2l_core.schedule_rules import weight_itemsize
from l2l_core.simulator.profile import Profile
from l2l_core.workers import (
    Network,
    ShardLayout,
    Traffic,
    all_gather_traffic,
    all_to_all_traffic,
    broadcast_traffic,
    handshake_traffic,
)

# Messages to all: meeting, two of clocks; meeting and values of what batches count for, and of losses
_CONTROL_MESSAGES = 7


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Several workers, one of which is looked at.

    Args:
        count: how many there are.
        network: between them.
        stragglers: by rank, how many times as long as usual compute and the EPS take there; links are as fast as elsewhere.
        wire: type in which gradients are sent, "fp32" or "bf16".
        reduce: what is sent of them, the "sum" of a worker's or, "ordered", that of every micro-batch.
        rank: of the worker whose step and bytes are told.

    Raises:
        ValueError, TypeError: a number out of range.
    """

    count: int
    network: Network = field(default_factory=Network)
    stragglers: Mapping[int, float] = field(default_factory=dict)
    wire: str = "fp32"
    reduce: str = "sum"
    rank: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"workers={self.count!r}: must be an integer of at least 1")
        if not isinstance(self.network, Network):
            raise TypeError(
                f"network={self.network!r}: give a Network, such as Network(bytes_per_s=1.25e9, latency_s=5e-5)"
            )
        if self.wire not in ("fp32", "bf16"):
            raise ValueError(f"wire={self.wire!r}: must be one of 'fp32', 'bf16'")
        if self.reduce not in ("sum", "ordered"):
            raise ValueError(f"reduce={self.reduce!r}: must be one of 'sum', 'ordered'")
        for rank in (self.rank, *self.stragglers):
            if not (isinstance(rank, int) and 0 <= rank < self.count):
                raise ValueError(
                    f"worker {rank!r} is none of {self.count}: they are numbered from 0 to {self.count - 1}"
                )
        for rank, factor in self.stragglers.items():
            if not (factor > 0 and math.isfinite(factor)):
                raise ValueError(f"stragglers={{{rank}: {factor!r}}}: must be positive, 1.5 for half as long again")

    def figures(self) -> dict[str, Any]:
        """Return what a trace says of them, as plain values."""
        bytes_per_s = self.network.bytes_per_s if math.isfinite(self.network.bytes_per_s) else None
        return {
            "workers": self.count,
            "network_bytes_per_s": bytes_per_s,
            "network_latency_s": self.network.latency_s,
            "wire": self.wire,
            "reduce": self.reduce,
            "stragglers": {str(rank): factor for rank, factor in self.stragglers.items()},
        }

    def slowdown(self, rank: int) -> float:
        """Give how many times as long as usual a worker takes."""
        return self.stragglers.get(rank, 1.0)

    @property
    def per_micro_batch(self) -> bool:
        """Whether the gradient of every micro-batch is sent by itself."""
        return self.count > 1 and self.reduce == "ordered"

    @property
    def overhead_s(self) -> float:
        """Seconds in which workers tell one another what they begin, count for and have lost, besides what a trace shows."""
        return _CONTROL_MESSAGES * self.network.delay_s(handshake_traffic(self.count))

    @property
    def simulated_ranks(self) -> list[int]:
        """One worker of every kind, the one that is looked at first: what holds for it holds for all of its kind.

        The last worker may hold less than the others, which is what is told of it if it is looked at.
        """
        kinds: dict[float, int] = {self.slowdown(self.rank): self.rank}
        for rank in (*self.stragglers, *range(min(self.count, len(self.stragglers) + 2))):
            kinds.setdefault(self.slowdown(rank), rank)
        return list(kinds.values())


class BlockShards(NamedTuple):
    """What the workers of a fleet hold of a block.

    Attributes:
        key: of the block.
        cut: of its weights.
        gradient: elements of a gradient for each worker, in the order of ranks.
    """

    key: str
    layout: ShardLayout
    gradient_numels: tuple[int, ...]

    @staticmethod
    def of(key: str, layout: Layout, trained: TrainedParameters, count: int, elementwise: bool) -> BlockShards:
        """Cut a block for so many workers, as `workers/shard_layout.py` does."""
        cut = ShardLayout.of(layout, count, elementwise)
        edges = cut.gradient_edges(trained)
        return BlockShards(key, cut, _range_sizes(edges))

    def gather_traffic(self, itemsize: int, rank: int) -> list[Traffic]:
        """Say what brings the whole block to all workers, in elements of so many bytes."""
        count = len(self.layout.edges) - 1
        if self.layout.uniform_numel:
            return [all_gather_traffic(itemsize * self.layout.uniform_numel, count)]
        return _broadcast_all(self.layout.edges, itemsize, rank)

    def exchange_traffic(self, itemsize: int, rank: int) -> Traffic:
        """Say what brings everybody's gradients of its part to each worker, in elements of so many bytes."""
        return all_to_all_traffic([itemsize * numel for numel in self.gradient_numels], rank)

    def clip_traffic(self, rank: int) -> list[Traffic]:
        """Say what brings the whole gradient to all workers."""
        edges = [0]
        for numel in self.gradient_numels:
            edges.append(edges[-1] + numel)
        return _broadcast_all(edges, 4, rank)

    def update_share(self, rank: int) -> float:
        """Give the share of the block's updates that a worker makes."""
        return self.gradient_numels[rank] / (sum(self.gradient_numels) or 1)


def shards_of_profile(profile: Profile, count: int) -> dict[str, list[BlockShards]]:
    """Cut layers of which nothing but bytes is known: each is one block, and what is trained lies evenly in it.

    A block that several layers share travels with each of them, and its gradient by itself.
    """
    itemsize = weight_itemsize(profile.settings.get("precision", "fp32"))
    loaded = {key: cost.load_bytes // itemsize for key, cost in profile.layers.items()}
    pushed = {key: cost.push_bytes for key, cost in profile.layers.items()}
    pushed |= {part.block: part.block_bytes for turn in profile.turns for op in turn.ops for part in op.gradient_parts}
    sizes = {key: (loaded.get(key, 0), pushed[key] // 4) for key in pushed}
    return {key: [_shard_evenly(key, *each, count)] if any(each) else [] for key, each in sizes.items()}


def _shard_evenly(key: str, weights: int, gradient: int, count: int) -> BlockShards:
    size = aligned(-(-gradient // count))
    edges = [min(size * rank, gradient) for rank in range(count + 1)]
    return BlockShards(key, ShardLayout.of(Layout((), weights, weights), count, elementwise=True), _range_sizes(edges))


def _broadcast_all(edges: Sequence[int], itemsize: int, rank: int) -> list[Traffic]:
    """Let every worker in turn give its range to all."""
    sizes = _range_sizes(edges)
    return [broadcast_traffic(itemsize * size, len(sizes), source, rank) for source, size in enumerate(sizes) if size]


def _range_sizes(edges: Sequence[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(edges))
