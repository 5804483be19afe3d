"""With ``ahead=0`` nothing runs beside compute: the thread that trains makes copies and updates, and nothing else changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import assert_trains, chain_of
from deep_models import Chain, chain_batch, squared_error
from oracle import assert_equal, both
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import BY_NAME, ResidualMlp

from l2l_core import EmulatedDevice, Relay, RelayConfig, TornStep
from l2l_core.devices import InlineExecutor
from l2l_core.devices.executors import NoTorchModes

WAYS = [{}, {"stash": "host"}, {"update": "deferred"}, {"schedule": "depth_first"}]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(way.values()) or "plain")


class Told(EmulatedDevice):
    """Notes which thread copies."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: Counter[int] = Counter()

    def _run(self, *args: Any) -> None:
        self.threads[threading.get_ident()] += 1
        super()._run(*args)


def noting(threads: Counter[int]) -> type[torch.optim.Optimizer]:
    """An AdamW that notes which thread updates."""

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            threads[threading.get_ident()] += 1
            return super().step(closure)

    return Noting


@pytest.mark.all_cases
@pytest.mark.parametrize("ahead", [0, 1])
@ways
def test_who_copies_and_updates(way: dict[str, Any], ahead: int) -> None:
    updates: Counter[int] = Counter()
    device, model = Told(), Chain(4)
    config = RelayConfig(micro_batches=2, ahead=ahead, verify="never", **way)
    optimizer = partial(noting(updates), lr=1e-3)
    options: dict[str, Any] = {"loss": squared_error, "loss_over": "micro-batch"}  # no other passes, which copy in turn
    with Relay(model, optimizer, device, config=config, **options) as relay:
        updates.clear()  # the toys of the constructor
        relay.step(chain_batch(2))
    me = threading.get_ident()
    assert {me in found for found in (device.threads, updates)} == {ahead == 0}
    assert ahead == 1 or (len(device.threads), len(updates)) == (1, 1)
    assert updates.total() >= 5, "four layers and the shell"


class Functions(TorchFunctionMode):
    """Notes what functions are called in its sight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Notes what operations run in its sight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.all_cases
@ways
def test_modes_of_the_user_see_no_more_of_it(way: dict[str, Any]) -> None:
    """A mode around the step sees none of the copies and updates that another thread would have made."""
    seen: dict[int, list[Counter[str]]] = {}
    for ahead in (1, 0):
        config = RelayConfig(micro_batches=2, ahead=ahead, **way)
        with Relay(Chain(4), partial(torch.optim.SGD, lr=1e-3), loss=squared_error, config=config) as relay:
            relay.step(chain_batch(2))
            with Functions() as functions, Operations() as operations:
                relay.step(chain_batch(2))
        seen[ahead] = [functions.seen, operations.seen]
    assert seen[0][1]["aten.mm.default"] > 0, "the model's own are seen"
    for beside, in_turn in zip(seen[1], seen[0], strict=True):
        more = in_turn - beside
        assert not {name for name in more if "copy_" in name or "add_" in name or "norm" in name}, more


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("around", [autocast, Functions, Operations], ids=lambda each: each.__name__)
@ways
def test_the_same_weights_under_whatever_is_in_force(around: Callable[[], Any], way: dict[str, Any]) -> None:
    weights = []
    for ahead in (1, 0):
        torch.manual_seed(0)
        model = Chain(4)
        config = RelayConfig(micro_batches=2, ahead=ahead, **way)
        with Relay(model, partial(torch.optim.AdamW, lr=1e-2), loss=squared_error, config=config) as relay:
            for seed in range(3):
                torch.manual_seed(seed)
                with around():
                    relay.step(chain_batch(2))
        weights.append(list(model.state_dict().values()))
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("name", ["chain", "t5", "resnet", "gpt2"])
@ways
def test_the_bits_of_plain_training(name: str, way: dict[str, Any]) -> None:
    kind = BY_NAME[name]
    with both(kind, RelayConfig(micro_batches=3, ahead=0, **way)) as pair:
        assert_equal([pair.step(kind.make_batch(6, seed)) for seed in range(3)])


def test_tensors_with_operations_of_their_own_in_a_batch() -> None:
    """A copy that is shown to no mode still finds what a subclass makes of it: jagged rows have no storage of their own."""

    class Padded(Chain):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows.to_padded_tensor(0.0)).mean(1)

    losses = []
    for ahead in (1, 0):
        torch.manual_seed(0)
        rows = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged)
        config = RelayConfig(ahead=ahead)
        with Relay(Padded(2), partial(torch.optim.SGD, lr=0.1), loss=squared_error, config=config) as relay:
            losses.append([relay.step((rows, torch.zeros(2, 3))).loss for _ in range(2)])
    assert losses[0] == losses[1]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Fails(torch.optim.SGD):
    """Does not update twice after it was told so."""

    left = -1

    def step(self, closure: Any = None) -> Any:
        if Fails.left == 0:
            raise ArithmeticError("no update")
        Fails.left -= 1
        return super().step(closure)


@pytest.mark.parametrize("way", WAYS[:1] + WAYS[3:], ids=["breadth", "depth"])
def test_an_update_that_fails(way: dict[str, Any]) -> None:
    with Relay(
        Chain(4), partial(Fails, lr=1e-3), loss=squared_error, config=RelayConfig(micro_batches=2, ahead=0, **way)
    ) as relay:
        relay.step(chain_batch(2))
        Fails.left = 2
        with pytest.raises(TornStep, match="no update") as caught:
            relay.step(chain_batch(2))
        assert 0 < len(caught.value.updated) < 5
        Fails.left = -1
        relay.step(chain_batch(2))


def test_a_copy_that_fails() -> None:
    class Broken(EmulatedDevice):
        fails = False

        def _run(self, *args: Any) -> None:
            if self.fails:
                raise OSError("the link is down")
            super()._run(*args)

    device = Broken()
    with Relay(
        Chain(4), partial(torch.optim.SGD, lr=1e-3), device, loss=squared_error, config=RelayConfig(ahead=0)
    ) as relay:
        device.fails = True
        with pytest.raises(OSError, match="the link is down"):
            relay.step(chain_batch(1))
        device.fails = False
        relay.step(chain_batch(1))


def test_an_interrupted_copy_leaves_modes_as_they_were() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with Functions() as functions, Operations() as operations:
        with pytest.raises(KeyboardInterrupt):
            InlineExecutor(NoTorchModes).submit(interrupted)
        torch.ones(2).neg()
    assert functions.seen["neg"] == 1 and operations.seen["aten.neg.default"] == 1


def test_errors_wait_and_interrupts_do_not() -> None:
    hands = InlineExecutor(NoTorchModes)
    job = hands.submit(int, "no number")
    assert isinstance(job.exception(), ValueError)
    with pytest.raises(ValueError, match="no number"):
        job.result()
    assert hands.submit(int, "7").result() == 7

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hands.submit(interrupted)


# -- gradients to which autograd adds ----------------------------------------------------------------------------------


class Halves(ResidualMlp):
    """Puts another gradient in the place of what has come so far, whenever something has."""

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "hooked", False):
            self.hooked = True

            def halve(param: Tensor) -> None:
                assert param.grad is not None
                param.grad = 0.5 * param.grad

            self.fc1.weight.register_post_accumulate_grad_hook(halve)
        return super().forward(x)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_gradient_that_is_exchanged_as_it_grows(micro_batches: int) -> None:
    """The first step, in which the hook is put there; the next one refuses it."""
    kind = chain_of(Halves)
    with both(kind, RelayConfig(micro_batches=micro_batches, verify="never")) as pair:
        assert_equal([pair.step(kind.make_batch(2 * micro_batches, 0))])


def test_a_parameter_that_is_first_used_late() -> None:
    """Its first gradient comes with the second micro-batch, while autograd adds to those of others."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.one(x).tanh() if x.shape[0] == 3 else x + self.one(x).tanh() + self.two(x).tanh()

    kind = chain_of(Late)
    assert_trains(kind, micro_batches=2)
    with both(kind, RelayConfig(micro_batches=3)) as pair:  # rows of 3, 3 and 2
        assert_equal([pair.step(kind.make_batch(8, seed)) for seed in range(3)])


class Freezes(ResidualMlp):
    """Freezes a weight of its own in the middle of a step, and fails."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and getattr(self, "armed", 0):
            self.armed -= 1
            if not self.armed:
                self.fc1.weight.requires_grad_(False)
                raise ArithmeticError("what the model says")
        return super().forward(x)


@pytest.mark.parametrize("schedule, calls", [("breadth_first", 2), ("breadth_first", 4), ("depth_first", 2)])
def test_a_step_that_fails_with_a_weight_frozen_meanwhile(schedule: Any, calls: int) -> None:
    """Its error is the model's own, and nothing is left: no booked byte, no hook."""
    kind = chain_of(Freezes)
    with both(kind, RelayConfig(micro_batches=2, schedule=schedule)) as pair:
        relay = pair.relay
        relay.step(kind.make_batch(4, 0))
        layer = relay.stack[1].module
        for _ in range(2):
            layer.armed = calls  # the third and fourth are recomputes
            with pytest.raises((ArithmeticError, TornStep), match="what the model says"):
                relay.step(kind.make_batch(4, 1))
            layer.fc1.weight.requires_grad_(True)
            assert relay.device.ledger.total == 0, relay.device.ledger.by_category()
            assert not any(param._post_accumulate_grad_hooks for param in relay.model.parameters())
        relay.step(kind.make_batch(4, 2))
