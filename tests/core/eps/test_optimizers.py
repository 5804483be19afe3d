"""Which optimizers can work block by block, and that adopting one keeps its groups, order and state."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from l2l_core import Relay, RelayConfig
from l2l_core.eps.optimizers.factory import make_optimizer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "name",
    [
        "AdamW",
        "Adam",
        "SGD",
        "Adagrad",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "ASGD",
        "Adadelta",
        "Adafactor",
    ],
)
def test_torchs_elementwise_optimizers_qualify(name: str) -> None:
    net = model()
    assert type(make_optimizer(partial(getattr(torch.optim, name), lr=1e-2), net)[0]).__name__ == name


@pytest.mark.parametrize("name, reason", [("LBFGS", "re-evaluates the loss"), ("SparseAdam", "sparse gradients")])
def test_optimizers_of_another_kind_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_optimizer(partial(getattr(torch.optim, name), lr=1e-2), model())


class NormalisesOverAll(torch.optim.SGD):
    """Divides by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p -= 0.1 * p.grad / norm


class CountsInTheGroup(torch.optim.SGD):
    """Keeps its step count in the group, where a part of the optimizer would count for itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p -= p.grad / group["count"]
                    group["count"] += 1


@pytest.mark.parametrize("kind", [NormalisesOverAll, CountsInTheGroup])
def test_optimizers_that_couple_layers_are_found_by_trying(kind: type) -> None:
    assert "couples parameters of different layers" in make_optimizer(partial(kind, lr=1e-2), model())[1].couples


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="partial"):
        make_optimizer("adamw", model())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returned a list"):
        make_optimizer(lambda params: list(params), model())  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="not the model's"):
        make_optimizer(torch.optim.SGD(model().parameters(), lr=0.1), model())


def batch(step: int = 0) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def squared_error(outputs: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[-1])


def test_a_ready_optimizer_is_adopted_and_given_back() -> None:
    net = model()
    params = list(net.parameters())
    optimizer = torch.optim.AdamW([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.3}])
    squared_error(net(batch()[0]), batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.state_dict()
    with Relay(net, optimizer, loss=squared_error) as relay:
        assert relay.optimizer is optimizer
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
        relay.step(batch())
        assert all(state["step"] == 2 for state in optimizer.state.values())
    assert [p for group in optimizer.param_groups for p in group["params"]] == params, (
        "the model's own parameters again"
    )
    assert set(optimizer.state) == set(params)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in before["param_groups"]]
    squared_error(net(batch(2)[0]), batch(2)).backward()
    optimizer.step()
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_schedulers_move_the_learning_rate_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Relay(model(), partial(torch.optim.SGD, lr=1.0), loss=squared_error) as relay:
            scheduler = torch.optim.lr_scheduler.LambdaLR(relay.optimizer, lambda step: 0.0 if step else 1.0)
            relay.step(batch())
            scheduler.step()
            weights = [p.detach().clone() for p in relay.model.parameters()]
            relay.step(batch(1))
            assert scheduler.get_last_lr() == [0.0]
            assert all(torch.equal(a, b) for a, b in zip(weights, relay.model.parameters(), strict=True))


class CountsSteps(torch.optim.SGD):
    """Divides by the count of its steps, which it keeps in its groups, among its defaults, and on itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.defaults["steps"] = self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.defaults["steps"] += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            assert group["steps"] == self.defaults["steps"] == self.steps
            for p in group["params"]:
                if p.grad is not None:
                    p -= p.grad / group["steps"]

    @property
    def counts(self) -> list[int]:
        return [self.steps, self.defaults["steps"], *(group.get("steps", 0) for group in self.param_groups)]


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_a_step_counts_once_and_a_trial_not_at_all(update: str) -> None:
    config = RelayConfig(micro_batches=2, update=update)  # type: ignore[arg-type]
    with Relay(model(), CountsSteps, loss=squared_error, config=config) as relay:
        optimizer = relay.optimizer
        assert optimizer.counts == [0, 0, 0]
        relay.forecast(batch())
        assert optimizer.counts == [0, 0, 0]
        for steps in (1, 2):
            relay.step(batch())
            relay.forecast(batch(), RelayConfig(micro_batches=1))
            assert optimizer.counts == [steps] * 3
    optimizer.step()
    assert optimizer.counts == [3, 3, 3], "it goes on as an ordinary one"


def test_a_step_that_is_undone_has_not_counted() -> None:
    config = RelayConfig(micro_batches=2, update="deferred")
    with Relay(model(), CountsSteps, loss=squared_error, config=config) as relay:
        relay.step(batch())
        weights = [p.detach().clone() for p in relay.model.parameters()]

        def fail(*_: Any) -> None:
            raise OSError("no room for the log")

        handle = relay.optimizer.register_step_post_hook(fail)
        with pytest.raises(OSError):
            relay.step(batch(1))
        handle.remove()
        assert relay.optimizer.counts == [1, 1, 1]
        assert all(torch.equal(a, b) for a, b in zip(weights, relay.model.parameters(), strict=True))


def test_counts_in_groups_are_saved(tmp_path: Path) -> None:
    class Counts(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
                for p in group["params"]:
                    if p.grad is not None:
                        p -= p.grad / group["steps"]

    with Relay(model(), Counts, loss=squared_error) as relay:
        for step in range(2):
            relay.step(batch(step))
        relay.save(tmp_path / "saved")
        with Relay.load(tmp_path / "saved", model(), Counts, loss=squared_error) as again:
            for one in (relay, again):
                one.step(batch(2))
            for a, b in zip(relay.model.parameters(), again.model.parameters(), strict=True):
                assert torch.equal(a, b)
