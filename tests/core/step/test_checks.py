"""What a step checks of the model before it trains anything: parameters behind its back, gradient checkpointing."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from by_hand import chain_of
from oracle import assert_state, copy_state
from torch import nn
from zoo import BY_NAME, WIDTH, ResidualMlp, loss_of

from l2l_core import Relay, RelayConfig


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.half(),
        lambda model: model.to("meta"),
        lambda model: setattr(model.layers[1].fc1, "weight", nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))),
        lambda model: setattr(model.layers[1].fc1.weight, "data", torch.zeros(2 * WIDTH, WIDTH)),
        lambda model: model.load_state_dict(copy_state(model), assign=True),
    ],
    ids=["double", "half", "meta", "new parameter", "new data", "assigned"],
)
def test_changed_model_is_noticed(change: Callable[[nn.Module], Any]) -> None:
    kind = chain_of(ResidualMlp)
    model = kind.make_model()
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over) as relay:
        relay.step(kind.make_batch(4, 0))
        change(model)
        for act in (relay.step, relay.evaluate, relay.forward):
            with pytest.raises(RuntimeError, match="behind the relay's back|moved or cast"):
                act(kind.make_batch(4, 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model.layers.__setitem__(1, ResidualMlp()), "layer layers.1 "),
        (lambda model: model.layers.__setitem__(1, nn.Identity()), "layer layers.1 "),
        (lambda model: setattr(model, "head", nn.Linear(WIDTH, 8)), "parameter head.weight "),
        (
            lambda model: setattr(model.layers[1].fc1, "adapter", nn.Linear(2, 2)),
            "parameter layers.1.fc1.adapter.weight ",
        ),
        (lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))), "parameter scale "),
    ],
    ids=["another layer", "an identity", "another head", "an adapter", "a parameter"],
)
def test_what_comes_into_the_model_by_hand_is_refused(change: Callable[[nn.Module], Any], named: str) -> None:
    """It would run and never learn, where in core the optimizer would have to be told of it."""
    kind = chain_of(ResidualMlp)
    model = kind.make_model()
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over) as relay:
        relay.step(kind.make_batch(4, 0))
        change(model)
        for act in (relay.step, relay.evaluate, relay.verify):
            with pytest.raises(RuntimeError, match=f"{re.escape(named)}.*behind the relay's back.*make a new"):
                act(kind.make_batch(4, 1))


def test_a_group_that_is_added_is_refused_and_welcome_in_a_new_relay() -> None:
    """A layer thaws with a group of its own: with a new relay from there on, bits are those in core."""
    kind = chain_of(ResidualMlp)
    model, twin = kind.make_model(), kind.make_model()
    twin.load_state_dict(model.state_dict())
    batches = [kind.make_batch(4, i) for i in range(4)]

    def begin(model: nn.Module) -> tuple[nn.Parameter, ...]:
        own = tuple(model.layers[0].parameters())
        model.layers[0].requires_grad_(False)
        return own

    def thaw(own: tuple[nn.Parameter, ...], optimizer: torch.optim.Optimizer) -> None:
        for param in own:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": own, "lr": 0.3})

    own = begin(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with Relay(model, optimizer, loss=kind.loss, loss_over=kind.loss_over) as relay:
        for batch in batches[:2]:
            relay.step(batch)
        before = copy_state(model)
        thaw(own, relay.optimizer)
        with pytest.raises(ValueError, match="2 groups and had 1.*make a new relay with the same optimizer"):
            relay.step(batches[2])
        assert_same(before, model.state_dict())
    with Relay(model, optimizer, loss=kind.loss, loss_over=kind.loss_over) as relay:
        for batch in batches[2:]:
            relay.step(batch)

    own = begin(twin)
    plain = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for i, batch in enumerate(batches):
        if i == 2:
            thaw(own, plain)
        torch.manual_seed(RelayConfig(seed=0).micro_batch_seed(i % 2, 0))  # the second relay counts steps from 0 again
        loss_of(kind, twin, batch).backward()
        plain.step()
        plain.zero_grad()
    assert_same(model.state_dict(), twin.state_dict())


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradient_checkpointing_is_refused(name: str) -> None:
    kind = BY_NAME[name]
    model = kind.make_model()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the newer name
    enable()
    with pytest.raises(ValueError, match="checkpointing_disable"):
        Relay(model)
    model = kind.make_model()
    with Relay(model) as relay:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with pytest.raises(ValueError, match="checkpointing_disable"):
            relay.step(kind.make_batch(4, 0))


def _added(bias: nn.Parameter) -> None:
    with torch.enable_grad():
        bias.square().sum().backward()


def _added_and_cleared(bias: nn.Parameter) -> None:
    _added(bias)
    bias.grad = None  # in core the layer's own gradient would be gone, too


def _set_by_hand(bias: nn.Parameter) -> None:
    bias.grad = torch.ones_like(bias)


@pytest.mark.parametrize("schedule", ["breadth_first", "depth_first"])
@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("late", [_added, _added_and_cleared, _set_by_hand])
@pytest.mark.all_cases
def test_a_gradient_that_comes_when_its_layer_has_been_left(
    late: Callable[[nn.Parameter], None], update: str, schedule: str
) -> None:
    """Backward in backward tears no more than what is updated by then; of what is set by hand nobody is told before the end."""
    kind = chain_of(ResidualMlp)
    model = kind.make_model()
    before = copy_state(model)
    relays: list[Relay] = []

    def when_left(grad: torch.Tensor) -> None:
        for job in relays[0]._store._jobs if late is _set_by_hand else ():
            job.exception()  # waits for the layer's update, which would use and clear the gradient
        late(model.layers[-1].fc1.bias)

    model.layers[-2].fc1.weight.register_hook(when_left)
    config = RelayConfig(seed=0, micro_batches=1, schedule=schedule, update=update)
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
        relays.append(relay)
        with pytest.raises(
            RuntimeError, match=r"fc1\.bias gets a gradient from code that is not in its layer"
        ) as caught:
            relay.step(kind.make_batch(4, 0))
        updated = getattr(caught.value, "updated", [])
        if update == "deferred":
            assert_state(model, before)
        elif late is not _set_by_hand:
            assert len(updated) <= 1, updated
        assert all(param.grad is None for param in model.parameters())
