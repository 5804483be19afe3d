"""Who holds what of a block: everything is somebody's, once, and gradients are cut where weights are."""

import pytest
import torch
from torch import nn

from l2l_core.eps.blocks import Block, Piece, assemble, assemble_new, build_layer, is_absent
from l2l_core.workers.shard_layout import ShardLayout


class Awkward(nn.Module):
    """Parameters of sizes that nothing divides, a scalar, one in channels-last, and frozen ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(7, 13))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.frozen = nn.Parameter(torch.randn(33), requires_grad=False)
        self.conv = nn.Parameter(torch.randn(5, 3, 2, 2).contiguous(memory_format=torch.channels_last))
        self.last = nn.Parameter(torch.randn(19), requires_grad=False)


@pytest.fixture
def block() -> Block:
    return build_layer("L000", "layers.0", Awkward()).blocks[0]


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 7, 64])
def test_parts_are_all_of_a_block_and_each_element_is_in_one(block: Block, count: int, elementwise: bool) -> None:
    cut = ShardLayout.of(block.layout, count, elementwise)
    for i, view in enumerate(block.layout.views(block.values)):
        found = []
        for rank in range(count):
            mine = torch.full((cut.shard_numel(rank),), torch.nan)
            start, stop = cut.edges[rank : rank + 2]
            mine[: stop - start] = block.values[start:stop]
            held = cut.shard(rank).views(mine)[i]
            assert held.shape in (view.shape, (0,)) or elementwise  # whole parameters have one owner
            found.append(held.flatten() if held.dim() == 1 or held.shape != view.shape else in_memory(held))
        assert torch.equal(torch.cat(found), in_memory(view))


@pytest.mark.parametrize("there", [1, 2, 3, 64])
@pytest.mark.parametrize("here", [1, 3, 4])
def test_pieces_of_one_cut_become_those_of_another(block: Block, there: int, here: int) -> None:
    """As when other workers load than have saved; whole tensors of a file have no strides of their own."""
    before, after = (ShardLayout.of(block.layout, count, elementwise=True) for count in (there, here))
    for i, (whole, view) in enumerate(zip(block.layout.pieces, block.views, strict=True)):
        pieces = [before.shard(rank).pieces[i] for rank in range(there)]
        held = [(piece, view.contiguous() if piece.size == whole.size else between(view, piece)) for piece in pieces]
        for rank in range(here):
            wanted = after.shard(rank).pieces[i]
            expected = view if wanted.size == whole.size else between(view, wanted)
            if not is_absent(wanted, whole):
                assert torch.equal(assemble_new(wanted, whole, held), expected)
            with pytest.raises(AssertionError, match="are in no piece"):
                assemble(torch.empty_strided(whole.size, whole.stride), whole, whole, held[:0])


def between(view: torch.Tensor, piece: Piece) -> torch.Tensor:
    return in_memory(view)[piece.first : piece.first + piece.size[0]]


@pytest.mark.parametrize("elementwise", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 7, 64])
def test_gradients_are_cut_where_weights_are(block: Block, count: int, elementwise: bool) -> None:
    """The gradient of every element goes to who holds the element, and frozen parameters have none."""
    cut, trained = ShardLayout.of(block.layout, count, elementwise), block.trained
    gradient = torch.full((trained.numel,), torch.nan)
    weights = block.layout.views(block.values)
    for i, view in zip(trained.indices, trained.layout.views(gradient), strict=True):
        view.copy_(2 * weights[i])
    edges = cut.gradient_edges(trained)
    assert edges[0] == 0 and edges[-1] == trained.numel and edges == sorted(edges)
    for rank in range(count):
        own, part = cut.gradient_shard(trained, rank), cut.shard(rank)
        start, stop = cut.edges[rank : rank + 2]
        mine = torch.zeros(cut.shard_numel(rank))
        mine[: stop - start] = block.values[start:stop]
        views = own.layout.views(gradient[edges[rank] : edges[rank + 1]])
        for i, view in zip(own.indices, views, strict=True):
            assert torch.equal(view, 2 * part.views(mine)[i])


def test_parts_of_elementwise_optimizers_are_of_one_size(block: Block) -> None:
    for count in (2, 3, 4):
        cut = ShardLayout.of(block.layout, count, elementwise=True)
        assert len({cut.shard_numel(rank) for rank in range(count)}) == 1 and cut.shard_numel(0) % 16 == 0
        assert cut.shard_numel(0) * count - block.layout.numel < 16 * count


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """List a dense tensor's elements as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
