"""Which worker holds what of a block: a contiguous range of its elements each, in the order of ranks.

Where the optimizer treats every element by itself, all ranges are of one size, on boundaries at which a kernel that works on
several elements at once makes the same groups of them as it does over the whole parameter: so updates of parts have the same
bits. Where it looks at whole parameters, ranges end where parameters do, and are as equal as these allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from l2l_core.eps.blocks import Layout, TrainedParameters, aligned


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Cuts one block.

    Attributes:
        layout: of the whole block.
        edges: worker r holds elements ``edges[r]`` to ``edges[r + 1]``.
        even: elements of a buffer that holds a range, where all have buffers of one size; else 0.
    """

    layout: Layout
    edges: tuple[int, ...]
    uniform_numel: int

    @staticmethod
    def of(layout: Layout, count: int, elementwise: bool) -> ShardLayout:
        """Cut a block for so many workers."""
        if not elementwise:
            return ShardLayout(layout, _parameter_edges(layout, count), 0)
        size = aligned(-(-layout.numel // count))
        return ShardLayout(layout, tuple(min(size * rank, layout.numel) for rank in range(count + 1)), size)

    @property
    def numel(self) -> int:
        """Elements of a buffer into which all ranges are gathered."""
        return self.uniform_numel * (len(self.edges) - 1) if self.uniform_numel else self.layout.numel

    def shard_numel(self, rank: int) -> int:
        """Elements of the buffer of a worker's range."""
        return self.uniform_numel or self.edges[rank + 1] - self.edges[rank]

    def shard(self, rank: int) -> Layout:
        """Say how the block lies in that buffer."""
        return self.layout.slice(self.edges[rank], self.edges[rank + 1])

    def gradient_edges(self, trained: TrainedParameters) -> list[int]:
        """Say where the ranges begin and end in a buffer that holds the gradient of what is trained."""
        found = []
        for edge in self.edges[:-1]:
            # Up to the first trained parameter that goes on behind the edge; what lies between parameters is nobody's
            places = zip(trained.indices, trained.layout.pieces, strict=True)
            inside = ((self.layout.pieces[i].offset, piece) for i, piece in places)
            at = (piece.offset + max(0, edge - start) for start, piece in inside if start + _numel(piece.size) > edge)
            found.append(next(at, trained.numel))
        return [0, *found[1:], trained.numel]

    def gradient_shard(self, trained: TrainedParameters, rank: int) -> TrainedParameters:
        """Say how the gradient of what is trained lies in a worker's range of such a buffer."""
        start, stop = self.gradient_edges(trained)[rank : rank + 2]
        return TrainedParameters(trained.flags, trained.indices, trained.layout.slice(start, stop))


def _parameter_edges(layout: Layout, count: int) -> tuple[int, ...]:
    """Choose the edges, of those between parameters, that are nearest to equal ranges."""
    allowed = [piece.offset for piece in layout.pieces] + [layout.numel]
    edges = [0]
    for rank in range(1, count):
        wanted = layout.numel * rank // count
        edges.append(max(edges[-1], min(allowed, key=lambda edge: abs(edge - wanted))))
    return (*edges, layout.numel)


def _numel(size: Sequence[int]) -> int:
    numel = 1
    for each in size:
        numel *= each
    return numel
