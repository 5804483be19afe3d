"""Batches along their rows: how many there are, cutting, and which types stay what they are."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import default_collate
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.batches.batch import BatchRows, num_rows, split
from l2l_core.batches.containers import map_tensors, open_container

ROWS, WIDTH = 5, 4


@given(rows=st.integers(1, 40), parts=st.integers(1, 12))
def test_parts_cover_the_batch_in_order_and_differ_by_little(rows: int, parts: int) -> None:
    batch = {"x": torch.arange(rows), "flag": True}
    if rows < parts:
        with pytest.raises(ValueError, match=f"{rows} row"):
            BatchRows(batch).split(parts)
    cut, parts = split(batch, parts), min(rows, parts)
    assert len(cut) == parts
    assert torch.equal(torch.cat([part["x"] for part in cut]), batch["x"])
    assert all(part["flag"] is True and len(part["x"]) >= 1 for part in cut)
    size = -(-rows // parts)
    assert len(cut[0]["x"]) == size
    assert [len(part["x"]) for part in cut] == BatchRows(batch).sizes(parts)
    if size * (parts - 1) < rows:
        assert all(len(part["x"]) == size for part in cut[:-1]), "only the last may be smaller"


def test_nested_values_and_rows_shared_by_all() -> None:
    batch = (torch.zeros(6, 2), {"position_ids": torch.arange(4)[None], "lengths": [torch.ones(6)]}, None)
    parts = split(batch, 3)
    assert parts[1][0].shape == (2, 2)
    assert parts[2][1]["position_ids"].shape == (1, 4)
    assert parts[0][1]["lengths"][0].shape == (2,)
    assert num_rows(batch) == 6


class SizedOnly:
    """As a table's column may be: it has entries, and is no sequence."""

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "batch, error, message",
    [
        (torch.zeros(4, 2), TypeError, "wrap a single tensor as"),
        (np.zeros((4, 2)), TypeError, "wrap a single tensor as"),
        (UserList([torch.zeros(4)]), TypeError, "UserList"),
        ({}, ValueError, "empty"),
        ({"x": torch.zeros(0, 3)}, ValueError, "empty"),
        ({"x": torch.zeros(4, 3), "y": torch.zeros(5)}, ValueError, r"disagree .*x: \(4, 3\), y: \(5,\)"),
        ({"x": torch.zeros(4, 3), "y": [torch.zeros(5)]}, ValueError, r"disagree .*batch\['y'\]\[0\] has \(5,\)"),
        ({"x": torch.zeros(1, 3)}, None, ""),
        ({"x": torch.zeros(4, 3), "y": map(int, "1234")}, TypeError, r"batch\['y'\] is a map.*use up: pass list"),
        ({"x": torch.zeros(4), "y": SimpleNamespace(z=torch.zeros(4))}, TypeError, r"batch\['y'\].*holds tensors"),
        ((torch.zeros(4), dict.fromkeys("abcd").keys() | set(), {}.keys()), None, ""),
        ((torch.zeros(4), SizedOnly()), TypeError, "SizedOnly of 4 entries.*cannot be cut"),
        (
            (torch.zeros(2), [torch.zeros(2), torch.ones(2)]),
            ValueError,
            r"batch\[1\] is a list of 2 items.*rows or columns. Stack rows into one tensor",
        ),
        ({"x": [torch.zeros(4)]}, ValueError, "1 row.* if its lists have one item per row, and 4 if"),
    ],
)
def test_a_bad_batch_is_refused_with_its_shapes(batch: Any, error: type[Exception] | None, message: str) -> None:
    if error is None:
        split(batch, 2)
        return
    with pytest.raises(error, match=message):
        split(batch, 2)


def test_a_batch_without_rows_in_common_is_one_sample() -> None:
    """As the nodes and the edges of one graph; nobody can cut it."""
    batch = {"nodes": torch.zeros(5, 3), "edges": torch.zeros(2, 7)}
    rows = BatchRows(batch)
    assert rows.count == 1 and rows.sizes(1) == [1] and not list(rows.columns())
    [whole] = rows.split(1)
    assert whole is not batch and all(whole[name] is batch[name] for name in batch)
    for cut in (rows.split, rows.sizes):
        with pytest.raises(
            ValueError,
            match=r"disagree on dim 0.*dimension of 1, or None by key in split=.*or use RelayConfig\(micro_batches=1\)",
        ):
            cut(2)


def test_a_packed_sequence_is_refused() -> None:
    """Its fields have no common rows, and yet may agree by chance."""
    packed = pack_padded_sequence(torch.zeros(4, 1, 2), [4])
    assert len(packed.data) == len(packed.batch_sizes) == 4
    with pytest.raises(TypeError, match="PackedSequence.*pack them in the model"):
        split((torch.zeros(4), packed), 2)


# -- lists -------------------------------------------------------------------------------------------------------------


def test_a_list_of_as_many_items_as_rows_has_one_per_row() -> None:
    batch = {
        "x": torch.arange(4),
        "text": ["a", "b", "c", "d"],
        "boxes": (
            {"n": torch.zeros(1, 4)},
            {"n": torch.zeros(4, 4)},
            {"n": torch.zeros(0, 4)},
            {"n": torch.zeros(2, 4)},
        ),
        "ids": range(10, 14),
        "size": torch.Size([4, 4, 4, 4]),
        "point": namedtuple("Point", "a b c d")(1, 2, 3, 4),
        "classes": ["cat", "dog"],
    }
    second = split(batch, 2)[1]
    assert second["text"] == ["c", "d"] and second["ids"] == range(12, 14)
    assert [len(each["n"]) for each in second["boxes"]] == [0, 2] and isinstance(second["boxes"], tuple)
    assert second["size"] is batch["size"] and second["point"] == (1, 2, 3, 4), "records of four are none of rows"
    assert second["classes"] == ["cat", "dog"], "another number is no number of rows"


def test_lists_tell_the_rows_where_there_are_no_tensors_outside() -> None:
    """As detection models have them: images of several sizes and a record for each, of three channels and three boxes."""
    images = tuple(torch.zeros(3, 4 + n, 4) for n in range(2))
    batch = (images, [{"boxes": torch.zeros(3, 4)} for _ in images])
    first, second = split(batch, 2)
    assert first[0][0] is images[0] and second[0][0] is images[1] and len(second[0]) == len(second[1]) == 1
    assert num_rows({"text": ["a", "b", "c"]}) == 3
    assert num_rows({"positions": torch.zeros(1, 4), "text": ["a", "b", "c"]}) == 1, "tensors come first"


def sequences_of(objects: type) -> list[Any]:
    return [objects({"x": torch.full((8, 2), float(i)), "id": f"{i}"}) for i in range(4)]


@pytest.mark.parametrize("objects", [dict, UserDict])
def test_a_list_of_samples_is_not_taken_for_arguments(objects: type) -> None:
    """As `collate_fn=list` gives it: its sequences were cut, without a word where losses were not compared."""
    samples = sequences_of(objects)
    with pytest.raises(ValueError, match=r"a list of 4 \w+s with the same entries: 4 samples, or 4 arguments"):
        num_rows(samples)
    for batch in ((samples,), {"samples": samples}):
        assert num_rows(batch) == 4
        parts = split(batch, 2)
        assert [
            [each["id"] for each in (part[0] if isinstance(part, tuple) else part["samples"])] for part in parts
        ] == [
            ["0", "1"],
            ["2", "3"],
        ]
    assert num_rows(tuple(samples)) == 8 and split(tuple(samples), 2)[0][3]["x"].shape == (4, 2)


def test_lists_of_other_things_are_arguments() -> None:
    x, y = torch.ones(4, 2), torch.ones(4)
    assert num_rows([{"x": x}, {"y": y}]) == num_rows([{"x": x}, y]) == num_rows([{"x": x}]) == num_rows([x, x]) == 4


def test_what_default_collate_makes_of_samples() -> None:
    samples = [
        {"x": torch.tensor([i, i]), "name": f"row {i}", "pair": (i, str(i)), "many": [i, i, i]} for i in range(4)
    ]
    second = split(default_collate(samples), 2)[1]
    expected = default_collate(samples[2:])
    assert torch.equal(second["x"], expected["x"]) and second["name"] == expected["name"]
    assert torch.equal(second["pair"][0], expected["pair"][0]) and tuple(second["pair"][1]) == tuple(
        expected["pair"][1]
    )
    assert all(torch.equal(a, b) for a, b in zip(second["many"], expected["many"], strict=True))


# -- types -------------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


class OwnDict(dict):
    """A dict whose entries are its attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class OwnMapping(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries, self.note = entries, "kept"

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass
class Record:
    x: Any
    y: Any
    note: str = "kept"
    made: int = field(default=0, init=False)


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any

    def __post_init__(self) -> None:
        assert len(self.x) == ROWS, "nobody makes another one by calling the class"


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


by_name: Callable[[Any], Any] = lambda batch: (batch["x"], batch["y"])  # noqa: E731
by_attribute: Callable[[Any], Any] = lambda batch: (batch.x, batch.y)  # noqa: E731
stacked: Callable[[Any], Any] = lambda rows: torch.stack(list(rows))  # noqa: E731

# How a batch is made of two tensors, and how the tensors are found in it or in a part of it.
KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x, y: {"x": x, "y": y}, by_name),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), by_name),
    "defaultdict": (lambda x, y: defaultdict(list, x=x, y=y), by_name),
    "UserDict": (lambda x, y: UserDict(x=x, y=y), by_name),
    "BatchEncoding": (lambda x, y: BatchEncoding({"x": x, "y": y}), by_attribute),
    "OwnDict": (lambda x, y: OwnDict(x=x, y=y), by_attribute),
    "OwnMapping": (lambda x, y: OwnMapping({"x": x, "y": y}), by_name),
    "mappingproxy": (lambda x, y: MappingProxyType({"x": x, "y": y}), by_name),
    "ModelOutput": (
        lambda x, y: BaseModelOutput(last_hidden_state=x, hidden_states=y),
        lambda batch: (batch.last_hidden_state, batch["hidden_states"]),
    ),
    "tuple": (lambda x, y: (x, y), tuple),
    "list": (lambda x, y: [x, y], tuple),
    "namedtuple": (Pair, by_attribute),
    "dataclass": (Record, by_attribute),
    "frozen dataclass": (Frozen, by_attribute),
    "dataclass with slots": (Slotted, by_attribute),
    "BatchEncoding in a tuple": (lambda x, y: (BatchEncoding({"x": x}), y), lambda batch: (batch[0]["x"], batch[1])),
    "dataclass in a dict": (lambda x, y: {"both": Frozen(x, y)}, lambda batch: by_attribute(batch["both"])),
    "NumPy": (lambda x, y: {"x": x.numpy(), "y": y.numpy()}, lambda batch: map(torch.from_numpy, by_name(batch))),
    "list of tensors": (lambda x, y: {"x": list(x), "y": y}, lambda batch: (stacked(batch["x"]), batch["y"])),
    "tuple of records": (
        lambda x, y: (tuple({"x": row} for row in x), y),
        lambda batch: (stacked(each["x"] for each in batch[0]), batch[1]),
    ),
    "deque": (lambda x, y: {"x": deque(x), "y": y}, lambda batch: (stacked(batch["x"]), batch["y"])),
    "strings": (
        lambda x, y: (x, [",".join(map(repr, row.tolist())) for row in y]),
        lambda batch: (batch[0], torch.tensor([[*map(float, row.split(","))] for row in batch[1]])),
    ),
}
SPARSE = {
    str(layout): (
        lambda x, y, layout=layout: {"x": x.to_sparse(layout=layout), "y": y},
        lambda batch: (batch["x"].to_dense(), batch["y"]),
    )
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
}
kinds = pytest.mark.parametrize("make, read", KINDS.values(), ids=list(KINDS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def two_tensors(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support")
@pytest.mark.parametrize("make, read", [*KINDS.values(), *SPARSE.values()], ids=[*KINDS, *SPARSE])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_type_trains_as_in_core(make: Any, read: Any, micro_batches: int) -> None:
    """Five rows in micro-batches of three and two; in core the rows are cut here, and nothing is shared with the relay."""
    model, twin, seen = Net(), Net(), []

    def objective(model: nn.Module, part: Any) -> Tensor:
        x, y = read(part)
        seen.append((type(part), len(x)))
        return (model(x) - y).square().mean()

    optimizer = sgd(twin.parameters())
    bounds = [(0, 3), (3, 5)] if micro_batches == 2 else [(0, 5)]
    config = RelayConfig(micro_batches=micro_batches, verify="never")  # the objective notes its calls
    with Relay(model, sgd, layers=["layers.0", "layers.1"], objective=objective, config=config) as relay:
        for step in range(2):
            x, y = two_tensors(step)
            expected = 0.0
            for start, stop in bounds:
                part_x, part_y = x[start:stop].clone(), y[start:stop].clone()
                loss = (twin(part_x) - part_y).square().mean() / (ROWS / (stop - start))
                loss.backward()
                expected += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            batch = make(x, y)
            result = relay.step(batch)
            assert result.samples == ROWS and result.loss == float(expected) and relay.steps == step + 1
            assert seen == [(type(batch), stop - start) for start, stop in bounds]
            seen.clear()
        assert all(
            torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True)
        )
        mean = (twin(x) - y).square().mean().item()
        assert relay.evaluate(batch) == pytest.approx(mean, rel=1e-5)
        assert relay.verify(batch).equal
        assert relay.forecast(batch).fits
        relay.expect(batch)


@kinds
def test_tensors_of_every_type_are_copied_to_the_device(make: Any, read: Any) -> None:
    """What a model writes into its batch stays in the copy, wherever in the batch the tensor is."""

    def objective(model: nn.Module, part: Any) -> Tensor:
        for tensor in tensors_of(part):
            if isinstance(tensor, Tensor):
                tensor.add_(1)
        x, y = read(part)
        return (model(x) - y).square().mean()

    x, y = two_tensors()
    batch = make(x.clone(), y.clone())
    config = RelayConfig(micro_batches=2)
    with Relay(Net(), sgd, layers=["layers.0", "layers.1"], objective=objective, config=config) as relay:
        relay.step(batch)
        assert relay.verify(batch).equal
        relay.evaluate(batch)
    assert all(torch.equal(kept, given) for kept, given in zip(read(batch), (x, y), strict=True))


def tensors_of(batch: Any) -> list[Any]:
    """Every tensor that is reachable as a program would reach it; written without the relay's own walk."""
    if isinstance(batch, Mapping):
        return [found for name in batch for found in tensors_of(batch[name])]
    if isinstance(batch, list | tuple | deque):
        return [found for item in batch for found in tensors_of(item)]
    if hasattr(batch, "__dataclass_fields__"):
        return [found for name in batch.__dataclass_fields__ for found in tensors_of(getattr(batch, name))]
    return [batch]


def test_what_belongs_to_a_container_stays_with_it() -> None:
    x, y = two_tensors()
    encoding = BatchEncoding({"x": x}, n_sequences=2)
    encoding._encodings = [SimpleNamespace(row=i) for i in range(ROWS)]  # as of a fast tokenizer: one per row
    record = Record(x, y)
    record.made, record.later = 7, "later"
    first, second = split({"a": encoding, "b": record, "c": OwnMapping({"x": x}), "d": defaultdict(list, x=x)}, 2)
    assert second["a"].n_sequences == 2 and [each.row for each in second["a"]._encodings] == [3, 4]
    assert (second["b"].made, second["b"].later, second["c"].note) == (7, "later", "kept")
    assert second["d"].default_factory is list and len(first["b"].x) == 3 and len(record.x) == ROWS


def test_an_object_without_rows_is_the_same_in_every_part() -> None:
    settings = Record(1, [2])
    parts = split((torch.zeros(4), settings), 2)
    assert parts[0][1] is parts[1][1] is settings
    assert map_tensors((torch.zeros(4), settings), torch.neg)[1] is settings


def test_a_class_that_is_registered_with_pytrees_is_a_container() -> None:
    class Registered:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    torch.utils._pytree.register_pytree_node(Registered, lambda r: ([r.x], None), lambda parts, _: Registered(*parts))
    part = split((torch.zeros(4), Registered(torch.arange(4))), 2)[1][1]
    assert isinstance(part, Registered) and part.x.tolist() == [2, 3]


def test_only_containers_open() -> None:
    for value in (1, "text", b"", None, torch.zeros(2), nn.ModuleList(), int, torch.Size([1]), SimpleNamespace(a=1)):
        assert open_container(value) is None


# -- refusals come before training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"x": torch.zeros(4, WIDTH), "rows": iter(range(4))}, "use up"),
        ({"x": torch.zeros(4, WIDTH), "y": SimpleNamespace(z=torch.zeros(4))}, "holds tensors"),
        (Record(torch.zeros(4, WIDTH), torch.zeros(4)), "Record.*objective="),
    ],
)
def test_a_refused_batch_has_trained_nothing(batch: Any, message: str) -> None:
    model, called = Net(), []
    before = [param.detach().clone() for param in model.parameters()]

    def loss(outputs: Any, batch: Any) -> Tensor:
        called.append(batch)
        return outputs.square().mean()

    config = RelayConfig(micro_batches=2)
    with Relay(model, sgd, layers=["layers.0", "layers.1"], loss=loss, config=config) as relay:
        for ask in (relay.step, relay.verify, relay.evaluate, relay.forward, relay.forecast, relay.expect):
            with pytest.raises(TypeError, match=message):
                ask(batch)
        assert relay.steps == 0 and not called
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_dataclass_is_enough_to_train_on_with_an_objective_and_not_for_outputs() -> None:
    objective = lambda model, part: (model(part.x) - part.y).square().mean()  # noqa: E731
    with Relay(Net(), sgd, layers=["layers.0", "layers.1"], objective=objective) as relay:
        batch = Slotted(*two_tensors())
        assert relay.step(batch).samples == ROWS
        with pytest.raises(TypeError, match="Slotted, from which the model cannot be called"):
            relay.forward(batch)


def test_one_micro_batch_takes_what_cannot_be_cut() -> None:
    """Nothing is cut, so nothing has to be known of it."""
    pair = [torch.ones(2, WIDTH), torch.zeros(2, WIDTH)]
    loss = lambda outputs, batch: (outputs - batch["pair"][0]).square().mean()  # noqa: E731
    with Relay(Net(), sgd, layers=["layers.0", "layers.1"], loss=loss) as relay:
        assert relay.step({"x": torch.zeros(2, WIDTH), "pair": pair}).samples == 2
        relay.config = RelayConfig(micro_batches=2)
        with pytest.raises(ValueError, match="so that the items may be rows or columns"):
            relay.step({"x": torch.zeros(2, WIDTH), "pair": pair})
        assert relay.steps == 1


def test_ragged_lists_of_tensors_may_differ_between_micro_batches() -> None:
    """What a step has learned of shapes is kept by micro-batch, however many tensors each has."""
    rows = [[torch.ones(WIDTH)] * n for n in (1, 3, 2, 1, 2)]
    objective = lambda model, part: model(torch.stack([t for row in part["rows"] for t in row])).square().mean()  # noqa: E731
    config = RelayConfig(micro_batches=2)
    with Relay(Net(), sgd, layers=["layers.0", "layers.1"], objective=objective, weight=len, config=config) as relay:
        for _ in range(3):
            relay.step({"x": torch.zeros(ROWS, 1), "rows": rows})
            assert relay.forecast({"x": torch.zeros(ROWS, 1), "rows": rows}).fits


def test_what_is_remembered_of_shapes_is_bounded() -> None:
    loss = lambda outputs, batch: outputs.square().mean()  # noqa: E731
    with Relay(Net(), sgd, EmulatedDevice(), layers=["layers.0", "layers.1"], loss=loss) as relay:
        for rows in range(1, 40):
            relay.evaluate((torch.zeros(rows, WIDTH),))
        assert 0 < len(relay._runner.pass_cache.inferences) <= 16
