"""Sparse tensors of the model, as graphs have them: kept as buffers and attributes, made of weights, handed to layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import adamw, assert_equal, both, run_both
from patience import rarely
from torch import Tensor, nn
from zoo import Kind

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.model import dense_parts, equal_values

NODES, WIDTH = 6, 8
EDGES = torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(0)) > 0.5
LAYOUTS = ["coo", "uncoalesced", "csr"]

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # CSR is called beta, and invariants are not checked


def matrix_of(layout: str) -> Tensor:
    if layout == "uncoalesced":
        twice = EDGES.nonzero().T.repeat(1, 2)
        return torch.sparse_coo_tensor(twice, torch.ones(twice.shape[1]), EDGES.shape)
    return EDGES.float().to_sparse() if layout == "coo" else EDGES.float().to_sparse_csr()


class Graph(nn.Module):
    """A layer that gives every node the sum of its neighbours; by what it is given, by its own matrix, or by weights of edges."""

    def __init__(self, matrix: Tensor | None = None, of_weights: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("matrix", matrix)
        self.edges = nn.Parameter(torch.ones(int(EDGES.sum()))) if of_weights else None

    def forward(self, h: Tensor, given: Tensor | None = None) -> Tensor:
        matrix = self.matrix if given is None else given
        if self.edges is not None:
            matrix = weighted(self.edges)
        return h + torch.tanh(torch.stack([torch.sparse.mm(matrix, row) for row in self.linear(h)]))


def weighted(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(EDGES.nonzero().T, values, EDGES.shape)


class Network(nn.Module):
    """What the layers are given is kept by the model, made of the rows, or made of its weights."""

    def __init__(self, way: str, layout: str = "coo") -> None:
        torch.manual_seed(0)
        super().__init__()
        self.way, matrix = way, matrix_of(layout)
        own = matrix if way == "of the layer" else None
        self.layers = nn.ModuleList(Graph(own, of_weights=way == "of its weights") for _ in range(3))
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.values = nn.Parameter(torch.ones(int(EDGES.sum()))) if way == "of weights" else None
        if way == "buffer":
            self.register_buffer("matrix", matrix)
        else:
            self.matrix = matrix

    def given(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        if self.way == "of the rows":
            means = x.mean((0, 2))
            return ((means[:, None] > means[None]).float().to_sparse(),)
        if self.way == "of activations":
            return (weighted(h.mean((0, 2))[EDGES.nonzero().T[0]]),)
        if self.values is not None:
            return (weighted(self.values),)
        return () if "its" in self.way or "layer" in self.way else (self.matrix,)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        given = self.given(x, h)
        for layer in self.layers:
            h = layer(h, *given)
        return self.head(h)


def make_batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(rows, NODES, WIDTH, generator=drawn), torch.randn(rows, NODES, WIDTH, generator=drawn)


def loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(out, batch[1])


SETTINGS: list[Any] = [{"stash": "host"}, {"schedule": "depth_first"}, rarely({}), rarely({"keep": 2, "resident": 2})]
WAYS = ["of the rows", "of activations", "of weights", "of its weights"]


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "way, layout",
    [
        *((way, layout) for way in ("buffer", "attribute", "of the layer") for layout in LAYOUTS),
        *((way, "coo") for way in WAYS),
    ],
)
def test_sparse_tensors_of_a_model(way: str, layout: str, settings: dict[str, Any]) -> None:
    mixes_rows = way in ("of the rows", "of activations")
    kind = Kind(
        "graph", lambda: Network(way, layout), make_batch, loss, loss_over="micro-batch" if mixes_rows else None
    )
    assert_equal(run_both(kind, 3, RelayConfig(micro_batches=3, **settings), rows=6))


def test_looks_at_a_model_with_sparse_buffers(tmp_path: Path) -> None:
    model = Network("buffer")
    with Relay(model, adamw(model), EmulatedDevice(), model.layers, loss, config=RelayConfig(micro_batches=2)) as relay:
        batch, before = make_batch(4), model.matrix.clone()
        forecast = relay.forecast(batch)
        assert forecast.check(relay.step(batch)).peak_device.error == 0
        relay.evaluate(batch)
        assert relay.verify(batch).equal
        assert (
            relay.fit(batch, fixed=["micro_batches"]).forecast.peak_device_bytes == relay.step(batch).peak_device_bytes
        )
        assert equal_values(model.matrix, before)
        with pytest.raises(
            ValueError,
            match=r"buffer 'matrix' is a tensor of layout torch.sparse_coo, which safetensors .*: keep its indices",
        ):
            relay.save(tmp_path / "save")


class OneGraph(nn.Module):
    """Nodes, edges and labels of one graph, in one batch: nothing in it can be cut."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList(Graph() for _ in range(3))
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, nodes: Tensor, edges: Tensor, matrix: Tensor) -> Tensor:
        h = self.stem(nodes)[None]
        h = h + torch.zeros_like(h).index_add(1, edges[1], h[:, edges[0]])
        for layer in self.layers:
            h = layer(h, matrix)
        return self.head(h[0])


def make_graph(rows: int, seed: int = 0) -> dict[str, Tensor]:
    drawn, edges = torch.Generator().manual_seed(seed), EDGES.nonzero().T
    values = torch.rand(edges.shape[1], generator=drawn)
    nodes = torch.randn(NODES, WIDTH, generator=drawn)
    return {"nodes": nodes, "edges": edges, "matrix": weighted(values)}


def sum_of_squares(out: Tensor, batch: Any) -> Tensor:
    return out.square().mean()


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_graph_is_a_batch_of_one(settings: dict[str, Any]) -> None:
    kind = Kind("one graph", OneGraph, make_graph, sum_of_squares)
    with both(kind, RelayConfig(**settings)) as pair:
        steps = [pair.step(make_graph(1, seed)) for seed in range(3)]
        assert_equal(steps)
        assert steps[0].result.samples == 1
        relay, batch = pair.relay, make_graph(1, 9)
        assert relay.verify(batch).equal and relay.forward(batch).shape == (NODES, 3)
        by_chance = 512 if relay.config.stash == "host" else 0  # whether rows are still there at the peak
        forecast = relay.forecast(batch).peak_device_bytes
        assert abs(forecast - relay.step(batch).peak_device_bytes) <= by_chance
        assert relay.fit(batch, most_s=1).config.micro_batches == 1
        with pytest.raises(ValueError, match="disagree on dim 0"):
            relay.config = RelayConfig(micro_batches=2)
            relay.step(batch)


class GivesSparse(Graph):
    def forward(self, h: Tensor, given: Tensor | None = None) -> Any:
        return super().forward(h, given), weighted(h.mean((0, 2))[EDGES.nonzero().T[0]])


def test_a_layer_that_gives_out_a_sparse_tensor_with_a_graph_is_told() -> None:
    class Model(Network):
        def forward(self, x: Tensor) -> Tensor:
            h, given = self.stem(x), self.matrix
            for layer in self.layers:
                h, given = layer(h, given)
            return self.head(h)

    model = Model("attribute")
    model.layers = nn.ModuleList(GivesSparse() for _ in range(2))
    options: dict[str, Any] = {"loss_over": "micro-batch", "config": RelayConfig(micro_batches=2)}
    with Relay(model, adamw(model), EmulatedDevice(), model.layers, loss, **options) as relay:
        with pytest.raises(TypeError, match=r"returns a differentiable tensor of layout .* its indices and values"):
            relay.step(make_batch(4))


@pytest.mark.parametrize(
    "to", ["to_sparse", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "clone"]
)
def test_pieces_are_all_that_a_tensor_has(to: str) -> None:
    args = [(2, 2)] if "bs" in to else []
    dense = EDGES.float()
    sparse = getattr(dense, to)(*args)
    pieces = dense_parts(sparse)
    assert pieces[-1].sum() == dense.sum() and len(pieces) == (1 if to == "clone" else 2 if to == "to_sparse" else 3)
    assert equal_values(sparse, getattr(dense, to)(*args)) and not equal_values(sparse, getattr(2 * dense, to)(*args))
    assert not equal_values(sparse, getattr(dense.T.contiguous(), to)(*args))
