"""Optimizers that count, sum up, or keep what a save cannot hold: equal to plain training to the bit, or refused at the start."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import COUNTING, CountsInTheGroup, ShortAdam
from patience import HANG_S
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from l2l_core import Freeze, Insert, Relay, RelayConfig
from l2l_core.eps.optimizers import Findings
from l2l_core.eps.optimizers.factory import known_findings
from l2l_core.eps.optimizers.optimizer_conformance import try_blockwise
from l2l_core.eps.optimizers.optimizer_settings import is_same

ROOT = Path(__file__).parents[3]
CONFIG = RelayConfig(micro_batches=2)


# -- one small model, and plain training --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 2)
        self.left_out = -1  # in core: a layer that sits out

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == self.left_out else layer(x)
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def squared_error(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def step_in_core(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Two micro-batches and a step, with torch alone."""
    x, y = batch(step)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = squared_error(model(part), (part, target)) / 2
        if loss.requires_grad:
            loss.backward()
    optimizer.step()
    for param in model.parameters():
        param.grad = None


def relay_of(make: Any, model: nn.Module | None = None, **options: Any) -> Relay:
    return Relay(model or Net(), make, "cpu", loss=squared_error, **({"config": CONFIG} | options))


def values_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights, and all that the optimizer keeps, by value."""
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}
    return {
        "weights": {name: param.detach().clone() for name, param in model.named_parameters()},
        "state": optimizer.state_dict(),
        "defaults": dict(optimizer.defaults),
        "attributes": {name: value for name, value in numbers.items() if name != "_opt_called"},
    }


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, value in theirs.items():
        assert is_same(ours[name], value), (name, ours[name], value)


# -- counts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COUNTING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_counts_go_the_whole_course(kind: Any, update: str, tmp_path: Path) -> None:
    """Frozen for two steps, sat out, verified, saved, branched: what plain training leaves, the counts included."""
    model = Net()
    optimizer = kind(model.parameters())
    for step in range(8):
        model.layers[1].requires_grad_(step not in (1, 2))
        model.left_out = 0 if step == 3 else -1
        step_in_core(model, optimizer, step)
    expected = values_of(model, optimizer)

    with relay_of(kind, config=RelayConfig(micro_batches=2, update=update)) as relay:  # type: ignore[arg-type]
        relay.step(batch(0))
        relay.apply(Freeze(1))
        relay.step(batch(1))
        relay.step(batch(2))
        relay.undo()
        relay.step(batch(3), skip=[0])
        assert relay.verify(batch(4)).equal
        relay.step(batch(4))
        relay.save(tmp_path)
        relay.fork("aside")
        relay.step(batch(50))
        relay.step(batch(51))
        relay.save(tmp_path / "on a branch")
        relay.switch("main")
        with Relay.load(tmp_path, Net(), kind, device="cpu", loss=squared_error) as resumed:
            for step in range(5, 8):
                relay.step(batch(step))
                resumed.step(batch(step))
            assert_same(values_of(relay.model, relay.optimizer), expected)
            assert_same(values_of(resumed.model, resumed.optimizer), expected)
        with Relay.load(tmp_path / "on a branch", Net(), kind, device="cpu", loss=squared_error) as resumed:
            resumed.switch("main")
            for step in range(5, 8):
                resumed.step(batch(step))
            assert_same(values_of(resumed.model, resumed.optimizer), expected)


def test_a_count_that_came_later_goes_with_a_switch() -> None:
    with relay_of(CountsInTheGroup) as relay:
        relay.fork("aside")
        for step in range(3):
            relay.step(batch(step))
        assert relay.optimizer.param_groups[0]["step"] == 3
        relay.switch("main")
        assert "step" not in relay.optimizer.param_groups[0]
        relay.switch("aside")
        assert relay.optimizer.param_groups[0]["step"] == 3


def test_a_ready_optimizer_that_has_counted_forgets_it_when_a_save_is_loaded(tmp_path: Path) -> None:
    with relay_of(CountsInTheGroup) as relay:
        relay.save(tmp_path)
        fresh = Net()
        ready = CountsInTheGroup(fresh.parameters())
        step_in_core(fresh, ready, 9)
        with Relay.load(tmp_path, fresh, ready, device="cpu", loss=squared_error) as resumed:
            for one in (relay, resumed):
                one.step(batch(0))
            assert_same(values_of(resumed.model, resumed.optimizer), values_of(relay.model, relay.optimizer))


def test_a_ready_optimizer_that_has_counted_is_taken_over() -> None:
    model, twin = Net(), Net()
    ready, plain = InitialisesOnce(model.parameters()), InitialisesOnce(twin.parameters())
    for net, optimizer in ((model, ready), (twin, plain)):
        step_in_core(net, optimizer, 0)
    with relay_of(ready, model) as relay:
        relay.step(batch(1))
        step_in_core(twin, plain, 1)
        assert_same(values_of(relay.model, relay.optimizer), values_of(twin, plain))


class InitialisesOnce(ShortAdam):
    """Makes states in its first step alone, as several of pytorch_optimizer do."""

    def count(self, group: dict[str, Any]) -> float:
        if "step" not in group:
            group["step"] = 0
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        group["step"] += 1
        assert all(p in self.state for p in group["params"] if p.grad is not None), "no state"
        return group["step"]


def test_a_forecast_after_steps_knows_the_states_that_counts_belong_to() -> None:
    with relay_of(InitialisesOnce) as relay:
        for step in range(2):
            relay.step(batch(step))
        before = values_of(relay.model, relay.optimizer)
        relay.forecast(batch(2), RelayConfig(micro_batches=4))
        assert_same(values_of(relay.model, relay.optimizer), before)


def test_a_layer_that_the_optimizer_can_make_no_state_for_is_refused_before_the_step() -> None:
    with relay_of(InitialisesOnce) as relay:
        relay.step(batch(0))
        relay.apply(Insert(at=1, like=0, init="copy"))
        before = values_of(relay.model, relay.optimizer)
        with pytest.raises(ValueError, match=r"(?s)no state in InitialisesOnce.*optimizer='copy'"):
            relay.step(batch(1))
        assert_same(values_of(relay.model, relay.optimizer), before)
        relay.undo()
        relay.apply(Insert(at=1, like=0, init="copy", optimizer="copy"))
        assert relay.verify(batch(1)).equal


class HasModes(ShortAdam):
    """Steps in one of two modes, as averages of weights do."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr, train_mode=False, k=0)

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def count(self, group: dict[str, Any]) -> float:
        if not group["train_mode"]:
            raise RuntimeError("not in train mode")
        group["k"] += 1
        return group["k"]


def test_an_optimizer_with_modes_is_taken_and_asked_before_a_step() -> None:
    with relay_of(HasModes) as relay:
        before = values_of(relay.model, relay.optimizer)
        with pytest.raises(ValueError, match=r"not in train mode.*relay.optimizer.train\(\)"):
            relay.step(batch(0))
        assert_same(values_of(relay.model, relay.optimizer), before)
        relay.optimizer.train()  # type: ignore[attr-defined]
        assert relay.verify(batch(0)).equal


class KeepsTheHighestRate(ShortAdam):
    def count(self, group: dict[str, Any]) -> float:
        group["highest"] = max(group["lr"], group.get("highest", 0.0))
        group["n"] = group.get("n", 0) + 1
        return group["n"]


def test_a_layer_that_warms_up_is_refused_where_settings_follow_the_rate() -> None:
    with relay_of(KeepsTheHighestRate) as relay:
        relay.step(batch(0))
        relay.apply(Insert(at=1, like=0, init="copy", optimizer="copy", warmup=4))
        before = values_of(relay.model, relay.optimizer)
        with pytest.raises(ValueError, match="warms up, and KeepsTheHighestRate keeps in its settings"):
            relay.step(batch(1))
        assert_same(values_of(relay.model, relay.optimizer), before)
        relay.undo()
        relay.apply(Insert(at=1, like=0, init="copy", optimizer="copy"))
        assert relay.verify(batch(1)).equal
    with relay_of(CountsInTheGroup) as relay:
        relay.step(batch(0))
        relay.apply(Insert(at=1, like=0, init="copy", warmup=4))
        assert relay.verify(batch(1)).equal


# -- sums ---------------------------------------------------------------------------------------------------------------


class ScalesByTheMean(SGD):
    """Adds elements up, in an order that depends on the number of threads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p -= 0.1 * p.grad / (p.grad.sum().abs() + p.grad.pow(2).mean() + 1e-3)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_sums_are_added_in_the_order_of_plain_training() -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(333, 333) for _ in range(3)))

    def mean_square(outputs: Tensor, batch: Any = None) -> Tensor:
        return outputs.square().mean()

    x = torch.randn(4, 333, generator=torch.Generator().manual_seed(0))
    with threads(2):
        model = wide()
        optimizer = ScalesByTheMean(model.parameters(), lr=0.1)
        for _ in range(3):
            mean_square(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with Relay(wide(), partial(ScalesByTheMean, lr=0.1), "cpu", loss=mean_square) as relay:
            for _ in range(3):
                relay.step((x,))
            assert all(map(torch.equal, relay.model.parameters(), model.parameters()))


def test_a_trial_shows_which_optimizers_add_elements_up() -> None:
    assert not try_blockwise(ScalesByTheMean(Net().parameters())).elementwise


# -- the table of torch's own -------------------------------------------------------------------------------------------

COMMON: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}, {"maximize": True, "weight_decay": 0.1}]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [*COMMON, {"t0": 2}],
    "Adadelta": COMMON,
    "Adafactor": COMMON,
    "Adagrad": [*COMMON, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}],
    "Adam": [*COMMON, {"amsgrad": True}, {"decoupled_weight_decay": True, "weight_decay": 0.1, "fused": True}],
    "AdamW": [*COMMON, {"amsgrad": True, "fused": True}, {"lr": torch.tensor(0.01)}],
    "Adamax": COMMON,
    "Muon": [{}, {"nesterov": False, "weight_decay": 0.0}],
    "NAdam": [*COMMON, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [*COMMON, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [*COMMON, {"centered": True, "momentum": 0.9}],
    "Rprop": COMMON,
    "SGD": [*COMMON, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5, "fused": True}],
}


def shapes_of(name: str) -> list[nn.Parameter]:
    sizes = [(64, 64)] if name == "Muon" else [(), (64,), (64, 64), (8, 4, 3, 3)]
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_table_of_torchs_own_agrees_with_a_trial(name: str) -> None:
    kind, compared = getattr(torch.optim, name), 0
    accepted = inspect.signature(kind).parameters
    for options in OPTIONS[name]:
        if options.keys() <= accepted.keys():
            optimizer = kind(shapes_of(name), **{"lr": 0.01, **options})
            tried = try_blockwise(optimizer)
            assert known_findings(optimizer) in (tried, None), options
            compared += 1
    assert compared >= 2


def test_the_table_has_all_of_torchs_own_that_are_taken() -> None:
    named = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert named - OPTIONS.keys() == {"Optimizer", "LBFGS", "SparseAdam"}
    for name in OPTIONS:
        assert known_findings(getattr(torch.optim, name)(shapes_of(name), lr=0.01)) is not None, name


def test_what_differs_from_torchs_own_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(SGD):
        pass

    params = list(Net().parameters())
    scheduled = SGD(params, lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert known_findings(scheduled) == known_findings(AdamW(params, fused=True)) == Findings()
    assert known_findings(Own(params, lr=0.1)) is None
    assert known_findings(AdamW(params, differentiable=True)) is None
    changed = SGD(params, lr=0.1)
    changed._init_group = changed._init_group  # type: ignore[method-assign]
    assert known_findings(changed) is None
    monkeypatch.setattr(SGD, "step", lambda self, closure=None: None)
    assert known_findings(SGD(params, lr=0.1)) is None


def test_a_parameter_that_comes_later_is_refused_where_torch_raises() -> None:
    """Fused SGD with momentum raises where some parameters have a buffer and others have none."""
    fused = partial(SGD, lr=0.1, momentum=0.9, fused=True)
    assert "NoneType" in try_blockwise(fused(Net().parameters())).newcomers
    with relay_of(fused) as relay:
        relay.step(batch(0))
        relay.apply(Insert(at=1, like=0, init="copy"))
        with pytest.raises(ValueError, match=r"(?s)no state in SGD.*NoneType.*optimizer='copy'"):
            relay.step(batch(1))
        relay.undo()
        relay.apply(Insert(at=1, like=0, init="copy", optimizer="copy"))
        assert relay.verify(batch(1)).equal


# -- what is refused at the start ---------------------------------------------------------------------------------------


class EstimatesADistance(SGD):
    """A learning rate from sums over all weights, which stays as it is for the first steps (as that of Prodigy)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            group["d"] = max(group.get("d", 1e-6), 1e-9 * sum(float(p.grad.square().sum()) for _, p in every))
        for group, p in every:
            p.add_(p.grad, alpha=-group["lr"] * max(group["d"], 1e-3))


class CouplesLate(SGD):
    """From the sixth step on, and in the weights alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            state = self.state.setdefault(p, {"n": 0})
            state["n"] += 1
            p -= 0.1 * (p.grad / norm if state["n"] > 5 else p.grad)


class CouplesAtFirst(SGD):
    """Scales the gradients of all steps by their norm in the first one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p -= 0.1 * p.grad / self.state[p].setdefault("norm", norm.clone())


class Wrapper(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.inside = AdamW(self.param_groups, lr=0.1)


class TwoGradients(SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class WantsAClosure(SGD):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "requires closure, but it was not provided"


class WantsTheLoss(SGD):
    def step(self, closure: Any = None, loss: float | None = None) -> None:
        assert loss is not None


class DrawsNumbers(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p -= 0.1 * p.grad * torch.rand(())


class _Keeps(SGD):
    """Keeps something in the state of parameters of 4,096 elements and more."""

    def kept(self, p: nn.Parameter) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p.numel() >= 4096 and "kept" not in self.state[p]:
                self.state[p]["kept"] = self.kept(p)
            p -= 0.1 * p.grad


class Packed(Tensor):
    """A tensor of a class of its own, of which most operations are missing."""

    @staticmethod
    def __new__(cls: type, inner: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}")


class KeepsPackedTensors(_Keeps):
    def kept(self, p: nn.Parameter) -> Any:
        return Packed(p.detach())


class KeepsObjects(_Keeps):
    def kept(self, p: nn.Parameter) -> Any:
        return object()


class KeepsAnObjectInTheGroup(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["device"] = object()


class KeepsMomentumOnItself(SGD):
    """A dictionary by parameter, which works by layer, and is in no save."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.momenta: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.momenta[p] = 0.9 * self.momenta.get(p, 0) + p.grad
            p -= 0.1 * self.momenta[p]


class KeepsAStateOfItsOwn(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["step"] = self.state.get("step", 0) + 1  # type: ignore[index]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p -= p.grad / self.state["step"]  # type: ignore[index]


class HoldsOnToItsParameters(SGD):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.update = lambda: [p.sub_(p.grad) for p in params if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.update()


class KeepsMomentaInLists(SGD):
    """Its lists are as long as its groups, and their tensors have the shapes of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.momenta = [[torch.zeros_like(p) for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, momenta in zip(self.param_groups, self.momenta, strict=True):
            for p, momentum in zip(group["params"], momenta, strict=False):
                self.move(p, momentum)

    def move(self, p: Any, momentum: Tensor) -> None:
        if p.grad is not None:
            momentum.mul_(0.9).add_(p.grad)
            p.sub_(momentum, alpha=0.1)


class KeepsMomentaInTheState(KeepsMomentaInLists):
    """The same after the remedy of the message."""

    def __init__(self, params: Any) -> None:
        SGD.__init__(self, params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.move(p, self.state[p].setdefault("momentum", torch.zeros_like(p)))


class SkipsLargeGradients(SGD):
    """Skips a step whose gradients have a norm of more than 1 over all layers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if torch.stack([p.grad.norm() for p in params]).norm() <= 1:
            for p in params:
                p -= 0.1 * p.grad


class SkipsAll(SGD):
    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    "kind, reason",
    [
        (KeepsMomentaInLists, r"keeps tensors outside of its groups.*with any update=.*self\.state\[param\]"),
        (SkipsAll, "or it skips steps, whether gradients are large or small"),
        (EstimatesADistance, r"setting 'd' for one layer.*treats each parameter by itself"),
        (CouplesLate, "couples parameters of different layers"),
        (CouplesAtFirst, "couples parameters of different layers"),
        (Wrapper, r"a wrapper around a AdamW in \.inside"),
        (TwoGradients, "two gradients per step"),
        (WantsAClosure, "one forward and backward"),
        (WantsTheLoss, "takes loss, which a relay does not pass"),
        (DrawsNumbers, "draws random numbers"),
        (KeepsPackedTensors, r"kept is a Packed, which cannot be saved.*verify, undo, branches and saves would fail"),
        (KeepsObjects, "kept is a object, which cannot be saved"),
        (KeepsAnObjectInTheGroup, "device is a object, which cannot be saved"),
        (KeepsMomentumOnItself, "keeps something outside of its settings"),
        (KeepsAStateOfItsOwn, "a state of 'step', which is no parameter of its groups"),
        (HoldsOnToItsParameters, "changed nothing"),
    ],
)
def test_refused_when_the_relay_is_made(kind: Any, reason: str) -> None:
    model = Net()
    before = [param.detach().clone() for param in model.parameters()]
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=reason):
        relay_of(kind, model)
    assert all(map(torch.equal, before, model.parameters())) and torch.equal(random_state, torch.get_rng_state())


class KeepsADeque(SGD):
    """The last gradients, in a deque, and a count in a set and in a complex number of its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            seen = group.setdefault("seen", {0})
            group["seen"], group["z"] = {*seen, len(seen)}, group.get("z", 0j) + 1j
            for p in (p for p in group["params"] if p.grad is not None):
                last = self.state[p].setdefault("last", deque(maxlen=3))
                last.append(p.grad.clone())
                p -= 0.1 * sum(last) / len(group["seen"])  # type: ignore[operator]


def test_containers_are_saved(tmp_path: Path) -> None:
    model = Net()
    optimizer = KeepsADeque(model.parameters())
    for step in range(5):
        step_in_core(model, optimizer, step)
    with relay_of(KeepsADeque) as relay:
        for step in range(4):
            relay.step(batch(step))
        assert relay.verify(batch(4)).equal
        relay.save(tmp_path)
    with Relay.load(tmp_path, Net(), KeepsADeque, device="cpu", loss=squared_error) as resumed:
        resumed.step(batch(4))
        assert all(map(torch.equal, resumed.model.parameters(), model.parameters()))
        assert (
            resumed.optimizer.param_groups[0]["seen"] == optimizer.param_groups[0]["seen"]
            and resumed.optimizer.param_groups[0]["z"] == 5j
        )
        last = next(iter(resumed.optimizer.state.values()))["last"]
        assert type(last) is deque and last.maxlen == 3


class CouplesInTheEnd(SGD):
    """Later than any trial, and in a setting."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            group["norm"] = 1.0 if group["n"] < 12 else float(sum(p.grad.norm() for p in params))
        for p in params:
            p -= 0.1 * p.grad / self.param_groups[0]["norm"]


def test_parts_that_disagree_about_a_setting_are_noticed_in_training() -> None:
    with relay_of(CouplesInTheEnd, config=RelayConfig(micro_batches=2, rollback=True)) as relay:
        for step in range(11):
            relay.step(batch(step))
        before = values_of(relay.model, relay.optimizer)
        with pytest.raises(ValueError, match="setting 'norm' for one layer"):
            relay.step(batch(11))
        assert_same(values_of(relay.model, relay.optimizer), before)


def test_a_warm_up_that_begins_at_zero_is_tried_with_a_rate() -> None:
    with pytest.raises(ValueError, match="couples"):
        relay_of(partial(CouplesLate, lr=0.0))
    with relay_of(partial(AdamW, lr=0.0)) as relay:
        assert relay.optimizer.param_groups[0]["lr"] == 0.0


class Kind(StrEnum):
    ROW = "row"


class HasAnEnumeration(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["kind"] = Kind.ROW


def test_a_setting_of_an_enumeration_stays_one(tmp_path: Path) -> None:
    with relay_of(HasAnEnumeration) as relay:
        relay.save(tmp_path)
    with Relay.load(tmp_path, Net(), HasAnEnumeration, device="cpu", loss=squared_error) as resumed:
        assert resumed.optimizer.param_groups[0]["kind"] is Kind.ROW


def test_many_groups_are_tried_by_kind() -> None:
    def by_parameter(kind: Any) -> Any:
        return lambda params: kind([{"params": [p], "lr": 1e-2 / (i + 1)} for i, p in enumerate(params)])

    with pytest.raises(ValueError, match="couples"):
        relay_of(by_parameter(partial(CouplesLate, lr=1e-2)))
    with relay_of(by_parameter(AdamW)) as relay:
        assert len(relay.optimizer.param_groups) == 14
        assert relay.verify(batch(0)).equal


def test_what_a_low_rate_hides_is_found_at_a_higher_one() -> None:
    """A weight decay that depends on all weights, and is too small to show in ten steps."""

    class DecaysByAll(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            every = [(g["lr"], p) for g in self.param_groups for p in g["params"] if p.grad is not None]
            size = sum(float(p.grad.norm()) for _, p in every)
            for rate, p in every:
                p.mul_(1 - rate * 1e-2 / size).sub_(p.grad, alpha=rate)

    with pytest.raises(ValueError, match="couples"):
        relay_of(partial(DecaysByAll, lr=1e-8))


# -- all of torch.optim -------------------------------------------------------------------------------------------------

EQUAL = {"AdamW", "Adam", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta"}


def test_every_optimizer_of_torch_is_equal_or_refused(tmp_path: Path) -> None:
    """By the program that shows it of other packages too."""
    command = [sys.executable, str(ROOT / "benchmarks" / "optimizers.py"), "--only", "torch.optim"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    rows = json.loads((tmp_path / "out/benchmarks/optimizers.json").read_text())["optimizers"]
    outcomes = {row["optimizer"]: row["outcome"] for row in rows}
    assert outcomes.keys() >= EQUAL and {outcomes[name] for name in EQUAL | {"Adafactor"}} == {"equal"}, outcomes
    assert outcomes["LBFGS"] == outcomes["SparseAdam"] == "refused"


@pytest.mark.parametrize("update", ["eager", "whole"])
def test_a_refusal_of_an_optimizer_is_a_plain_error(update: Any) -> None:
    with pytest.raises(ValueError, match="KeepsMomentaInLists cannot be used") as raised:
        relay_of(KeepsMomentaInLists, Net(), config=RelayConfig(update=update))
    assert type(raised.value) is ValueError
    relay_of(KeepsMomentaInTheState, Net(), config=RelayConfig(update=update)).close()


def test_an_optimizer_that_skips_steps_takes_whole_ones() -> None:
    with pytest.raises(ValueError, match=r"skips steps when gradients are large.*update='whole'"):
        relay_of(SkipsLargeGradients, Net())
    relay_of(SkipsLargeGradients, Net(), config=RelayConfig(update="whole")).close()
