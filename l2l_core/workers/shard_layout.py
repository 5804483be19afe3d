"""Assignment of a block's elements to workers: one contiguous range each, in the order of ranks.

With an elementwise optimizer all ranges have one size and start where vectorised kernels start a group of elements, so that
updates of shards equal those of the whole block to the bit. With other optimizers ranges end where parameters end, and are as
equal as that allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from l2l_core.eps.blocks import Layout, TrainedParameters, aligned


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Ranges of one block's elements, by worker."""

    layout: Layout  # of the whole block
    edges: tuple[int, ...]  # worker r holds elements ``edges[r]`` to ``edges[r + 1]``
    uniform_numel: int  # elements of each worker's buffer if all buffers have one size; else 0

    @staticmethod
    def of(layout: Layout, count: int, elementwise: bool) -> ShardLayout:
        """Divide a block between `count` workers."""
        if not elementwise:
            return ShardLayout(layout, _parameter_edges(layout, count), 0)
        size = aligned(-(-layout.numel // count))
        return ShardLayout(layout, tuple(min(size * rank, layout.numel) for rank in range(count + 1)), size)

    @property
    def numel(self) -> int:
        """Elements of a buffer for the gathered block."""
        return self.uniform_numel * (len(self.edges) - 1) if self.uniform_numel else self.layout.numel

    def shard_numel(self, rank: int) -> int:
        """Return the number of elements of a worker's buffer."""
        return self.uniform_numel or self.edges[rank + 1] - self.edges[rank]

    def shard(self, rank: int) -> Layout:
        """Return the layout of the block within a worker's buffer."""
        return self.layout.slice(self.edges[rank], self.edges[rank] + self.shard_numel(rank))

    def gradient_edges(self, trained: TrainedParameters) -> list[int]:
        """Return the edges of the ranges in a buffer with the gradient of the trained parameters."""
        edges = []
        for edge in self.edges[:-1]:
            # The first element of a trained parameter at or behind the edge
            places = zip(trained.indices, trained.layout.pieces, strict=True)
            pieces = ((self.layout.pieces[i].offset, piece) for i, piece in places)
            behind = ((start, piece) for start, piece in pieces if start + math.prod(piece.size) > edge)
            starts = (piece.offset + max(0, edge - start) for start, piece in behind)
            edges.append(next(starts, trained.numel))
        return [0, *edges[1:], trained.numel]

    def gradient_shard(self, trained: TrainedParameters, rank: int) -> TrainedParameters:
        """Return the layout of the trained parameters' gradient within a worker's range."""
        start, stop = self.gradient_edges(trained)[rank : rank + 2]
        return TrainedParameters(trained.flags, trained.indices, trained.layout.slice(start, stop))


def _parameter_edges(layout: Layout, count: int) -> tuple[int, ...]:
    """Return the edges between parameters that are nearest to equal ranges."""
    allowed = [piece.offset for piece in layout.pieces] + [layout.numel]
    edges = [0]
    for rank in range(1, count):
        wanted = layout.numel * rank // count
        edges.append(max(edges[-1], min(allowed, key=lambda edge: abs(edge - wanted))))
    return (*edges, layout.numel)
