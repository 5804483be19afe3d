"""`verify` is a judge: it says equal where training is equal and only there, and training goes on as if it had not been."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from counting import COUNTING, CountsFromADefault
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import l2l_core.eps.updater
from l2l_core import Insert, Relay, RelayConfig
from l2l_core.eps.optimizers.optimizer_settings import is_same
from l2l_core.model.reference import train_step

TORCHS = ["AdamW", "Adam", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta"]
OPTIMIZERS = [*(getattr(torch.optim, name) for name in TORCHS), torch.optim.Adafactor, *COUNTING]

every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
counting = pytest.mark.parametrize("kind", COUNTING, ids=lambda kind: kind.__name__)


# --- one small model -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Net(nn.Module):
    """Notes what it sees on itself, in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)
        self.calls, self.share, self.seen, self.sizes = 0, 0.0, torch.zeros(6), []
        self.by_size: dict[int, int] = Counter()
        self.draws = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.share = 1 / self.calls
        self.seen += x.detach().sum(0)
        self.sizes.append(len(x))
        self.by_size[len(x)] += 1
        x = x + 0.01 * self.draws.random()
        for layer in self.layers:
            x = layer(x)
        self.last = self.head(x)  # with its graph
        return self.last


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def squared_error(outputs: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(outputs, batch[-1])


CONFIG = RelayConfig(seed=0, micro_batches=2)


def relay_of(make: Callable[[Any], Optimizer], **options: Any) -> Relay:
    return Relay(net(), make, loss=squared_error, **({"config": CONFIG} | options))


def groups_of(kind: type[Optimizer]) -> Callable[[Any], Optimizer]:
    """The optimizer with two groups, interleaved over the layers."""

    def make(params: Iterable[Any]) -> Optimizer:
        params = list(params)
        matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        return kind([{"params": matrices, "lr": 2e-2}, {"params": vectors, "lr": 1e-2}], lr=1e-2)  # type: ignore[call-arg]

    return make


def train_in_core(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """The other side of the tests, without anything of `verify`."""
    for step in range(steps):
        x, y = batch(step)
        parts = list(zip(x.split(4), y.split(4), strict=True))
        seeds = [CONFIG.micro_batch_seed(step, k) for k in range(2)]
        train_step(model, optimizer, parts, lambda m, part: squared_error(m(part[0]), part), [2.0, 2.0], seeds)


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights, buffers, state, settings, defaults, attributes and generators, by value."""
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float)}
    noted = [model.calls, model.share, model.seen, model.sizes, dict(model.by_size), model.draws.getstate()]  # type: ignore
    return {
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "state": copy.deepcopy(optimizer.state_dict()),
        "defaults": copy.deepcopy(optimizer.defaults),
        "attributes": {name: value for name, value in plain.items() if name != "_opt_called"},
        "noted": copy.deepcopy(noted),
        "modes": [module.training for module in model.modules()],
        "random": [torch.get_rng_state(), random.getstate(), str(np.random.get_state())],
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        assert is_same(value, other[name]), (name, value, other[name])


# --- it leaves no trace ----------------------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_training_goes_on_as_if_it_had_not_been(kind: type[Optimizer], update: str) -> None:
    config = RelayConfig(seed=0, micro_batches=2, update=update)  # type: ignore[arg-type]
    found = []
    for verifies in (True, False):
        with relay_of(groups_of(kind), config=config) as relay:
            for step in range(4):
                if step == 2 and verifies:
                    for seed in (step, 9):  # the batch that comes next, and another one
                        report = relay.verify(batch(seed))
                        assert report.equal, str(report)
                relay.step(batch(step))
            found.append(everything(relay.model, relay.optimizer))
    assert_same(*found)


@every_optimizer
def test_relay_and_in_core_are_equal_where_it_says_so(kind: type[Optimizer]) -> None:
    model = net()
    optimizer = groups_of(kind)(model.parameters())
    train_in_core(model, optimizer, 4)
    with relay_of(groups_of(kind)) as relay:
        for step in range(4):
            report = relay.verify(batch(step))
            assert report.equal and not report.optimizer, str(report)
            relay.step(batch(step))
        ours, theirs = everything(relay.model, relay.optimizer), everything(model, optimizer)
    for name in ("weights", "state", "defaults", "attributes"):
        assert is_same(ours[name], theirs[name]), (name, ours[name], theirs[name])


@counting
def test_a_count_stays_one_per_step(kind: type[Optimizer]) -> None:
    with relay_of(kind) as relay:
        for _ in range(3):
            relay.verify(batch())
            relay.step(batch())
        optimizer, (group,) = relay.optimizer, relay.optimizer.param_groups
        counts = [group.get("step"), optimizer.defaults.get("steps"), getattr(optimizer, "steps", None)]
        assert 3 in [len(group["log"]) if "log" in group else None, *counts], (group, counts)


def test_what_others_hold_stays_the_object_that_it_is() -> None:
    rate = torch.tensor(1e-2)
    with relay_of(partial(torch.optim.AdamW, lr=rate, foreach=False)) as relay:
        relay.step(batch())
        group = relay.optimizer.param_groups[0]
        state = {name: value for known in relay.optimizer.state.values() for name, value in known.items()}
        rate, sizes = group["lr"], relay.model.sizes
        relay.verify(batch(1))
        assert relay.optimizer.param_groups[0] is group and group["lr"] is rate and relay.model.sizes is sizes
        after = {name: value for known in relay.optimizer.state.values() for name, value in known.items()}
        assert all(after[name] is value for name, value in state.items())


def test_what_steps_teach_it_does_not_teach() -> None:
    with relay_of(torch.optim.SGD) as relay:
        relay.verify(batch())
        assert relay.trace is None and relay.steps == 0 and not any(unit.stats for unit in relay.stack)
        with pytest.raises(ValueError, match="make a step first"):
            relay.apply(Insert(at=1, like=0))
        assert relay.step(batch()).trace.settings["metered"] is True
        stats = [dict(unit.stats) for unit in relay.stack]
        small = (torch.randn(4, 6), torch.randn(4, 2))
        relay.verify(small)
        assert [unit.stats for unit in relay.stack] == stats
        assert relay.step(batch()).trace.settings["metered"] is False, (
            "what is known of the shape before is still known"
        )


def test_generators_that_nobody_named() -> None:
    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0 * (np.random.rand() + random.random())

    model = nn.Sequential(*(Draws(6, 6) for _ in range(3)))
    with Relay(model, torch.optim.SGD, loss=lambda out, batch: out.square().mean()) as relay:
        before = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
        assert relay.verify((torch.randn(4, 6, generator=torch.Generator()),)).equal
        assert is_same(before, [torch.get_rng_state(), random.getstate(), str(np.random.get_state())])


def test_inputs_that_a_model_writes_into() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.mul_(2))

    config = RelayConfig(seed=0, micro_batches=2)
    with Relay(Writes(), torch.optim.SGD, loss=lambda out, batch: out.square().mean(), config=config) as relay:
        (x,) = given = (torch.randn(5, 6),)
        before = x.clone()
        report = relay.verify(given)
        assert report.equal and torch.equal(x, before), str(report)


def test_an_error_leaves_no_trace_either() -> None:
    with relay_of(CountsFromADefault) as relay:
        relay.step(batch())
        before = everything(relay.model, relay.optimizer)
        x, y = batch(1)
        y[5:] = torch.inf
        with pytest.raises(FloatingPointError):
            relay.verify((x, y))
        assert_same(before, everything(relay.model, relay.optimizer))


def test_step_hooks_are_not_fired() -> None:
    """They fire once per step of training, and `verify` is none; so nothing that they count is off."""
    fired = Counter[str]()
    everywhere = register_optimizer_step_post_hook(lambda *_: fired.update(["all"]))
    try:
        with relay_of(torch.optim.SGD, config=replace(CONFIG, update="deferred")) as relay:
            relay.optimizer.register_step_pre_hook(lambda *_: fired.update(["before"]))
            handle = relay.optimizer.register_step_post_hook(lambda *_: fired.update(["after"]))
            fired.clear()
            assert relay.verify(batch()).equal and not fired
            relay.step(batch())
            assert fired["before"] == fired["after"] == 1
            handle.remove()
            relay.step(batch())
            assert fired["before"] == 2 and fired["after"] == 1, "a hook can still be removed by its handle"
    finally:
        everywhere.remove()


# --- it is honest ----------------------------------------------------------------------------------------------------


class CouplesFromTheTwelfthStepOn(SGD):
    """No trial of ten steps finds out."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            state = self.state.setdefault(p, {"n": 0})
            state["n"] += 1
            p -= 0.1 * (p.grad / norm if state["n"] > 11 else p.grad)


def test_it_says_unequal_at_the_step_that_goes_wrong() -> None:
    with relay_of(CouplesFromTheTwelfthStepOn) as relay:
        for step in range(11):
            assert step < 8 or relay.verify(batch(step)).equal
            relay.step(batch(step))
        report = relay.verify(batch(11))
        assert not report.equal and report.max_abs_diff > 1e-4 and "layers.2" in str(report)


@counting
def test_both_sides_do_not_share_a_stale_count(kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that forgets what parts have counted trains wrongly, from weights and groups that look as they should."""
    monkeypatch.setattr(l2l_core.eps.updater, "apply_changes", lambda whole, changes: None)
    with relay_of(kind, config=replace(CONFIG, verify="never")) as relay:
        relay.step(batch())
        report = relay.verify(batch(1))
        assert not report.equal and report.optimizer and "the optimizer has different values" in str(report)


def test_buffers_are_part_of_a_step() -> None:
    class Notes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.register_buffer("noise", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.noise.copy_(
                torch.tensor(random.SystemRandom().random())
            )  # a generator that no micro-batch has for itself
            return super().forward(x)

    model = nn.Sequential(*(Notes() for _ in range(3)))
    config = RelayConfig(seed=0, micro_batches=2)
    with Relay(model, torch.optim.SGD, loss=lambda out, batch: out.square().mean(), config=config) as relay:
        before = [buffer.clone() for buffer in model.buffers()]
        report = relay.verify((torch.randn(4, 6),))
        assert not report.equal and report.loss == report.reference_loss
        assert {name for row in report.rows for name in row.different} <= {f"{i}.noise" for i in range(3)}
        assert report.max_abs_diff > 0 and "noise" in str(report)
        assert is_same(before, list(model.buffers()))


def test_running_statistics_are_compared_and_equal() -> None:
    with relay_of(torch.optim.SGD) as relay:
        assert relay.verify(batch()).equal
        relay.model.layers[1].norm.running_mean.fill_(torch.nan)  # one NaN is like another
        report = relay.verify(batch())
        assert report.equal, str(report)
