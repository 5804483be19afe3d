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


class Prototypes(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.0, 2))

    def forward(self, outputs: Any, batch: Any) -> torch.Tensor:
        return squared_error(outputs * self.weight, batch)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def train_plainly(net: nn.Module, optimizers: Any, loss: Any = squared_error, steps: Any = range(3)) -> None:
    for step in steps:
        for part in zip(*(rows.chunk(2) for rows in batch(step)), strict=True):
            (loss(net(part[0]), part) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("how", ["in the model", "another optimizer"])
def test_the_remedies_for_parameters_of_a_loss_train_as_in_core(how: str) -> None:
    net, criterion = Net(), Prototypes()
    with pytest.raises(ValueError, match=r"belong to Prototypes in the loss.*model\.criterion = criterion.*zero_grad"):
        Relay(net, adamw([*net.parameters(), *criterion.parameters()]), loss=criterion)
    with pytest.raises(ValueError, match="belong to Prototypes in the loss"):
        Relay(net, [adamw(net.parameters()), adamw(criterion.parameters())], loss=lambda o, b: criterion(o, b))
    expected, its_criterion = Net(), Prototypes()
    if how == "in the model":
        net.criterion, expected.criterion = criterion, its_criterion
    others = [] if how == "in the model" else [adamw(criterion.parameters())]
    optimizer, config = adamw(net.parameters()), RelayConfig(micro_batches=2)
    with Relay(net, optimizer, loss=criterion, layers=["layers.0", "layers.1"], config=config) as relay:
        for step in range(3):
            relay.step(batch(step))
            for other in others:
                other.step()
                other.zero_grad()
    its_others = [adamw(its_criterion.parameters())] if others else []
    train_plainly(expected, [adamw(expected.parameters()), *its_others], its_criterion)
    assert not torch.equal(criterion.weight, Prototypes().weight)
    assert all(map(torch.equal, [*net.parameters(), criterion.weight], [*expected.parameters(), its_criterion.weight]))


def replace_head(net: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    net[2] = nn.Linear(4, 2)
    optimizer.add_param_group({"params": net[2].parameters()})


def replace_in_the_group(net: Any, optimizer: torch.optim.Optimizer) -> None:
    """Leaves the state of the old head where it is."""
    torch.manual_seed(1)
    net[2] = nn.Linear(4, 2)
    optimizer.param_groups[0]["params"][-2:] = net[2].parameters()


def tie(net: Any, optimizer: torch.optim.Optimizer) -> None:
    net[2].bias = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [net[2].bias]})


def normalise(net: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.parametrizations.weight_norm(net[1])
    optimizer.add_param_group({"params": net[1].parametrizations.parameters()})


@pytest.mark.all_cases
@pytest.mark.parametrize("change", [replace_head, replace_in_the_group, tie, normalise])
def test_an_optimizer_is_used_again_without_parameters_that_the_model_had(change: Any) -> None:
    net, expected, config = model(), model(), RelayConfig(micro_batches=2)
    optimizer, its = adamw(net.parameters()), adamw(expected.parameters())
    with Relay(net, optimizer, loss=squared_error, layers=["0", "1"], config=config) as relay:
        relay.step(batch(0))
        change(net, optimizer)
        with pytest.raises(RuntimeError, match="without those that the model no longer has"):
            relay.step(batch(1))
    if change is not replace_in_the_group:
        with pytest.raises(ValueError, match="parts of the model before") as raised:
            Relay(net, optimizer, loss=squared_error, layers=["0", "1"], config=config)
        exec(str(raised.value).partition("\n")[2], {"model": net, "optimizer": optimizer})
    with Relay(net, optimizer, loss=squared_error, layers=["0", "1"], config=config) as relay:
        relay.step(batch(1))
        relay.step(batch(2))
    train_plainly(expected, [its], steps=[0])
    change(expected, its)
    train_plainly(expected, [its], steps=[1, 2])
    assert all(map(torch.equal, net.parameters(), expected.parameters()))
    step = optimizer.state[net[0].weight]["step"]
    assert step == its.state[expected[0].weight]["step"] == 3  # type: ignore[index]


def test_state_is_moved_to_an_optimizer_over_new_parameters() -> None:
    net, expected, config = model(), model(), RelayConfig(micro_batches=2)
    optimizer, its = adamw(net.parameters()), adamw(expected.parameters())
    train_plainly(net, [optimizer], steps=[0])
    train_plainly(expected, [its], steps=[0])
    values = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(values, assign=True)
    with pytest.raises(
        ValueError, match=r"none of its parameters is\..*new\.load_state_dict\(optimizer\.state_dict\(\)\)"
    ):
        Relay(net, optimizer, loss=squared_error, config=config)
    new = adamw(net.parameters())
    new.load_state_dict(optimizer.state_dict())
    del values  # of which a relay would warn: with assign=True it is in the memory of the weights
    with Relay(net, new, loss=squared_error, config=config) as relay:
        relay.step(batch(1))
    train_plainly(expected, [its], steps=[1])
    assert all(map(torch.equal, net.parameters(), expected.parameters()))


def test_state_of_a_tensor_in_no_group_is_left_alone(tmp_path: Path) -> None:
    """As in plain training. A save is without it."""
    net, old = model(), nn.Parameter(torch.ones(3))
    optimizer = adamw(net.parameters())
    optimizer.state[old] = kept = {"step": torch.tensor(1.0)}
    with Relay(net, optimizer, loss=squared_error, config=RelayConfig(micro_batches=2)) as relay:
        relay.step(batch(0))
        assert relay.verify(batch(0)).equal
        relay.save(tmp_path / "save")
    assert optimizer.state[old] is kept
    other = model()
    with Relay.load(tmp_path / "save", other, adamw(other.parameters()), loss=squared_error) as loaded:
        loaded.step(batch(1))
