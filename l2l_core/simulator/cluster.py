"""Workers of a simulated step: their number, network, speeds, and shards of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
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

# Messages to all: handshake, two for clocks; handshake and values for the weights of batches, and for losses
_CONTROL_MESSAGES = 7


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Several workers, as the arguments of `simulate`; `rank` is the one that is observed.

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
                raise ValueError(f"worker {rank!r} of {self.count}: must be a number from 0 to {self.count - 1}")
        for rank, factor in self.stragglers.items():
            if not (factor > 0 and math.isfinite(factor)):
                raise ValueError(f"stragglers={{{rank}: {factor!r}}}: must be positive, such as 1.5 for 50 % more time")

    def figures(self) -> dict[str, Any]:
        """Return the cluster as plain values, for the settings of a trace."""
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
        """Return the factor by which a worker is slower."""
        return self.stragglers.get(rank, 1.0)

    @property
    def per_micro_batch(self) -> bool:
        """True if workers send the gradient of every micro-batch."""
        return self.count > 1 and self.reduce == "ordered"

    @property
    def overhead_s(self) -> float:
        """Seconds of control messages that a trace does not show."""
        return _CONTROL_MESSAGES * self.network.delay_s(handshake_traffic(self.count))

    @property
    def simulated_ranks(self) -> list[int]:
        """One worker of every speed, the observed one first; workers of equal speed behave alike.

        The last worker may hold less than the others, which counts only if it is observed.
        """
        kinds: dict[float, int] = {self.slowdown(self.rank): self.rank}
        for rank in (*self.stragglers, *range(min(self.count, len(self.stragglers) + 2))):
            kinds.setdefault(self.slowdown(rank), rank)
        return list(kinds.values())


class BlockShards(NamedTuple):
    """Shards of a block on all workers."""

    key: str
    layout: ShardLayout
    gradient_numels: tuple[int, ...]  # elements of the gradient on each worker

    @staticmethod
    def of(key: str, layout: Layout, trained: TrainedParameters, count: int, elementwise: bool) -> BlockShards:
        """Split a block among `count` workers, as `workers/shard_layout.py` does."""
        shards = ShardLayout.of(layout, count, elementwise)
        return BlockShards(key, shards, _range_sizes(shards.gradient_edges(trained)))

    def gather_traffic(self, itemsize: int, rank: int) -> list[Traffic]:
        """Return the collectives that gather the whole block on all workers."""
        count = len(self.layout.edges) - 1
        if self.layout.uniform_numel:
            return [all_gather_traffic(itemsize * self.layout.uniform_numel, count)]
        return _broadcast_all(self.layout.edges, itemsize, rank)

    def exchange_traffic(self, itemsize: int, rank: int) -> Traffic:
        """Return the collective that sends each worker all gradients of its shard."""
        return all_to_all_traffic([itemsize * numel for numel in self.gradient_numels], rank)

    def clip_traffic(self, rank: int) -> list[Traffic]:
        """Return the collectives that gather the whole gradient on all workers."""
        return _broadcast_all([0, *accumulate(self.gradient_numels)], 4, rank)

    def update_share(self, rank: int) -> float:
        """Return the fraction of the block's updates that a worker makes."""
        return self.gradient_numels[rank] / (sum(self.gradient_numels) or 1)


def shards_of_profile(profile: Profile, count: int) -> dict[str, list[BlockShards]]:
    """Split layers of known size: each is one block, with trained parameters evenly spread.

    A shared block is loaded with each of its layers, and its gradient is a block by itself.
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
    """Return the broadcasts of all workers' ranges."""
    sizes = _range_sizes(edges)
    return [broadcast_traffic(itemsize * size, len(sizes), source, rank) for source, size in enumerate(sizes) if size]


def _range_sizes(edges: Sequence[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(edges))
