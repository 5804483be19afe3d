"""What the model notes on itself in its forward is still there when its own micro-batch goes on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy
import pytest
import torch
from oracle import assert_equal, assert_state, both, copy_state, run_both
from patience import HANG_S
from torch import Tensor, nn
from zoo import BY_NAME, WIDTH, Chain, Kind, ResidualMlp

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.step.guards.attribute_tracer import AttributeTracer


class NotesNumber(Chain):
    """A number, a list and a tensor that the shell sets before the layers and reads after each."""

    def walk(self, h: Tensor) -> Tensor:
        self.rows, self.seen, self.scale = len(h), [], h.detach().mean()
        for layer in self.layers:
            h = layer(h) * (1 + 0.1 * self.rows) + self.scale
            self.seen.append(h.shape)
        assert len(self.seen) == len(self.layers), "another micro-batch's list"
        return h


class Counts(Chain):
    """A counter on the model that every forward advances."""

    count = 0

    def walk(self, h: Tensor) -> Tensor:
        self.count += 1
        mine = self.count
        h = super().walk(h)
        assert self.count == mine
        return h * (1 + 0.01 * self.count)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("model", [NotesNumber, Counts])
def test_notes_of_the_shell_are_its_own(model: Any, stash: str) -> None:
    chain = BY_NAME["chain"]

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return model([ResidualMlp() for _ in range(3)])

    kind = Kind("notes", make_model, chain.make_batch, chain.loss, loss_over="micro-batch")
    assert_equal(run_both(kind, 3, RelayConfig(micro_batches=3, stash=stash), rows=7))


def by_super(model: nn.Module, value: float) -> None:
    super(Chain, model).__setattr__("note", value)


def by_object(model: nn.Module, value: float) -> None:
    object.__setattr__(model, "note", value)


def by_dict(model: nn.Module, value: float) -> None:
    vars(model)["note"] = value


def on_torchs_own(model: Any, value: float) -> None:
    model.head.note = value


def as_submodule(model: Any, value: float) -> None:
    model.note = nn.Threshold(-9.0, value)


PAST_SPIES = [by_super, by_object, by_dict, on_torchs_own, as_submodule]


class NotesPastSpies(Chain):
    """Notes a number in a way that no spy sees, before the layers, and reads it after them; at once or from its third step on."""

    way: Callable[[Any, float], None]
    begins, forwards = 0, 0

    def walk(self, h: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards > self.begins:
            NotesPastSpies.way(self, float(h.detach().mean()))
        h = super().walk(h)
        note = vars(self).get("note", vars(self.head).get("note", self._modules.get("note", 1.0)))
        return h * (note.value if isinstance(note, nn.Module) else note)


@pytest.mark.all_cases
@pytest.mark.parametrize("begins", [0, 6])
@pytest.mark.parametrize("way", PAST_SPIES)
def test_what_no_spy_sees_is_the_micro_batchs_own(way: Any, begins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = BY_NAME["chain"]
    monkeypatch.setattr(NotesPastSpies, "way", staticmethod(way), raising=False)
    monkeypatch.setattr(NotesPastSpies, "begins", begins)

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return NotesPastSpies([ResidualMlp() for _ in range(3)])

    kind = Kind("past spies", make_model, chain.make_batch, chain.loss, loss_over="micro-batch")
    assert_equal(run_both(kind, 4, RelayConfig(micro_batches=3), rows=7))


class Hooked(nn.Module):
    """Hooks on modules of torch's own, in the shell and as layers, note numbers there, which the model reads in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for module in (self.stem, *self.layers):
            module.register_forward_hook(lambda module, _, out: setattr(module, "note", float(out.detach().mean())))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h * (1 + self.stem.note + sum(layer.note for layer in self.layers))


def test_what_hooks_note_on_modules_of_torchs_own() -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return Hooked()

    def make_batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randn(rows, WIDTH, generator=drawn), torch.randn(rows, WIDTH, generator=drawn)

    def loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(out, batch[1])

    assert_equal(
        run_both(
            Kind("hooked", make_model, make_batch, loss, loss_over="micro-batch"),
            4,
            RelayConfig(micro_batches=3),
            rows=7,
        )
    )


class Sealed(type):
    """Nothing is set on its classes."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} is sealed")


class NotesOnSealed(NotesNumber, metaclass=Sealed):
    """Its class may not be changed."""


def test_a_class_that_lets_nothing_be_set_is_seen_as_any_other() -> None:
    chain = BY_NAME["chain"]

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return NotesOnSealed([ResidualMlp() for _ in range(3)])

    before = {cls: dict(vars(cls)) for cls in (nn.Module, nn.Linear, ResidualMlp, *NotesOnSealed.__mro__[:4])}
    kind = Kind("sealed", make_model, chain.make_batch, chain.loss, loss_over="micro-batch")
    assert_equal(run_both(kind, 3, RelayConfig(micro_batches=3), rows=7))
    assert {cls: dict(vars(cls)) for cls in before} == before


def test_spies_that_cannot_stand_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may come while they take their places."""

    def interrupted(spies: AttributeTracer, classes: Any) -> None:
        see_all_sets(spies, classes)
        raise KeyboardInterrupt

    chain, see_all_sets = BY_NAME["chain"], AttributeTracer.trace_all_sets
    before = {cls: dict(vars(cls)) for cls in (nn.Module, nn.Linear, ResidualMlp, Chain)}
    with both(chain, RelayConfig(micro_batches=3)) as pair:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(AttributeTracer, "trace_all_sets", interrupted)
            pair.relay.step(chain.make_batch(7, 0))
        assert {cls: dict(vars(cls)) for cls in before} == before
        assert_equal([pair.step(chain.make_batch(7, seed)) for seed in range(2)])


class Waits(NotesNumber):
    """Waits in its forward until it may go on."""

    def walk(self, h: Tensor) -> Tensor:
        self.entered.set()
        assert self.may_go_on.wait(HANG_S)
        return super().walk(h)


def test_passes_in_two_threads_leave_classes_as_they_were() -> None:
    """The one that begins first ends first, while the spies of the other one stand before its own."""
    chain = BY_NAME["chain"]

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        model = Waits([ResidualMlp() for _ in range(3)])
        for dropout in [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]:
            dropout.p = 0.0  # the process has one stream of random numbers
        model.__dict__.update(entered=Event(), may_go_on=Event())
        model.may_go_on.set()
        return model

    kind, config = (
        Kind("waits", make_model, chain.make_batch, chain.loss, loss_over="micro-batch"),
        RelayConfig(micro_batches=3),
    )
    before = {cls: dict(vars(cls)) for cls in (torch.nn.Module, torch.nn.Linear, ResidualMlp, *Waits.__mro__[:3])}
    with both(kind, config) as first, both(kind, config) as second, ThreadPoolExecutor(2) as pool:
        # The first steps learn which attributes there are.
        assert_equal([sides.step(kind.make_batch(7, 0)) for sides in (first, second)])
        running = []
        for sides in (first, second):
            model = sides.relay.model
            model.entered.clear(), model.may_go_on.clear()
            running.append(pool.submit(sides.step, kind.make_batch(7, 1)))
            assert model.entered.wait(HANG_S)
        for sides, step in zip((first, second), running, strict=True):
            sides.relay.model.may_go_on.set()
            assert_equal([step.result(HANG_S)])
    assert {cls: dict(vars(cls)) for cls in before} == before


# -- what layers note on themselves ------------------------------------------------------------------------------------


class Box:
    """An object of no pytree."""

    value = 0.0


def counts(layer: Any, value: float) -> None:
    layer.size += 1


def counts_elsewhere(layer: Any, value: float) -> None:
    layer.size = float(next(CALLS))


def writes_dict(layer: Any, value: float) -> None:
    layer.__dict__["size"] = value


def fills_dict(layer: Any, value: float) -> None:
    layer.box["value"] = value


def fills_object(layer: Any, value: float) -> None:
    layer.thing.value = value


def fills_array(layer: Any, value: float) -> None:
    layer.array[0] = value


def fills_tensor(layer: Any, value: float) -> None:
    layer.plain.fill_(value)


CALLS = itertools.count()
KEEPS = {
    "a counter": counts,
    "a counter outside of the model": counts_elsewhere,
    "in __dict__": writes_dict,
    "in a dictionary": fills_dict,
    "in an object": fills_object,
    "in an array": fills_array,
    "in a tensor": fills_tensor,
}
READS: dict[str, Callable[[Any], Any]] = {
    "in a dictionary": lambda layer: layer.box["value"],
    "in an object": lambda layer: layer.thing.value,
    "in an array": lambda layer: float(layer.array[0]),
    "in a tensor": lambda layer: layer.plain.item(),
}


class Noting(torch.nn.Module):
    """A layer that keeps something on itself, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.way = torch.nn.Linear(WIDTH, WIDTH), way
        self.size, self.before, self.sizes = 0.0, None, []
        self.box, self.thing, self.array, self.plain = {"value": 0.0}, Box(), numpy.zeros(2), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        before = self.before
        if self.way == "a table":
            self.before = torch.linspace(0, 1, WIDTH) if before is None else before
            return x + h * self.before
        if self.way.startswith("a number"):
            self.size = float(h.detach().abs().mean())
        if self.way == "a number in a list":
            self.sizes.append(self.size)
        KEEPS.get(self.way, lambda *_: None)(self, float(h.detach().abs().mean()))
        if self.way == "set, then the last one read":
            self.before = h.detach().mean((0, 1))
        seen = h if before is None else h + before
        if self.way == "the last one read, then set":
            self.before = seen.detach().mean((0, 1))
        return x + h


class ReadsNotes(Chain):
    """The shell reads what layers have kept only when all of them have run."""

    def walk(self, h: Tensor) -> Tensor:
        way = self.layers[0].way
        if way == "a number, of the last forward":
            h = h * (1 + sum(layer.size for layer in self.layers))
        for layer in self.layers:
            h = layer(h)
            if way == "a number, set by the shell too":
                layer.size = 2.0
        if way == "a number in a list":
            return h * sum(layer.sizes[-1] for layer in self.layers)
        read = READS.get(way, lambda layer: layer.size)
        return h * (1 + sum(read(layer) for layer in self.layers))


NOTES = {
    "a table": None,
    "a number": None,
    "a number, set by the shell too": None,
    "a number, of the last forward": "attribute 'size' of Noting passes a value from one micro-batch's forward to the next",
    **{way: "passes a value from one micro-batch's forward to the next" for way in KEEPS},
    "a counter": None,
    "a counter outside of the model": "'size' of Noting, which a layer computes from its last value",
    "a number in a list": "attribute 'sizes' of Noting passes a value from one micro-batch's forward to the next",
    "set, then the last one read": "reads a tensor of shape .* that was made for micro-batch 0",
    "the last one read, then set": "attribute 'before' of Noting passes a value from one micro-batch's forward to the next",
}


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("way", NOTES)
def test_notes_of_layers_are_the_micro_batchs_or_refused(way: str, micro_batches: int, stash: str) -> None:
    """Two micro-batches are a case of their own: what the first one leaves may be a table for all."""
    chain = BY_NAME["chain"]

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return ReadsNotes([Noting(way) for _ in range(3)])

    kind = Kind("notes", make_model, chain.make_batch, chain.loss, loss_over="micro-batch")
    config = RelayConfig(micro_batches=micro_batches, stash=stash)
    if (words := NOTES[way]) is None:
        assert_equal(run_both(kind, 3, config, rows=7))
        return
    with both(kind, config) as pair:
        before = copy_state(pair.relay.model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=words):
                pair.relay.step(kind.make_batch(7, 0))
            assert_state(pair.relay.model, before)


class Tally(nn.Module):
    """A metric as in torchmetrics: its hash reads its state, and `==` compares no identity."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.sums = 0, [0.0]
        self.register_buffer("total", torch.zeros(1))

    def __hash__(self) -> int:
        return hash((id(self), self.rows, *self.sums))

    def __eq__(self, other: object) -> Any:
        return torch.eq(self.total, self.rows)

    def forward(self, h: Tensor) -> None:
        self.rows += len(h)
        self.sums[0] += float(h.detach().sum())
        self.total += h.detach().sum()


class Tallied(Chain):
    """The shell calls a metric after the layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.tally = Tally()

    def walk(self, h: Tensor) -> Tensor:
        h = super().walk(h)
        self.tally(h)
        return h


class TalliedMlp(ResidualMlp):
    """A layer whose hash reads its attributes."""

    rows = 0

    def __hash__(self) -> int:
        return hash((id(self), self.rows))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)
        return super().forward(x)


@pytest.mark.all_cases
@pytest.mark.parametrize("layer", [ResidualMlp, TalliedMlp])
@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_hash_that_reads_attributes_is_not_called(layer: Any, stash: str) -> None:
    chain = BY_NAME["chain"]

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return Tallied([layer() for _ in range(3)])

    kind = Kind("tallied", make_model, chain.make_batch, chain.loss, loss_over="micro-batch")
    config = RelayConfig(micro_batches=3, stash=stash)
    assert_equal(run_both(kind, 3, config, rows=6))
    with both(kind, config) as pair:
        model = pair.relay.model
        pair.relay.step(kind.make_batch(6, 0))
        assert model.tally.rows == 6


class KeepsAux(ResidualMlp):
    """Keeps an auxiliary loss, as layers with experts do, and the activations that it is computed from."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        self.aux = self.kept.square().mean((1, 2))
        return self.kept


@pytest.mark.all_cases
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_an_objective_reads_what_layers_keep(micro_batches: int, stash: str) -> None:
    """Also in evaluation and where the losses of a few rows are compared: there is no warning that they were not."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch["x"])
        return output.square().mean() + 0.1 * sum(layer.aux.mean() + layer.kept.mean() for layer in model.layers)

    torch.manual_seed(0)
    model = Chain([KeepsAux() for _ in range(3)])
    batch = {"x": BY_NAME["chain"].make_batch(6, 0)[0]}
    config = RelayConfig(micro_batches=micro_batches, stash=stash)
    with Relay(model, objective=objective, device=EmulatedDevice(memory_bytes=50_000_000), config=config) as relay:
        expected = copy.deepcopy(model).eval()
        with torch.no_grad():
            losses = [float(objective(expected, {"x": part})) for part in batch["x"].chunk(micro_batches)]
        assert relay.evaluate(batch) == pytest.approx(sum(losses) / micro_batches)
        assert "equal to the step in core" in str(relay.step(batch).verified)
        assert relay.evaluate(batch) == relay.evaluate(batch)
