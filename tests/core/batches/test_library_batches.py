"""Batches of other libraries, and tensors of unusual origin: a step trains as plain accumulation, or refuses the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.batches.batch import BatchRows, num_rows, split

WIDTH, ROWS = 4, 5
sgd = partial(torch.optim.SGD, lr=0.1)
both_schedules = pytest.mark.parametrize("schedule", ["breadth_first", "depth_first"])
Parts = Sequence[tuple[Any, float]]  # micro-batches as a user would write them, and the divisor of each loss


def assert_trains_as_by_hand(
    make: Callable[[], nn.Module],
    objective: Callable[[nn.Module, Any], Tensor],
    steps: Sequence[tuple[Any, Parts]],
    config: RelayConfig,
    **settings: Any,
) -> list[str]:
    """Compare steps of a relay with accumulation over parts that share no code with it; return how losses were joined."""
    model, twin, joined = make(), make(), []
    optimizer = sgd(twin.parameters())
    layers = [f"layers.{i}" for i in range(3)]
    settings |= {} if "loss" in settings else {"objective": objective}
    with Relay(model, sgd, EmulatedDevice(), layers=layers, config=config, **settings) as relay:
        for batch, parts in steps:
            expected = torch.zeros(())
            for part, divisor in parts:
                loss = objective(twin, part) / divisor
                loss.backward()
                expected += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            result = relay.step(batch)
            assert result.loss == float(expected)
            joined.append(result.objective)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        assert relay.verify(steps[-1][0]).equal
        relay.evaluate(steps[-1][0])
        assert relay.forecast(steps[-1][0]).fits
    return joined


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# -- graphs of PyTorch Geometric ---------------------------------------------------------------------------------------


class GraphLayer(nn.Module):
    """Adds the features of each node's neighbours to its own, through a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])))


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(GraphLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, graphs: Any) -> Tensor:
        """Return two numbers per graph, or per node of a single graph."""
        x = graphs.x
        for layer in self.layers:
            x = layer(x, graphs.edge_index)
        if graphs.batch is not None:
            x = x.new_zeros(graphs.num_graphs, WIDTH).index_add(0, graphs.batch, x)
        return self.head(x)


def graphs_of(pyg: Any, seed: int) -> list[Any]:
    """Five graphs of three to seven nodes, one with as many nodes as the batch has graphs."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randn, generator=generator)
    return [
        pyg.Data(
            x=random(n, WIDTH),
            edge_index=torch.randint(0, n, (2, 2 * n), generator=generator),
            y=random(1, 2),
            kinds=torch.randint(0, 2, (n,), generator=generator),
            name=f"graph {n}",
        )
        for n in (3, 4, 5, 6, 7)
    ]


@pytest.fixture
def pyg() -> Any:
    return pytest.importorskip("torch_geometric.data", reason="torch_geometric is not installed")


def graph_loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - batch.y).square().mean()


@both_schedules
def test_a_batch_of_graphs_is_cut_between_graphs(pyg: Any, schedule: Any) -> None:
    make = pyg.Batch.from_data_list
    lists = [graphs_of(pyg, seed) for seed in range(2)]
    steps = [(make(graphs), [(make(graphs[:3]), ROWS / 3), (make(graphs[3:]), ROWS / 2)]) for graphs in lists]
    config = RelayConfig(micro_batches=2, schedule=schedule)
    assert set(assert_trains_as_by_hand(GraphNet, graph_loss, steps, config)) == {"mean over rows"}
    whole = [(make(graphs), [(make(graphs), 1)]) for graphs in lists]
    assert_trains_as_by_hand(GraphNet, graph_loss, whole, RelayConfig(schedule=schedule))


def test_a_model_is_called_with_a_batch_of_graphs_in_a_tuple(pyg: Any) -> None:
    """As the refusal of the batch alone says; targets are in the graphs, or beside them."""
    graphs, config = graphs_of(pyg, 0), RelayConfig(micro_batches=2)
    make = pyg.Batch.from_data_list
    batch = make(graphs)
    in_graphs = lambda outputs, batch: (outputs - batch[0].y).square().mean()  # noqa: E731
    beside = lambda outputs, batch: (outputs - batch[1]).square().mean()  # noqa: E731
    parts = [(make(graphs[:3]), ROWS / 3), (make(graphs[3:]), ROWS / 2)]
    assert_trains_as_by_hand(GraphNet, graph_loss, [((batch,), parts)], config, loss=in_graphs)
    assert_trains_as_by_hand(GraphNet, graph_loss, [((batch, batch.y), parts)], config, loss=beside)
    with Relay(GraphNet(), sgd, layers=["layers.0"], loss=in_graphs) as relay:
        with pytest.raises(
            TypeError, match=r"DataBatch, from which the model cannot be called.*\(batch,\).*objective="
        ):
            relay.step(batch)
        assert relay.forward((batch,)).shape == (ROWS, 2)


def test_a_mean_over_nodes_is_weighted_by_them(pyg: Any) -> None:
    """Found for classes, which are integers; a mean of squares over nodes needs `weight=`, as its refusal says."""

    class NodeNet(GraphNet):
        def forward(self, graphs: Any) -> Tensor:
            x = graphs.x
            for layer in self.layers:
                x = layer(x, graphs.edge_index)
            return self.head(x)

    def classes(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch), batch.kinds)

    def squares(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean()

    graphs, config = graphs_of(pyg, 0), RelayConfig(micro_batches=2)
    make = pyg.Batch.from_data_list
    steps = [(make(graphs), [(make(graphs[:3]), 25 / 12), (make(graphs[3:]), 25 / 13)])]
    [joined] = assert_trains_as_by_hand(NodeNet, classes, steps, config)
    assert joined == "mean over targets in batch.kinds[:][0]"
    for graph in graphs:
        del graph.kinds
    steps = [(make(graphs), [(make(graphs[:3]), 25 / 12), (make(graphs[3:]), 25 / 13)])]
    with pytest.raises(ValueError, match="weight="):
        assert_trains_as_by_hand(NodeNet, squares, steps, config)
    assert_trains_as_by_hand(NodeNet, squares, steps, config, weight=lambda part: float(part.num_nodes))


@both_schedules
def test_one_graph_is_one_sample(pyg: Any, schedule: Any) -> None:
    """Also if all its tensors have as many entries, by chance."""
    graph = pyg.Data(x=torch.ones(2, WIDTH), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.zeros(2, 2))
    cut, whole = RelayConfig(micro_batches=2), RelayConfig(micro_batches=1, schedule=schedule)
    for batch in (graph, pyg.HeteroData({"a": {"x": torch.ones(2, 1)}})):
        with pytest.raises(ValueError, match=r"Data, which is one sample.*micro_batches=1\), or .*from_data_list"):
            split(batch, 2)
        assert num_rows(batch) == 1
    with pytest.raises(ValueError, match="one sample"):
        assert_trains_as_by_hand(GraphNet, graph_loss, [(graph, [(graph, 1)])], cut)
    assert_trains_as_by_hand(GraphNet, graph_loss, [(graph, [(graph, 1)])], whole)


def test_all_that_belongs_to_graphs_is_cut_with_them(pyg: Any) -> None:
    """Kinds of nodes, followed attributes, names, and lists of graphs."""
    graphs = []
    for n in (2, 3, 4):
        graph = pyg.HeteroData()
        graph["a"].x, graph["b"].x = torch.full((n, 1), float(n)), torch.zeros(1, 2)
        graph["a", "to", "b"].edge_index = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)])
        graphs.append(graph)
    first, second = split({"graphs": pyg.Batch.from_data_list(graphs), "list": graphs}, 2)
    expected = pyg.Batch.from_data_list(graphs[:2])
    assert first["graphs"].num_graphs == 2 and second["list"] == graphs[2:]
    for store, other in zip(first["graphs"].stores, expected.stores, strict=True):
        assert list(store) == list(other) and all(torch.equal(store[name], other[name]) for name in store)

    batch = pyg.Batch.from_data_list(graphs_of(pyg, 0), follow_batch=["y"])
    last = BatchRows(batch).select([[4, 0]])[0]
    assert last.name == ["graph 7", "graph 3"] and last.y_batch.tolist() == [0, 1]
    batch.note = torch.zeros(5)
    with pytest.raises(TypeError, match=r"batch is a DataBatch with note.*every graph.*micro_batches=1"):
        split(batch, 2)
    assert torch.equal(split(batch, 1)[0].note, batch.note)
    for graph in (graphs := graphs_of(pyg, 0)):  # as the message says
        graph.note = torch.zeros(1)
    assert len(split(pyg.Batch.from_data_list(graphs), 2)[1].note) == 2


def test_a_batch_of_graphs_put_together_by_hand_is_one_sample(pyg: Any) -> None:
    batch = pyg.Batch(x=torch.zeros(4, WIDTH), batch=torch.tensor([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="one sample"):
        split(batch, 2)
    assert split(batch, 1)[0].num_graphs == 2


# -- TensorDict --------------------------------------------------------------------------------------------------------


def test_a_tensordict_is_cut_along_its_first_batch_dimension() -> None:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")

    def make(x: Tensor, y: Tensor, names: list[str]) -> Any:
        held = {"x": x, "inner": tensordict.TensorDict({"y": y}, [len(x)]), "name": tensordict.NonTensorStack(*names)}
        return tensordict.TensorDict(held, [len(x)])

    def objective(model: nn.Module, batch: Any) -> Tensor:
        assert batch.batch_size == batch["x"].shape[:1] and len(batch["name"]) == len(batch["x"])
        return (model(batch["x"]) - batch["inner", "y"]).square().mean()

    def nested(model: nn.Module, batch: Any) -> Tensor:
        return objective(model, batch["inner"])

    x, y, names = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), list("abcde")
    batch, config = make(x, y, names), RelayConfig(micro_batches=2)
    parts = [(make(x[:3], y[:3], names[:3]), ROWS / 3), (make(x[3:], y[3:], names[3:]), ROWS / 2)]
    assert_trains_as_by_hand(Net, objective, [(batch, parts)], config)
    inner = [({"inner": part}, divisor) for part, divisor in parts]
    assert_trains_as_by_hand(Net, nested, [({"inner": batch}, inner)], config)
    assert split(batch, 2)[1]["name"] == ["d", "e"]

    shared = tensordict.TensorDict({"x": x, "bias": torch.ones(1, 3)}, [])
    assert [part["bias"].shape for part in split(shared, 2)] == [(1, 3), (1, 3)]
    assert [len(part) for part in split(tensordict.lazy_stack([tensordict.TensorDict({"x": x})] * 5), 2)] == [3, 2]
    for other, message in (
        (batch, "1: TensorDict of 5"),
        ([batch], r"batch\[1\]\[0\] is a TensorDict of 5, .* 4 rows"),
    ):
        with pytest.raises(ValueError, match=f"disagree.*{message}"):
            split((torch.zeros(4), other), 2)
    changed = BatchRows((batch, y)).select([[0], [1, 2]], lambda name, part, k: part + k)[1][0]
    assert torch.equal(changed["inner", "y"], y[1:3] + 1) and changed["name"] == ["b", "c"]


def test_a_tensordict_gives_keyword_arguments() -> None:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    loss = lambda outputs, batch: (outputs - batch["y"]).square().mean()  # noqa: E731

    def by_hand(model: nn.Module, part: Any) -> Tensor:
        return (model(part[0]) - part[1]).square().mean()

    steps = [
        (
            tensordict.TensorDict({"x": x, "y": y}, [ROWS]),
            [((x[:3], y[:3]), ROWS / 3), ((x[3:], y[3:]), ROWS / 2)],
        )
    ]
    assert_trains_as_by_hand(Net, by_hand, steps, RelayConfig(micro_batches=2), loss=loss)


# -- tensors of unusual origin -----------------------------------------------------------------------------------------


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def cut_in_two(x: Tensor, y: Tensor) -> Parts:
    return [({"x": x[:3], "y": y[:3]}, ROWS / 3), ({"x": x[3:], "y": y[3:]}, ROWS / 2)]


@both_schedules
def test_tensors_made_in_inference_mode_train(schedule: Any) -> None:
    """PyTorch refuses them in training; the relay's copies are ordinary tensors."""
    with torch.inference_mode():
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    config = RelayConfig(micro_batches=2, schedule=schedule)
    assert_trains_as_by_hand(Net, mean_square, [({"x": x, "y": y}, cut_in_two(x.clone(), y.clone()))], config)


def test_a_step_inside_inference_mode_is_refused() -> None:
    batch = {"x": torch.ones(ROWS, WIDTH), "y": torch.ones(ROWS, WIDTH)}
    with Relay(Net(), sgd, layers=["layers.0"], objective=mean_square) as relay:
        with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode.*outside"):
            relay.step(batch)
        assert relay.steps == 0
        assert relay.step(batch).loss > 0


def test_a_step_under_another_default_device_is_refused() -> None:
    batch = {"x": torch.ones(ROWS, WIDTH), "y": torch.ones(ROWS, WIDTH)}
    with Relay(Net(), sgd, layers=["layers.0"], objective=mean_square) as relay:
        with torch.device("meta"):
            with pytest.raises(RuntimeError, match=r"'meta', .*torch.set_default_device\('cpu'\)"):
                relay.step(batch)
            with torch.device("cpu"):
                assert relay.step(batch).loss > 0
        assert relay.steps == 1


class Perturbed(Net):
    """Trains an addition to each row of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.delta)


@both_schedules
def test_a_batch_that_requires_a_gradient_is_refused(schedule: Any) -> None:
    """A gradient of the batch would be lost, and so would the training of a module that made the batch."""
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    config = RelayConfig(micro_batches=2, schedule=schedule)
    leaf, made = x.clone().requires_grad_(), nn.Linear(WIDTH, WIDTH)(x)
    for needing in (leaf, made):
        for batch in ({"x": needing, "y": y}, {"x": list(needing), "y": y}):
            with (
                Relay(Net(), sgd, layers=["layers.0"], objective=mean_square, config=config) as relay,
                pytest.raises(ValueError, match=r"batch\['x'\].* requires a gradient.*detach\(\).*part of the model"),
            ):
                relay.step(batch)
            assert relay.steps == 0 and leaf.grad is None
    # As the message says: detached, or as a part of the model.
    assert_trains_as_by_hand(Net, mean_square, [({"x": leaf.detach(), "y": y}, cut_in_two(x, y))], config)
    assert_trains_as_by_hand(Perturbed, mean_square, [({"x": x, "y": y}, cut_in_two(x, y))], config)
    with Relay(Net(), sgd, layers=["layers.0"], objective=mean_square, config=config) as relay:
        assert relay.evaluate({"x": leaf, "y": y}) == relay.evaluate({"x": x, "y": y}), "nothing is differentiated"


def test_strings_and_objects_beside_tensors_are_one_per_row() -> None:
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    rows = [SimpleNamespace(number=i) for i in range(ROWS)]
    seen: list[list[int]] = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        names = [int(name) for name in batch.get("names", "")]
        assert names == [row.number for row in batch.get("rows", ())]
        seen.append(names)
        return mean_square(model, batch)

    batch = {"x": x, "y": y, "names": list("01234"), "rows": rows}
    assert_trains_as_by_hand(Net, objective, [(batch, cut_in_two(x, y))], RelayConfig(micro_batches=2))
    assert [0, 1, 2] in seen and [3, 4] in seen
