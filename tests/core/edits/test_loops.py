"""Looped stacks: the number of loops as an edit, and layers in its place.

The oracle is plain training in core of a model that was built with the other number of loops, or with as many layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import InCore, adamw, assert_state, copy_state
from torch import Tensor, nn
from zoo import BY_NAME, Chain, Kind, Looped, ResidualMlp, cross_entropy, sequences

from l2l_core import (
    LOOPED_RECIPES,
    Drop,
    Duplicate,
    EmulatedDevice,
    Looping,
    Loops,
    Relay,
    RelayConfig,
    Unroll,
)
from l2l_core.edits.edit import Edit

LOOPED = BY_NAME["looped"]
CONFIG = RelayConfig(micro_batches=2, seed=0)


class ByConfig(Looped):
    """The forward reads the number from a configuration, of which the attribute is an unused copy."""

    def __init__(self, loops: int = 2, depth: int = 2) -> None:
        super().__init__(loops, depth)
        self.config = SimpleNamespace(n_layer=depth, heads=2, n_loops=loops)

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.config.n_loops):
            h = Chain.walk(self, h)
        return h


class Core(nn.Module):
    """A looped stack inside another one's model, with numbers of the same value beside it."""

    def __init__(self, loops: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualMlp() for _ in range(2))
        self.rounds, self.heads = loops, loops

    def forward(self, h: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for layer in self.layers:
                h = layer(h)
        return h


class WithCore(Chain):
    def __init__(self, loops: int = 2) -> None:
        super().__init__([ResidualMlp() for _ in range(2)])
        self.core, self.n_layer = Core(loops), 2

    def walk(self, h: Tensor) -> Tensor:
        return self.core(super().walk(h))


class InTraining(Looped):
    """Another number of loops in training than in evaluation."""

    def __init__(self, loops: int = 2) -> None:
        super().__init__(loops)
        self.n_loops_in_evaluation = 3

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.n_loops if self.training else self.n_loops_in_evaluation):
            h = Chain.walk(self, h)
        return h


class EntryPerLoop(Looped):
    """A vector for each loop."""

    def __init__(self, loops: int = 2, entries: int = 2) -> None:
        super().__init__(loops)
        self.per_loop = nn.Parameter(torch.randn(entries, 32))

    def walk(self, h: Tensor) -> Tensor:
        for i in range(self.n_loops):
            h = Chain.walk(self, h + self.per_loop[i])
        return h


class Product(Looped):
    """Two numbers, each of which changes the number of loops."""

    def __init__(self, loops: int = 1) -> None:
        super().__init__(loops)
        self.repeats = 1

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.n_loops * self.repeats):
            h = Chain.walk(self, h)
        return h


class OneMore(Looped):
    """The number is that of the further loops."""

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.n_loops + 1):
            h = Chain.walk(self, h)
        return h


class Drawn(Looped):
    """As often as the number says, or once more."""

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.n_loops + int(torch.rand(()) > 0.6)):
            h = Chain.walk(self, h)
        return h


class Each(Looped):
    """Every layer several times, before the next one."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.n_loops):
                h = layer(h)
        return h


def kind_of(make: Callable[[], nn.Module]) -> Kind:
    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().train()

    return Kind("looped", make_model, sequences, cross_entropy, loss_over="micro-batch" if make is Drawn else None)


def relay_of(kind: Kind, **options: Any) -> Relay:
    model = kind.make_model()
    options |= {"loss": kind.loss, "loss_over": kind.loss_over, "config": CONFIG, "layers": kind.layers}
    return Relay(model, adamw(model), EmulatedDevice(), **options)


def batch_of(kind: Kind, seed: int) -> Any:
    return kind.make_batch(4, seed)


def built_anew(kind: Kind, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> InCore:
    """Plain training of another model with the weights and the optimizer state of a relay's."""
    twin = kind.make_model()
    twin.load_state_dict(model.state_dict())
    made = adamw(twin)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return InCore(kind, twin, made, CONFIG, steps)


def assert_trains_alike(relay: Relay, in_core: InCore, count: int = 2) -> None:
    for seed in range(10, 10 + count):
        batch = batch_of(in_core.kind, seed)
        assert relay.step(batch).loss == in_core.step(batch)
        assert_state(relay.model, copy_state(in_core.model))


# -- the number of loops -----------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, int], str | None]] = {  # numbers afterwards; stack
    "attribute": (Looped, {"n_loops": 3}, None),
    "configuration": (ByConfig, {"n_loops": 3, "config.n_loops": 3}, None),
    "inside": (WithCore, {"core.rounds": 3}, "core.layers"),
    "in training": (InTraining, {"n_loops": 3}, None),
    "once": (partial(Looped, loops=1), {"n_loops": 3}, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_loops_is_found_and_trains_as_a_model_built_with_it(name: str) -> None:
    make, numbers, stack = MODELS[name]
    kind = kind_of(make)
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        before, config = copy_state(relay.model), getattr(relay.model, "config", None)
        relay.apply(Loops(3, stack=stack))
        assert relay.journal[-1].loops == numbers and relay.loops == {stack or "layers": 3}
        assert config is None or (config.n_loops == 2 and relay.model.config.heads == 2)  # others may share it
        assert_state(relay.model, before)
        anew = kind_of(partial(make.func if isinstance(make, partial) else make, 3))
        assert_trains_alike(relay, built_anew(anew, relay.model, relay.optimizer, 1))
        relay.undo()
        assert_trains_alike(relay, built_anew(kind, relay.model, relay.optimizer, 3))
        relay.redo()
        assert relay.loops == {stack or "layers": 3} and relay.verify(batch_of(kind, 1)).equal


def test_albert_runs_its_layer_as_often_as_its_configuration_has_layers() -> None:
    kind = BY_NAME["albert"]
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        relay.apply(Loops(5))
        encoder: Any = relay.model.get_submodule("albert.encoder")
        assert relay.model.config.num_hidden_layers == encoder.config.num_hidden_layers == 5
        twin = kind.make_model()
        twin.config.num_hidden_layers = 5
        anew = Kind("albert", lambda: twin, kind.make_batch)
        assert_trains_alike(relay, built_anew(anew, relay.model, relay.optimizer, 1))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "each": (Each, "not run the layers of layers one after another.*ModuleList"),
    "none": (
        lambda: Chain([ResidualMlp() for _ in range(2)]),
        r"1 time\(s\).* no|give the model one: self.n_loops = 1",
    ),
    "two": (Product, r"each of n_loops, repeats alone .*attribute='n_loops'\) or Loops\(3, attribute='repeats'"),
    "one more": (OneMore, r"3 time\(s\), and setting none .*name it: Loops\(2, attribute='...'\), of n_loops"),
    "entries": (
        EntryPerLoop,
        r"n_loops=3 fails with IndexError.* an entry for each loop is missing, make the model with more",
    ),
    "drawn": (Drawn, r"with n_loops = 3 .* 3 times, but not with other random numbers: .* drawn at random"),
    "several places": (lambda: Chain([ResidualMlp()] * 2), "one layer in several places"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_no_single_number_is_found_the_edit_is_refused(name: str) -> None:
    make, match = REFUSED[name]
    kind = kind_of(make)
    layers = list(dict.fromkeys(kind.make_model().layers))
    with relay_of(replace(kind, layers=["layers.0"]) if len(layers) == 1 else kind) as relay:
        relay.step(batch_of(kind, 0))
        held = dict(vars(relay.model))
        for edit in (Loops(2 if name == "one more" else 3), Unroll()):
            with pytest.raises(ValueError) as found:
                relay.apply(edit)
            if isinstance(edit, Loops):
                assert found.match(match)
        assert vars(relay.model) == held and relay.journal == ()
        assert relay.verify(batch_of(kind, 1)).equal


def test_the_remedies_work() -> None:
    kind = kind_of(Product)
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        relay.apply(Loops(3, attribute="repeats"))
        assert vars(relay.model)["n_loops"] == 1 and relay.verify(batch_of(kind, 1)).equal
    kind = kind_of(partial(EntryPerLoop, 2, 4))
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        relay.apply(Loops(3))
        assert relay.verify(batch_of(kind, 1)).equal


def test_a_step_or_an_example_must_come_first_and_the_name_must_exist() -> None:
    with relay_of(LOOPED) as relay:
        with pytest.raises(ValueError, match=r"make a step first, or .*relay.expect\(batch\)"):
            relay.apply(Loops(3))
        with relay.expect(batch_of(LOOPED, 0)):
            with pytest.raises(ValueError, match=r"no such number; it has n_loops"):
                relay.apply(Loops(3, attribute="loops"))
            with pytest.raises(ValueError, match=r"runs the layers of layers 2 time\(s\), and setting depth"):
                relay.model.depth = 7
                relay.apply(Loops(3, attribute="depth"))
            relay.apply(Loops(3))
        assert relay.loops == {"layers": 3}
    with pytest.raises(ValueError, match="the number of loops is 0"):
        Loops(0)


def test_the_forecast_follows_the_number_of_loops() -> None:
    def runs(events: Any) -> int:
        return sum(event.kind == "forward" and event.layer == "L000" for event in events)

    with relay_of(LOOPED) as relay:
        batch = batch_of(LOOPED, 0)
        for _ in range(2):
            relay.step(batch)
        assert runs(relay.forecast(batch).trace.events) == 2 * CONFIG.micro_batches
        relay.apply(Loops(6))
        assert runs(relay.forecast(batch).trace.events) == 6 * CONFIG.micro_batches
        assert runs(relay.step(batch).trace.events) == 6 * CONFIG.micro_batches


# -- branches and saves ------------------------------------------------------------------------------------------------


def load(folder: Path, model: nn.Module) -> Relay:
    return Relay.load(folder, model, adamw(model), device=EmulatedDevice(), loss=LOOPED.loss)


def test_branches_keep_their_number_of_loops() -> None:
    with relay_of(LOOPED) as relay:
        relay.step(batch_of(LOOPED, 0))
        relay.fork("deep")
        relay.apply(Loops(4))
        deep = relay.step(batch_of(LOOPED, 1)).loss
        relay.switch("main")
        assert relay.loops == {"layers": 2}
        in_core = built_anew(LOOPED, relay.model, relay.optimizer, 1)
        assert_trains_alike(relay, in_core)
        relay.switch("deep")
        assert relay.loops == {"layers": 4} and relay.branches[0].loss == deep
        assert relay.verify(batch_of(LOOPED, 1)).equal


@pytest.mark.parametrize("edits", [[Loops(3)], [Loops(3), Unroll()], [Unroll(), Loops(2)]], ids=str)
def test_a_load_restores_the_number_of_loops(edits: list[Edit], tmp_path: Path) -> None:
    with relay_of(LOOPED) as relay:
        relay.step(batch_of(LOOPED, 0))
        relay.fork("other")
        for edit in edits:
            relay.apply(edit)
            relay.step(batch_of(LOOPED, 1))
        relay.save(tmp_path)
        loops, depth = vars(relay.model)["n_loops"], len(relay.stack)
        as_it_is = copy.deepcopy(relay.model)
        twins = [LOOPED.make_model(), as_it_is]
        for twin in twins:
            with load(tmp_path, twin) as again:
                assert vars(twin)["n_loops"] == loops and again.loops == {"layers": loops}
                assert again.step(batch_of(LOOPED, 2)).loss == copy_of_step(relay, tmp_path)
                for _ in edits:
                    again.undo()
                assert vars(twin)["n_loops"] == 2 and len(again.stack) == 2
                again.switch("main")
                assert again.verify(batch_of(LOOPED, 3)).equal and len(again.stack) == 2 <= depth


def copy_of_step(relay: Relay, folder: Path) -> float:
    """The loss of a step of the relay that was saved, which is then as before."""
    relay.fork("trial")
    loss = relay.step(batch_of(LOOPED, 2)).loss
    relay.switch("other")
    relay.discard("trial")
    return loss


def test_a_model_with_a_third_number_of_loops_is_refused(tmp_path: Path) -> None:
    with relay_of(LOOPED) as relay:
        relay.step(batch_of(LOOPED, 0))
        relay.apply(Loops(3))
        relay.save(tmp_path)
    model = Looped(7)
    held = copy_state(model)
    with pytest.raises(ValueError, match="the model has n_loops = 7, which was 2 when .* and is 3 in"):
        load(tmp_path, model)
    assert_state(model, held)
    model.n_loops = 3
    with load(tmp_path, model) as again:
        assert again.verify(batch_of(LOOPED, 1)).equal


@pytest.mark.parametrize("edits", [[], [Loops(4)], [Duplicate(0)]], ids=str)
def test_a_load_restores_a_number_that_was_set_by_hand(edits: list[Edit], tmp_path: Path) -> None:
    with relay_of(LOOPED) as relay:
        relay.step(batch_of(LOOPED, 0))
        for edit in edits:
            relay.apply(edit)
        relay.model.n_loops = 3
        relay.step(batch_of(LOOPED, 1))
        relay.save(tmp_path)
        expected = relay.step(batch_of(LOOPED, 2)).loss
    model = LOOPED.make_model()
    with load(tmp_path, model) as again:
        assert vars(model)["n_loops"] == 3 and again.step(batch_of(LOOPED, 2)).loss == expected
        again.save(tmp_path / "again")
    model = LOOPED.make_model()
    with load(tmp_path / "again", model):
        assert vars(model)["n_loops"] == 3


# -- layers in place of loops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attribute", "configuration", "inside"])
@pytest.mark.parametrize("policy", ["copy", 0.5, "fresh"])
def test_an_unrolled_stack_computes_the_same_and_trains_as_separate_layers(name: str, policy: Any) -> None:
    make, numbers, stack = MODELS[name]
    kind = kind_of(make)
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        before, loss = copy_state(relay.model), relay.evaluate(batch_of(kind, 1))
        twin = kind.make_model()
        twin.load_state_dict(relay.model.state_dict())
        made = unrolled_by_hand(twin, stack or "layers", [*numbers], relay.optimizer, policy)
        relay.apply(Unroll(stack=stack, optimizer=policy))
        assert relay.journal[-1].preserves_function and relay.evaluate(batch_of(kind, 1)) == loss
        assert_trains_alike(relay, InCore(kind, twin, made, CONFIG, 1))
        relay.undo()
        assert len(relay.stacks[stack or "layers"]) == 2 and relay.verify(batch_of(kind, 1)).equal
        held = copy_state(relay.model)
        assert held.keys() == before.keys()


def unrolled_by_hand(
    model: nn.Module, stack: str, numbers: list[str], optimizer: torch.optim.Optimizer, policy: Any
) -> torch.optim.Optimizer:
    """Append deep copies of two layers that run twice; return an optimizer with the state that the policy gives."""
    old = adamw(model)
    old.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    layers: Any = model.get_submodule(stack)
    origin = {param: param for layer in layers for param in layer.parameters()}
    for layer in [*layers]:
        layers.append(twin := copy.deepcopy(layer))
        origin |= dict(zip(twin.parameters(), layer.parameters(), strict=True))
    for number in numbers:
        path, _, name = number.rpartition(".")
        setattr(model.config if path == "config" else model.get_submodule(path), name, 1)
    if hasattr(model, "config"):
        model.config.n_layer = 4
    made = adamw(model)
    for param in model.parameters():
        state = {name: value.clone() for name, value in old.state[origin.get(param, param)].items()}
        if param in origin and policy != "copy":
            factor = 0.0 if policy == "fresh" else policy
            state["exp_avg"].mul_(factor)
            state["exp_avg_sq"].mul_(factor**2)
        if param not in origin or policy != "fresh":
            made.state[param] = state
    return made


class LayerLoops(Looped):
    """The number of loops is a number of layers by its name, and at first equal to the depth."""

    def __init__(self, loops: int = 2, depth: int = 2) -> None:
        super().__init__(loops, depth)
        self.config = SimpleNamespace(n_layer_runs=loops)

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.config.n_layer_runs):
            h = Chain.walk(self, h)
        return h


def test_a_number_of_loops_does_not_follow_the_depth(tmp_path: Path) -> None:
    kind = kind_of(LayerLoops)
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        relay.apply(Unroll())
        assert vars(relay.model.config) == {"n_layer_runs": 1} and len(relay.stack) == 4
        relay.undo()
        assert vars(relay.model.config) == {"n_layer_runs": 2} and len(relay.stack) == 2
        relay.apply(Duplicate())
        assert vars(relay.model.config) == {"n_layer_runs": 2} and relay.verify(batch_of(kind, 1)).equal
        relay.save(tmp_path)
    model = kind.make_model()
    with load(tmp_path, model) as again:
        assert vars(model.config) == {"n_layer_runs": 2} and len(again.stack) == 4


class DepthAndLoops(Looped):
    """The number of layers that run, which happens to be the number of loops, too."""

    def __init__(self, loops: int = 2, depth: int = 2) -> None:
        super().__init__(loops, depth)
        self.config = SimpleNamespace(n_layer=depth)

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.n_loops):
            for i in range(self.config.n_layer):
                h = self.layers[i](h)
        return h


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("make", [LayerLoops, DepthAndLoops])
@pytest.mark.parametrize("has_stepped", [True, False], ids=["step", "example"])
def test_a_number_is_loops_or_depth_by_what_the_forward_does_with_it(
    count: int, make: type[Looped], has_stepped: bool, tmp_path: Path
) -> None:
    kind = kind_of(partial(make, count, count))
    deeper = kind_of(partial(make, count, count + 1))
    with relay_of(kind) as relay:
        (relay.step if has_stepped else relay.expect)(batch_of(kind, 0))
        relay.fork("deep")
        relay.apply(Duplicate(0))
        assert vars(relay.model.config) == vars(deeper.make_model().config)
        assert_trains_alike(relay, built_anew(deeper, relay.model, relay.optimizer, relay.steps))
        relay.undo()
        assert relay.loops == {}
        relay.redo()
        relay.switch("main")
        assert vars(relay.model.config) == vars(kind.make_model().config)
        relay.switch("deep")
        assert_trains_alike(relay, built_anew(deeper, relay.model, relay.optimizer, relay.steps))
        relay.save(tmp_path)
        for model in (kind.make_model(), copy.deepcopy(relay.model)):
            with load(tmp_path, model) as again:
                assert_trains_alike(again, built_anew(deeper, again.model, again.optimizer, again.steps))
                again.switch("main")
                assert_trains_alike(again, built_anew(kind, again.model, again.optimizer, again.steps))


def test_albert_is_unrolled_by_force() -> None:
    kind = BY_NAME["albert"]
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        with pytest.raises(ValueError, match="no field of AlbertConfig is the depth.*force=True"):
            relay.apply(Unroll())
        assert relay.model.config.num_hidden_layers == 3
        relay.apply(Unroll(), force=True)
        assert len(relay.stack) == 3 and relay.model.config.num_hidden_layers == 1
        assert relay.verify(batch_of(kind, 1)).equal
        relay.undo()
        assert len(relay.stack) == 1 and relay.model.config.num_hidden_layers == 3


def test_what_is_done_once_per_loop_is_not_unrolled_and_the_remedy_works() -> None:
    kind = kind_of(partial(EntryPerLoop, 2, 4))
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        before = copy_state(relay.model)
        with pytest.raises(ValueError, match="gives layer 2 another argument 0 .*use Duplicate and Loops"):
            relay.apply(Unroll())
        assert_state(relay.model, before)
        assert vars(relay.model)["n_loops"] == 2 and len(relay.stack) == 2
        relay.apply(Duplicate(mode="top"), Loops(1))
        assert len(relay.stack) == 4 and relay.verify(batch_of(kind, 1)).equal


def test_a_stack_that_runs_once_has_nothing_to_unroll() -> None:
    kind = kind_of(partial(Looped, 1))
    with relay_of(kind) as relay:
        relay.step(batch_of(kind, 0))
        with pytest.raises(ValueError, match="once, so there is no loop to replace"):
            relay.apply(Unroll())
        relay.apply(Loops(2), Drop(0))  # edits of one group see those before
        assert relay.verify(batch_of(kind, 1)).equal


# -- the schedule ------------------------------------------------------------------------------------------------------


def test_the_number_of_loops_grows_with_the_step(tmp_path: Path) -> None:
    plan = LOOPED_RECIPES["growing loops"].plan(0, steps=6, depth=4)
    with relay_of(kind_of(partial(Looped, 4))) as relay:
        seen = []
        for seed in range(6):
            plan.step(relay, batch_of(LOOPED, seed))
            seen.append(relay.loops["layers"])
        assert seen == [2, 2, 3, 4, 4, 4] and len(relay.journal) == 3
    with pytest.raises(ValueError, match="steps=3 is too few"):
        LOOPED_RECIPES["growing loops"].plan(0, steps=3, depth=4)
    with pytest.raises(ValueError, match="loops from step 0 on is 0"):
        Looping({0: 0})
