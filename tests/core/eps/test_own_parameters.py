"""The optimizer has the model's own parameters: whatever goes by identity, attributes or `step` itself is used as meant."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from l2l_core import Duplicate, FileShelf, Relay, RelayConfig, in_bf16
from l2l_core.eps.blocks import Unit
from l2l_core.optim import bf16_optimizers

K = 2
Make = Callable[[nn.Module], Optimizer]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def model_of(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).pow(2).mean()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=noise), torch.randn(4, 8, generator=noise)


def relay_of(model: nn.Module, optimizer: Any, **settings: Any) -> Relay:
    layers = [str(index) for index in range(len([*model.children()]))]
    return Relay(model, optimizer, layers=layers, loss=loss, config=RelayConfig(**{"micro_batches": K} | settings))


def plain_step(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """As a user would write it."""
    for x, y in zip(*(part.chunk(K) for part in batch_of(step)), strict=True):
        (loss(model(x), (x, y)) / K).backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(
    make: Make, steps: int = 3, prepare: Callable[[nn.Module], Any] = lambda model: None, **settings: Any
) -> None:
    """Train both ways with the user's own optimizer object; weights and state must agree in every bit."""
    ours, theirs = model_of(), model_of()
    for model in (ours, theirs):
        prepare(model)
    mine, plain = make(ours), make(theirs)
    with relay_of(ours, mine, **settings) as relay:
        for step in range(steps):
            relay.step(batch_of(step))
            plain_step(theirs, plain, step)
            for param, own in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(param, own)
                assert any(param is each for each in relay.optimizer.param_groups[0]["params"]) and vars(param) == vars(
                    own
                )
                assert all(torch.equal(value, plain.state[own][name]) for name, value in mine.state[param].items())


WAYS = [
    {},
    {"ahead": 0},
    {"update": "deferred"},
    {"update": "whole"},
    {"schedule": "depth_first"},
    {"stash": "host", "rollback": True},
]


class Scaled(SGD):
    """Reads a rate from an attribute of each parameter, as muP does, and keeps a state by parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * param.rate)
                    self.state[param]["sum"] = self.state[param].get("sum", 0) + param.grad


class ByIdentity(SGD):
    """Keeps rates by the identity of parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.rates = {id(param): 1 / (1 + i) for i, param in enumerate(self.param_groups[0]["params"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * self.rates.get(id(param), 1.0))


def give_rates(model: nn.Module) -> None:
    for index, param in enumerate(model.parameters()):
        param.rate = 1 / (1 + index)  # type: ignore[attr-defined]


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_attributes_and_identities_of_parameters(settings: dict[str, Any]) -> None:
    compare(lambda model: Scaled(model.parameters(), lr=0.1), prepare=give_rates, **settings)
    compare(lambda model: ByIdentity(model.parameters(), lr=0.1), **settings)
    compare(lambda model: AdamW(model.parameters(), lr=0.1), **settings)


def test_state_is_read_and_reset_by_the_models_parameters() -> None:
    ours, theirs = model_of(), model_of()
    plain = AdamW(theirs.parameters(), lr=0.1)
    with relay_of(ours, partial(AdamW, lr=0.1)) as relay:
        for step in range(4):
            relay.step(batch_of(step))
            plain_step(theirs, plain, step)
            for model, optimizer in ((ours, relay.optimizer), (theirs, plain)):
                for param in model.parameters():
                    optimizer.state[param]["exp_avg"].zero_()
        assert relay.optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
        assert relay.verify(batch_of(5)).equal
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_verify_and_copies_keep_the_attributes(tmp_path: Any) -> None:
    model = model_of()
    give_rates(model)
    with relay_of(model, partial(Scaled, lr=0.1)) as relay:
        relay.step(batch_of(0))
        assert relay.verify(batch_of(1)).equal
        relay.apply(Duplicate(0))
        relay.step(batch_of(1))
    shelf = FileShelf(folder=tmp_path / "shelf", memory_bytes=10**6)
    layers = [str(index) for index in range(4)]
    model = model_of()
    give_rates(model)
    with Relay(model, partial(Scaled, lr=0.1), layers=layers, loss=loss, shelf=shelf) as relay:
        relay.step(batch_of(0))  # its optimizer has other parameters, with these attributes
        assert relay.verify(batch_of(1)).equal


# -- updates beside compute --------------------------------------------------------------------------------------------


def test_an_optimizer_that_sets_data_while_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`in_bf16` gives parameters other tensors for the length of an update; meanwhile visits point others to the device."""
    widen = bf16_optimizers._widen

    def slowly(param: nn.Parameter) -> Any:
        original = widen(param)
        time.sleep(0.004)
        return original

    set_data = Unit.set_data

    def late(unit: Unit, views: Any) -> None:
        time.sleep(0.002)
        set_data(unit, views)

    make = partial(in_bf16(AdamW, weights=True), lr=1e-2)
    trained = []
    for slow in (False, True):
        if slow:
            monkeypatch.setattr(bf16_optimizers, "_widen", slowly)
            monkeypatch.setattr(Unit, "set_data", late)
        model = model_of(6).bfloat16()
        config = RelayConfig(micro_batches=K, seed=0)
        layers = [str(index) for index in range(6)]
        with Relay(model, make, layers=layers, loss=lambda y, _: y.float().pow(2).mean(), config=config) as relay:
            for step in range(3):
                relay.step(batch_of(step))
        model(batch_of(0)[0].bfloat16()).float().pow(2).mean().backward()  # closed: an ordinary model and optimizer
        relay.optimizer.step()
        relay.optimizer.zero_grad()
        trained.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *trained))


class Rebinds(SGD):
    """Gives parameters other tensors instead of changing them in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_an_optimizer_that_makes_new_tensors(settings: dict[str, Any]) -> None:
    compare(lambda model: Rebinds(model.parameters(), lr=0.1), **settings)


# -- one step of the whole optimizer -----------------------------------------------------------------------------------


class GlobalNorm(SGD):
    """Divides by the norm of all gradients: layers are coupled."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([param.grad.norm() for param in params]))
        for param in params:
            param.grad.div_(norm)
        return super().step(closure)


@pytest.mark.all_cases
@pytest.mark.parametrize("settings", [{}, {"ahead": 0}, {"schedule": "depth_first"}, {"stash": "host"}], ids=str)
def test_an_optimizer_that_couples_layers_takes_one_step(settings: dict[str, Any]) -> None:
    make = partial(GlobalNorm, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"couples parameters.*RelayConfig\(update='whole'\)"):
        relay_of(model_of(), make, **settings)
    compare(lambda model: make(model.parameters()), update="whole", **settings)
    with relay_of(model_of(), make, update="whole", **settings) as relay:
        relay.step(batch_of(0))
        assert relay.verify(batch_of(1)).equal
        with pytest.raises(ValueError, match="couples parameters"):
            relay.config = RelayConfig(update="deferred")
        expected = relay.forecast(batch_of(1)).peak_device_bytes
        assert relay.step(batch_of(1)).peak_device_bytes == expected


def states_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [*model.state_dict().values(), *(optimizer.state[param]["momentum_buffer"] for param in model.parameters())]


def test_a_step_of_the_whole_optimizer_is_undone_when_it_fails() -> None:
    class Fails(SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if Fails.fails:
                raise RuntimeError("out of luck")
            return result

    model = model_of()
    with relay_of(model, partial(Fails, lr=0.1, momentum=0.9), update="whole") as relay:
        relay.step(batch_of(0))
        before, Fails.fails = copy.deepcopy(states_of(model, relay.optimizer)), True
        with pytest.raises(RuntimeError, match="out of luck"):
            relay.step(batch_of(1))
        assert all(map(torch.equal, before, states_of(model, relay.optimizer)))
        assert all(param.grad is None for param in model.parameters())


def test_a_layer_that_warms_up_needs_a_rate_of_its_own() -> None:
    with relay_of(model_of(), partial(AdamW, lr=0.1), update="whole") as relay:
        relay.step(batch_of(0))
        relay.apply(Duplicate(0, warmup=3))
        before = copy.deepcopy(relay.model.state_dict())
        with pytest.raises(ValueError, match=r"warms up.*warmup=0, or use update='deferred'.*Nothing"):
            relay.step(batch_of(1))
        assert str(before) == str(relay.model.state_dict())
        relay.undo()
        relay.apply(Duplicate(0, warmup=0))
        relay.step(batch_of(1))


def test_whole_steps_need_the_weights_in_memory(tmp_path: Any) -> None:
    shelf = FileShelf(folder=tmp_path / "shelf", memory_bytes=10**6)
    with pytest.raises(ValueError, match="update='whole' is not possible"):
        Relay(model_of(), SGD, loss=loss, shelf=shelf, config=RelayConfig(update="whole"))


# -- steps by the user -------------------------------------------------------------------------------------------------


def clip_before(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Wrap `step` on the object, as people do."""
    plain = optimizer.step

    def clipped(*args: Any, **kwargs: Any) -> Any:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return plain(*args, **kwargs)

    optimizer.step = clipped  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_a_step_that_was_replaced_is_called_or_refused(update: str) -> None:
    model = model_of()
    with relay_of(model, AdamW(model.parameters(), lr=0.1), update=update) as relay:
        relay.step(batch_of(0))
        relay.optimizer.step = relay.optimizer.step  # type: ignore[method-assign]  # replaced, and put back
        relay.step(batch_of(0))
        del relay.optimizer.step
        LambdaLR(relay.optimizer, lambda epoch: 1.0)
        relay.step(batch_of(1))  # a scheduler only counts
        clip_before(relay.optimizer, model)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"clip_before\.<locals>\.clipped.*update='whole'.*max_grad_norm"):
            relay.step(batch_of(2))
        assert str(before) == str(model.state_dict())
        with pytest.raises(ValueError, match="cannot be called for the in-core side"):
            relay.verify(batch_of(2))
    compare(lambda model: clip_before(AdamW(model.parameters(), lr=0.1), model), update="whole")


def test_a_step_by_the_user_trains_or_says_why_not() -> None:
    ours, theirs = model_of(), model_of()
    plain = AdamW(theirs.parameters(), lr=0.1)
    with relay_of(ours, partial(AdamW, lr=0.1)) as relay:
        relay.step(batch_of(0))
        plain_step(theirs, plain, 0)
        for given in ((), (None,)):  # accelerate passes a closure of None
            with pytest.raises(RuntimeError, match=r"no parameter has a gradient.*relay\.step\(batch\).*RelayTrainer"):
                relay.optimizer.step(*given)

        def closure() -> Tensor:
            relay.optimizer.zero_grad()
            value = loss(ours(batch_of(3)[0]), batch_of(3))
            value.backward()
            return value

        relay.optimizer.step(closure)
        relay.optimizer.zero_grad()
        loss(theirs(batch_of(3)[0]), batch_of(3)).backward()
        plain.step()
        plain.zero_grad()
        relay.fork("other")
        plain_step(ours, relay.optimizer, 1)  # in core, as the unchanged loop of a framework
        plain_step(theirs, plain, 1)
        relay.step(batch_of(2))
        plain_step(theirs, plain, 2)
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        relay.switch("main" if relay.branch == "other" else "other")
        relay.switch("main" if relay.branch == "other" else "other")
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    relay.optimizer.step()  # closed: an ordinary optimizer again


def test_on_a_shelf_state_of_the_models_parameters_is_refused(tmp_path: Any) -> None:
    """The optimizer has masters there; an entry that a look makes would be in the way of `state_dict`."""
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    layers, shelf = [str(index) for index in range(4)], FileShelf(folder=tmp_path / "shelf", memory_bytes=10**6)
    with Relay(model, optimizer, layers=layers, loss=loss, shelf=shelf) as relay:
        relay.step(batch_of(0))
        param = model[1].linear.weight
        for state in (optimizer.state, relay.optimizer.state):
            with pytest.raises(RuntimeError, match=r"shape \(8, 8\).*shelf or several workers"):
                state[param]
        relay.step(batch_of(1))
        assert relay.verify(batch_of(2)).equal
    assert not optimizer.state[nn.Parameter(torch.zeros(1))]  # an ordinary optimizer again
