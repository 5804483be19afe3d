"""Edits of models that read things beside a stack by the position of its layers: refused, with a remedy that works."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import DEPTH, Beside, assert_refused, kind_of, parameter, relay_of
from oracle import InCore, adamw, assert_state, copy_state
from torch import Tensor, nn
from zoo import BY_NAME, KINDS, WIDTH, Chain, Mlp, ResidualMlp

from l2l_core import Drop, Duplicate, EmulatedDevice, Freeze, Insert, Move, Relay, RelayConfig, Swap

EDITS = [Drop(1), Drop(-1), Swap(0, 2), Move(0, 3), Insert(2), Insert(4, init="copy"), Duplicate(0)]


class Scalars(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter(DEPTH)

    def at(self, i: int, h: Tensor) -> Tensor:
        return h * self.gain[i]


class Squashed(Scalars):
    """No row is read by its index."""

    def at(self, i: int, h: Tensor) -> Tensor:
        return h * torch.tanh(self.gain)[i]


class Unbound(Scalars):
    def walk(self, h: Tensor) -> Tensor:
        for gain, layer in zip(self.gain, self.layers, strict=True):
            h = layer(gain * h)
        return h


class Behind(Scalars):
    """Read behind its layer."""

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(h) * self.gain[i]
        return h


class Mirrored(Scalars):
    def at(self, i: int, h: Tensor) -> Tensor:
        return h * self.gain[DEPTH - 1 - i]


class Embedded(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Embedding(DEPTH, WIDTH)

    def at(self, i: int, h: Tensor) -> Tensor:
        return h + self.number(torch.tensor(i))


class Buffer(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.arange(float(DEPTH)))

    def at(self, i: int, h: Tensor) -> Tensor:
        return h + self.shift[i]


class Numbers(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0, 0.9, 0.8, 0.7]

    def at(self, i: int, h: Tensor) -> Tensor:
        return h * self.factors[i]


class ByKey(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.factors = {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8}

    def at(self, i: int, h: Tensor) -> Tensor:
        return h * self.factors[i]


class SomeNorms(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleDict({"1": nn.LayerNorm(WIDTH), "3": nn.LayerNorm(WIDTH)})

    def at(self, i: int, h: Tensor) -> Tensor:
        return self.extra[str(i)](h) if str(i) in self.extra else h


class Listed(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([parameter(WIDTH) for _ in range(DEPTH)])

    def at(self, i: int, h: Tensor) -> Tensor:
        return h + self.shifts[i]


class InConfig(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_layer=DEPTH, text_config=SimpleNamespace(factors=[1.0, 0.9, 0.8, 0.7]))

    def at(self, i: int, h: Tensor) -> Tensor:
        return h * self.config.text_config.factors[i]


NAMES: dict[type[Beside], str] = {
    Scalars: "gain", Unbound: "gain", Behind: "gain", Mirrored: "gain", Buffer: "shift", Numbers: "factors",
    ByKey: "factors", SomeNorms: "extra", Listed: "shifts", InConfig: "config.text_config.factors",
}  # fmt: skip


class Weighed(Scalars):
    """Every row acts on every layer."""

    def at(self, i: int, h: Tensor) -> Tensor:
        return h * torch.softmax(self.gain, 0)[i]


class Column(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.shifts = parameter(WIDTH, DEPTH)

    def at(self, i: int, h: Tensor) -> Tensor:
        return h + self.shifts[:, i]


class ReadInFull(Buffer):
    """All entries are read before the first layer."""

    def walk(self, h: Tensor) -> Tensor:
        for factor, layer in zip(self.shift.tolist(), self.layers, strict=True):
            h = layer(h * factor)
        return h


class Projected(Beside):
    """One projection gives the shifts of all layers, as in adaptive norms."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Linear(WIDTH, DEPTH * WIDTH)

    def walk(self, h: Tensor) -> Tensor:
        for shift, layer in zip(self.shifts(h.mean(1, keepdim=True)).chunk(DEPTH, -1), self.layers, strict=True):
            h = layer(h + shift)
        return h


class EveryOther(Beside):
    """A module for every other position, which is in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def at(self, i: int, h: Tensor) -> Tensor:
        return self.norm(h) if i % 2 else h


class Formula(Beside):
    def at(self, i: int, h: Tensor) -> Tensor:
        return h * (1 - i / len(self.layers))


class SumOutside(Formula):
    """The residual sum is outside of the layers, and so is a number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(DEPTH))

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = h + layer(h) * (i + 1) ** -0.5
        return h


class PlainSum(SumOutside):
    """The same without numbers."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return h


class Windowed(ResidualMlp):
    """The model gives it a number in each call."""

    def forward(self, x: Tensor, window: int = 1) -> Tensor:
        return super().forward(x[:, :window].mean(1, keepdim=True) + x)


class Arguments(Beside):
    """The numbers are arguments of the layers, and nowhere kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Windowed() for _ in range(DEPTH))

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(h, window=1 + i)
        return h


UNNAMED = [Squashed, Embedded, Weighed, Column, ReadInFull, Projected, EveryOther, Formula, SumOutside]


class Unrelated(Beside):
    """As many rows and entries as layers, which have nothing to do with their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.bias, self.sizes = parameter(DEPTH, DEPTH), parameter(DEPTH), [1, 2, 3, 4]
        self.ends = nn.ModuleDict({"0": nn.LayerNorm(WIDTH), "1": nn.LayerNorm(WIDTH)})
        self.table = nn.Embedding(DEPTH, WIDTH)

    def walk(self, h: Tensor) -> Tensor:
        h = h + self.table(torch.arange(DEPTH)).sum(0) + (self.mix @ self.bias).sum()
        for size in self.sizes:
            h = h * size
        return self.ends["1"](self.ends["0"](super().walk(h)))

    def at(self, i: int, h: Tensor) -> Tensor:
        return h + self.bias.sum() * 0.01 + self.sizes[0]


class Gained(ResidualMlp):
    """The remedy: the number is a member of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gain)


class OwnGains(Chain):
    def __init__(self) -> None:
        super().__init__([Gained() for _ in range(DEPTH)])


class Ends(Beside):
    """Entries that are read before the first layer, between all of them alike, and behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.scales = {"in": 2.0, "out": 0.5}

    def walk(self, h: Tensor) -> Tensor:
        h = self.norms[0](h) * self.scales["in"]
        for layer in self.layers:
            h = self.norms[0](layer(h))
        return self.norms[1](h) * self.scales["out"]


class Tapped(Beside):
    """Adds what two heads make of the hidden state behind the first layer and behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def walk(self, h: Tensor) -> Tensor:
        taps = []
        for i, layer in enumerate(self.layers):
            h = layer(h)
            taps += [self.tap(0)(h)] if i == 0 else []
        return self.tap(1)(h) + taps[0]

    def tap(self, i: int) -> nn.Module:
        return self.heads[i]


class TappedByName(Tapped):
    """The remedy: heads that have nothing to do with each other are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first_head, self.last_head = self.heads
        del self.heads

    def tap(self, i: int) -> nn.Module:
        return self.last_head if i else self.first_head


class Noisy(Beside):
    """Draws random numbers between the layers in every mode."""

    def at(self, i: int, h: Tensor) -> Tensor:
        return h + 0.01 * torch.randn_like(h)


class Alternate(Beside):
    """Calls its layers in two ways."""

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(x=h) if i % 2 else layer(h)
        return h


@pytest.mark.parametrize("model", NAMES, ids=lambda model: model.__name__)
def test_edits_of_positions_are_refused_with_the_name_of_what_is_read(model: type[Beside]) -> None:
    kind = kind_of(model)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        for edit in EDITS:
            assert_refused(
                relay, edit, rf"by the position of the layers of layers: \w+ '{NAMES[model]}' \(entry .*as a member"
            )
        relay.apply(Freeze(0))
        assert relay.verify(kind.make_batch(4)).equal


@pytest.mark.parametrize("model", UNNAMED, ids=lambda model: model.__name__)
def test_a_change_between_layers_by_position_is_refused(model: type[Beside]) -> None:
    kind = kind_of(model)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        for edit in EDITS[:4] if model is SumOutside else EDITS:  # there is no identity without a residual sum
            assert_refused(
                relay, edit, "before layer 2 of layers than before an earlier one.*its member .*force=True leaves"
            )
        if model is not Projected:
            relay.apply(Swap(0, 2), force=True)
        assert relay.verify(kind.make_batch(4)).equal


def test_an_argument_by_position_is_refused_where_a_layer_would_get_another_one() -> None:
    kind = kind_of(Arguments)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        for edit in (Drop(1), Swap(0, 2), Insert(1, init="copy")):
            assert_refused(
                relay, edit, r"layer layers.\d would be given another argument window than before.*its member"
            )
        relay.apply(Drop(-1))  # no other layer is given another number
        relay.apply(Duplicate(slice(None), mode="top"))
        assert relay.verify(kind.make_batch(4)).equal


class Named(Arguments):
    """A buffer for each layer, by a name with its position."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(DEPTH):
            self.register_buffer(f"window_{i}", torch.tensor(1 + i))

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(h, window=int(getattr(self, f"window_{i}")))
        return h


class WithWindow(ResidualMlp):
    """Has its window as a member."""

    def __init__(self, window: float) -> None:
        super().__init__()
        self.register_buffer("window", torch.tensor(window))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.window


class OwnWindows(Chain):
    def __init__(self) -> None:
        super().__init__([WithWindow(1.0 + 0.1 * i) for i in range(DEPTH)])


def test_edits_after_which_the_model_fails_are_refused_and_the_remedy_works() -> None:
    with relay_of(kind := kind_of(OwnWindows)) as relay:
        relay.step(kind.make_batch(4))
        relay.apply(Insert(4, init="copy"))
        relay.apply(Duplicate(slice(None), mode="top"))
        assert len(relay.stack) == 10 and relay.verify(kind.make_batch(4)).equal
    kind = kind_of(Named)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        for edit in (Insert(4, init="copy"), Duplicate(slice(None), mode="top")):
            assert_refused(
                relay, edit, "the model's own code fails on rows .*no attribute 'window_4'.*member of the layer"
            )
        relay.apply(Drop(-1))
        assert relay.verify(kind.make_batch(4)).equal


@pytest.mark.parametrize("edit", EDITS, ids=repr)
def test_a_model_with_many_such_things_names_all_of_them(edit: Any) -> None:
    kind = BY_NAME["by_depth"]
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        names = "'resid_lambdas'.*'x0_lambdas'.*'windows'.*'value_embeds' .entry 1 for layer 1; 3 for layer 3"
        assert_refused(relay, edit, names)
        with pytest.raises(ValueError, match="'windows'"):
            relay.probe([kind.make_batch(4)], edit)
        assert relay.verify(kind.make_batch(4)).equal


@pytest.mark.parametrize("edit", EDITS, ids=repr)
def test_as_many_rows_as_layers_are_no_reason(edit: Any) -> None:
    kind = kind_of(Unrelated)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        relay.apply(edit)
        assert relay.verify(kind.make_batch(4)).equal
        relay.undo()
        assert relay.verify(kind.make_batch(4)).equal


@pytest.mark.parametrize("model", [Ends, Noisy, Alternate, PlainSum], ids=lambda model: model.__name__)
def test_code_that_treats_positions_alike_is_no_reason(model: type[Beside]) -> None:
    kind = kind_of(model)
    for edit in EDITS[:4]:
        with relay_of(kind) as relay:
            relay.step(kind.make_batch(4))
            relay.apply(edit)
            if model is not Noisy:
                relay.step(kind.make_batch(4), skip=[1])
            assert len(relay.journal) == 1


BY_POSITION = {"by_depth", "norm_outside", "reversible"}  # the last one runs its layers in pairs
STACKED = [kind.name for kind in KINDS if kind.name != "unlike"]  # in which layers must be named


@pytest.mark.parametrize("name", STACKED)
def test_kinds_are_refused_for_positions_only_if_they_depend_on_them(name: str) -> None:
    kind = BY_NAME[name]
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        refused = list[str]()
        for stack, layers in relay.stacks.items():
            last = len(layers) - 1
            moves = [Swap((stack, 0), (stack, last)), Move((stack, 0), (stack, last)), Drop((stack, 0))] if last else []
            for edit in (*moves, Duplicate((stack, slice(0, 1)))):
                try:
                    relay.apply(edit)
                    relay.undo()
                except ValueError as error:
                    refused.append(str(error))
        about_positions = [text for text in refused if "by the position" in text or "the model's own code" in text]
        assert bool(about_positions) == (name in BY_POSITION), about_positions


class Strict(Numbers):
    """A list of one entry per layer whose type the model checks."""

    def walk(self, h: Tensor) -> Tensor:
        assert type(self.factors) is list, "factors is no list"
        return super().walk(h)


def test_a_model_that_cannot_be_observed_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    kind = kind_of(Strict)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        assert_refused(relay, Swap(0, 2), r"factors may be read .*failed: AssertionError: factors is no list")
        assert "factors is no list" in caplog.text
        relay.apply(Swap(0, 2), force=True)


def test_before_the_first_step_an_example_of_a_batch_decides() -> None:
    for model, allowed in ((Scalars, False), (Unrelated, True)):
        kind = kind_of(model)
        with relay_of(kind) as relay:
            assert_refused(
                relay, Drop(1), r"(gain|bias).* may be read by the position of the 4 layers.*relay.expect\(batch\)"
            )
            with relay.expect(kind.make_batch(4)):
                if allowed:
                    relay.apply(Drop(1))
                else:
                    assert_refused(relay, Drop(1), "parameter 'gain'")
    with relay_of(BY_NAME["chain"]) as relay:
        relay.apply(Drop(1))  # nothing there could be read so


def test_the_remedy_works() -> None:
    """A number that is a member of its layer moves with it, as in a list by hand."""
    kind, config = kind_of(OwnGains), RelayConfig(micro_batches=2)
    model, plain = kind.make_model(), kind.make_model()
    in_core = InCore(kind, plain, adamw(plain), config)
    with Relay(model, adamw(model), EmulatedDevice(), loss=kind.loss, config=config) as relay:
        assert relay.step(kind.make_batch(4)).loss == in_core.step(kind.make_batch(4))
        relay.apply(Swap(0, 2))
        relay.apply(Drop(1))
        first, _, third, fourth = plain.layers
        plain.layers = nn.ModuleList([third, first, fourth])
        assert relay.step(kind.make_batch(4, 1)).loss == in_core.step(kind.make_batch(4, 1))
        assert_state(model, copy_state(plain))


@pytest.mark.parametrize("edit", [Drop(1), Drop(-1), Swap(0, 2)], ids=repr)
def test_entries_that_have_nothing_to_do_with_each_other_get_a_remedy_that_works(edit: Any) -> None:
    """Read behind the first layer and behind the stack: refused in one list; by name, or with force, as an edit by hand."""
    with relay_of(kind := kind_of(Tapped)) as relay:
        relay.step(kind.make_batch(4))
        assert_refused(
            relay, edit, "entry 0 for layer 1; 1 behind the last layer.*another name .self.last_norm., or force=True"
        )
    for made, force in ((Tapped, True), (TappedByName, False)):
        kind, config = kind_of(made), RelayConfig(micro_batches=2)
        model, plain = kind.make_model(), kind.make_model()
        in_core = InCore(kind, plain, adamw(plain), config)
        with Relay(model, adamw(model), EmulatedDevice(), loss=kind.loss, config=config) as relay:
            assert relay.step(kind.make_batch(4)).loss == in_core.step(kind.make_batch(4))
            if edit == Swap(0, 2) and not force:  # the output of the first layer has a use of its own
                assert_refused(relay, edit, "uses the output of layers.0.*force=True leaves it there")
            relay.apply(edit, force=force or edit == Swap(0, 2))
            a, b, c, d = plain.layers
            plain.layers = nn.ModuleList({Drop(1): [a, c, d], Drop(-1): [a, b, c], Swap(0, 2): [c, b, a, d]}[edit])
            for step in (1, 2):
                assert relay.step(kind.make_batch(4, step)).loss == in_core.step(kind.make_batch(4, step))


def test_force_leaves_things_as_they_are() -> None:
    kind = kind_of(Scalars)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        relay.apply(Swap(0, 2), force=True)
        assert relay.verify(kind.make_batch(4)).equal
        relay.undo()
        assert relay.verify(kind.make_batch(4)).equal


class Spare(Scalars):
    """Has an entry more than layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter(DEPTH + 1)


def test_further_entries_let_force_add_a_layer() -> None:
    """As the refusal says: by force alone the new layer would find no entry."""
    kind, config = kind_of(Spare), RelayConfig(micro_batches=2)
    sgd = partial(torch.optim.SGD, lr=0.05)
    model, plain = kind.make_model(), kind.make_model()
    in_core = InCore(kind, plain, sgd(plain.parameters()), config)
    with Relay(model, sgd, EmulatedDevice(), loss=kind.loss, config=config) as relay:
        assert relay.step(kind.make_batch(4)).loss == in_core.step(kind.make_batch(4))
        assert_refused(
            relay, Insert(2, init="copy"), "for further layers give them further entries before the relay is made"
        )
        relay.apply(Insert(2, init="copy"), force=True)
        plain.layers.insert(2, copy.deepcopy(plain.layers[1]))
        in_core.optimizer = sgd(plain.parameters())
        for step in (1, 2):
            assert relay.step(kind.make_batch(4, step)).loss == in_core.step(kind.make_batch(4, step))
        assert_state(model, copy_state(plain))


def test_things_are_observed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(Unrelated)
    with relay_of(kind) as relay:
        passes, observe = list[Any](), relay._evidence._forwards.observe
        monkeypatch.setattr(
            relay._evidence._forwards, "observe", lambda *given, **how: passes.append(how) or observe(*given, **how)
        )
        relay.step(kind.make_batch(4))
        relay.apply(Freeze(3))
        assert not passes
        relay.apply(Swap(0, 2))
        assert len(passes) == 3, "what is read, and twice what the code between the layers does"
        relay.apply(Swap(0, 1), Drop(0))
        assert len(passes) == 6, (
            "the latter again, since weights may have been trained, and the model without the layer"
        )


class WithGraph(nn.Module):
    """Hands every layer a sparse matrix, which has no address, as another object each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Neighbours() for _ in range(DEPTH))

    def forward(self, h: Tensor) -> Tensor:
        graph = torch.eye(WIDTH).to_sparse()
        for layer in self.layers:
            h = layer(h, graph.detach())
        return h


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, graph: Tensor) -> Tensor:
        return h + torch.sparse.mm(graph, self.linear(h).T).T


def test_layers_that_get_a_sparse_matrix_are_observed(caplog: pytest.LogCaptureFixture) -> None:
    batch = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with Relay(WithGraph(), partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), loss=nn.MSELoss()) as relay:
        relay.step(batch)
        relay.apply(Swap(0, 2))
        assert not caplog.records, "the forward on a few rows succeeded"
        assert relay.verify(batch).equal


class FromTheSixth(Beside):
    """Has code between layers where the stack is deeper than at first."""

    def at(self, i: int, h: Tensor) -> Tensor:
        return h if i < 5 else h * i


def test_layers_that_pass_on_their_outputs_alone_are_observed_once_per_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, once = kind_of(FromTheSixth), {"mode": "evaluation"}
    with relay_of(kind) as relay:
        passes, observe = list[Any](), relay._evidence._forwards.observe
        monkeypatch.setattr(
            relay._evidence._forwards, "observe", lambda *given, **how: passes.append(how) or observe(*given, **how)
        )
        for _ in range(2):
            relay.step(kind.make_batch(4))
            relay.apply(Swap(0, 2))
            relay.apply(Drop(1))
            relay.undo(), relay.undo()
        assert passes == [{}, once], "with four layers, and the model after the first Drop"
        relay.apply(Insert(4))
        relay.apply(Insert(4))
        assert passes == [{}, once, once, once, {}], "the model with and without the first Insert, and with five layers"
        with pytest.raises(ValueError, match="before layer 5 of layers than before an earlier one"):
            relay.apply(Move(0, 3))
        assert relay.verify(kind.make_batch(4)).equal


def test_a_batch_that_fails_does_not_decide() -> None:
    """Its error belongs to the step, and edits of a model without such things go on."""
    model = nn.Sequential(nn.Embedding(8, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    loss = lambda outputs, batch: F.mse_loss(outputs, torch.zeros_like(outputs))  # noqa: E731
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), [*model][1:], loss) as relay:
        with relay.expect((torch.full((2, 3), 99),)):
            relay.apply(Drop(1))
        assert relay.verify((torch.ones(2, 3, dtype=torch.long),)).equal
