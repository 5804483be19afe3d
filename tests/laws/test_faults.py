"""Invariant 6: whatever fails in the middle of a step, weights and optimizer state are the old ones, the new ones, or a
TornStep says which layers are new; nothing else is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import small
import torch
from oracle import has_gradient
from patience import HANG_S, rarely, wait_until
from torch import nn

from l2l_core import DeviceOutOfMemory, EmulatedDevice, NonFiniteError, Relay, RelayConfig, TornStep

WIDTH, DEPTH, MICRO_BATCHES = 12, 4, 2


class Fault(Exception):
    """What the tests inject."""


class Layer(nn.Module):
    """A residual layer with BatchNorm statistics; `trap` is called on every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.trap: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trap()
        return x + torch.tanh(self.linear(nn.functional.dropout(self.norm(x), 0.1, self.training)))


class Model(nn.Module):
    """Shell code before, between and after the layers; `trap` is called between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)
        self.trap: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x) * 1.01
            self.trap()
        return self.head(x)


class Optimizer(torch.optim.AdamW):
    """AdamW whose step can be made to fail."""

    trap: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        type(self).trap()
        return super().step(closure)


class FaultyDevice(EmulatedDevice):
    """An emulated device whose copies can be made to fail."""

    trap: Callable[[str], None] = staticmethod(lambda lane: None)

    def _run(self, lane: str, *args: Any) -> None:
        type(self).trap(lane)
        super()._run(lane, *args)


def fail_at(n: int, error: type[BaseException] = Fault) -> Callable[..., None]:
    """A trap that raises at its n-th call (from 0), once."""
    calls = iter(range(1 << 30))

    def trap(*_: Any) -> None:
        if next(calls) == n:
            raise error("injected")

    return trap


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def squared_error(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[-1])


@pytest.fixture
def make_relay() -> Any:
    made = []

    def make(device: EmulatedDevice | None = None, loss: Any = squared_error, **settings: Any) -> Relay:
        torch.manual_seed(0)
        optimizer = partial(Optimizer, lr=1e-2, fused=True)
        config = RelayConfig(micro_batches=MICRO_BATCHES, **settings)
        made.append(Relay(Model(), optimizer, device or FaultyDevice(), loss=loss, config=config))
        made[-1].step(batch(0))  # optimizer state exists, the order of layers is known
        return made[-1]

    yield make
    Optimizer.trap = staticmethod(lambda: None)
    FaultyDevice.trap = staticmethod(lambda lane: None)
    for relay in made:
        relay.close()


def state_of(relay: Relay) -> dict[str, Any]:
    """Weights and buffers by name, optimizer state by parameter index, versions, random state."""
    weights = {name: value.clone() for name, value in relay.model.state_dict().items()}
    optimizer = {
        f"optimizer {index} {name}": value.clone()
        for index, state in relay.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    versions = torch.tensor([unit.version for unit in [relay.shell, *relay.stack]])
    return {**weights, **optimizer, "versions": versions, "random": torch.get_rng_state()}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def check_clean(relay: Relay) -> None:
    """Nothing of the failed step is left: forwards, hooks, gradients, modes, booked bytes; and the relay still trains."""
    for module in relay.model.modules():
        assert "forward" not in vars(module)
    for param in relay.model.parameters():
        assert not has_gradient(param)
        assert not param._post_accumulate_grad_hooks
    assert torch.is_grad_enabled()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks
    assert relay.device.ledger.total == 0, relay.device.ledger.by_category()
    assert relay.verify(batch(7)).equal


RECOMPUTING = {
    "eager": dict(),
    "eager, stash on host": dict(stash="host"),
    "rollback": dict(rollback=True),
    "deferred": dict(update="deferred"),
    "deferred and clipped": dict(update="deferred", max_grad_norm=0.1),
}
ALL_STAY = dict(schedule="depth_first", keep=DEPTH, resident=DEPTH - 2)
CONFIGS = RECOMPUTING | {
    "depth first": ALL_STAY,
    "depth first, rollback": dict(ALL_STAY, rollback=True),
    "depth first, deferred": dict(ALL_STAY, update="deferred"),
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("layer, nth", [rarely(0, 0), (2, 1), rarely(3, 0), (3, 1)])
def test_fault_in_a_layers_forward_leaves_the_old_step(
    make_relay: Any, settings: Any, error: Any, layer: int, nth: int
) -> None:
    relay = make_relay(**settings)
    before = state_of(relay)
    relay.model.layers[layer].trap = fail_at(nth, error)
    with pytest.raises(error):
        relay.step(batch(1))
    assert not changed(before, state_of(relay)), "a fault before the first update must leave the old step"
    check_clean(relay)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("nth", [0, 3, 2 * DEPTH - 1])
def test_fault_in_the_shell_leaves_the_old_step(make_relay: Any, settings: Any, nth: int) -> None:
    relay = make_relay(**settings)
    before = state_of(relay)
    relay.model.trap = fail_at(nth)
    with pytest.raises(Fault):
        relay.step(batch(1))
    assert not changed(before, state_of(relay))
    check_clean(relay)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("nth", [0, 1])
def test_fault_in_the_loss_leaves_the_old_step(make_relay: Any, settings: Any, nth: int) -> None:
    trap = [lambda: None]

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        trap[0]()
        return squared_error(outputs, batch)

    relay = make_relay(loss=loss, **settings)
    before = state_of(relay)
    trap[0] = fail_at(nth)
    with pytest.raises(Fault):
        relay.step(batch(1))
    assert not changed(before, state_of(relay))
    trap[0] = lambda: None
    check_clean(relay)


def check_torn_or_old(relay: Relay, before: dict[str, Any], error: BaseException, can_tear: bool) -> None:
    after = state_of(relay)
    different = {name for name in changed(before, after) if name != "versions"}
    if not isinstance(error, TornStep):
        assert not different, f"an error that is no TornStep must leave the old step, changed: {sorted(different)[:4]}"
        return
    assert can_tear, "only eager updates without rollback may tear"
    assert isinstance(error.__cause__, BaseException)
    names = {unit.key: unit for unit in [relay.shell, *relay.stack]}
    torn = {id(param) for key in error.updated for param in names[key].params}
    for name, param in relay.model.named_parameters():
        assert (name in different) <= (id(param) in torn), f"{name} changed but is not named"
    assert all(names[key].name in str(error) for key in error.updated[:6])


@pytest.mark.parametrize("settings", RECOMPUTING.values(), ids=RECOMPUTING)
@pytest.mark.parametrize("layer", range(DEPTH - 1))
def test_fault_in_the_recompute(make_relay: Any, settings: Any, layer: int) -> None:
    relay = make_relay(**settings)
    before = state_of(relay)
    relay.model.layers[layer].trap = fail_at(MICRO_BATCHES)  # the first recompute
    with pytest.raises((Fault, TornStep)) as caught:
        relay.step(batch(1))
    check_torn_or_old(relay, before, caught.value, can_tear="update" not in settings and "rollback" not in settings)
    check_clean(relay)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("nth", range(DEPTH + 1))
def test_fault_in_the_optimizer(make_relay: Any, settings: Any, nth: int) -> None:
    relay = make_relay(**settings)
    before = state_of(relay)
    Optimizer.trap = staticmethod(fail_at(nth))
    with pytest.raises((Fault, TornStep)) as caught:
        relay.step(batch(1))
    Optimizer.trap = staticmethod(lambda: None)
    check_torn_or_old(relay, before, caught.value, can_tear="update" not in settings and "rollback" not in settings)
    check_clean(relay)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("lane", ["h2d", "d2h"])
@pytest.mark.parametrize("nth", [0, rarely(2), 4, rarely(6)])
def test_fault_in_a_copy(make_relay: Any, settings: Any, lane: str, nth: int) -> None:
    relay = make_relay(**settings)
    before = state_of(relay)
    counting = fail_at(nth)
    FaultyDevice.trap = staticmethod(lambda on: counting() if on == lane else None)
    try:
        relay.step(batch(1))
    except (Fault, TornStep) as error:
        check_torn_or_old(relay, before, error, can_tear="update" not in settings and "rollback" not in settings)
    else:
        assert lane == "d2h" and nth >= DEPTH, "the fault was not noticed"
    FaultyDevice.trap = staticmethod(lambda on: None)
    check_clean(relay)


@pytest.mark.parametrize("settings", RECOMPUTING.values(), ids=RECOMPUTING)
def test_a_torn_or_undone_step_can_be_followed_by_good_ones(make_relay: Any, settings: Any) -> None:
    relay = make_relay(**settings)
    relay.model.layers[0].trap = fail_at(MICRO_BATCHES)
    with pytest.raises((Fault, TornStep)):
        relay.step(batch(1))
    losses = [relay.step(batch(1)).loss for _ in range(30)]
    assert losses[-1] < losses[0]


def test_nan_in_the_batch_is_reported_and_leaves_the_old_step(make_relay: Any) -> None:
    relay = make_relay()
    before = state_of(relay)
    x, y = batch(1)
    x[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"loss of micro-batch 0 is nan"):
        relay.step((x, y))
    assert not changed(before, state_of(relay))
    check_clean(relay)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_nan_loss_names_the_layer_that_produced_it_first(make_relay: Any, stash: str) -> None:
    relay = make_relay(stash=stash)
    with torch.no_grad():
        relay.model.layers[1].linear.bias[3] = float("inf")
        relay.model.layers[1].linear.weight[3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"first produced by layer layers\.1 \(L001\)"):
        relay.step(batch(1))


class Exploding(torch.autograd.Function):
    """Identity whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf")


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_a_non_finite_gradient_names_the_layer(make_relay: Any, settings: Any) -> None:
    relay = make_relay(**settings)
    before = state_of(relay)
    linear = relay.model.layers[2].linear
    plain = linear.forward
    linear.forward = lambda x: Exploding.apply(plain(x))
    with pytest.raises((NonFiniteError, TornStep)) as caught:
        relay.step(batch(1))
    del linear.forward
    cause = caught.value.__cause__ if isinstance(caught.value, TornStep) else caught.value
    assert isinstance(cause, NonFiniteError)
    assert "layers.2" in str(cause) and "L002" in str(cause)
    check_torn_or_old(relay, before, caught.value, can_tear="update" not in settings and "rollback" not in settings)
    check_clean(relay)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 0.99])
def test_out_of_memory_leaves_the_old_step(make_relay: Any, stash: str, share: float) -> None:
    device = FaultyDevice()
    relay = make_relay(device, stash=stash)
    peak = relay.step(batch(1)).peak_device_bytes
    before = state_of(relay)
    device.ledger.limit_bytes = int(peak * share)
    relay.config = RelayConfig(micro_batches=MICRO_BATCHES, stash=stash, seed=1)
    with pytest.raises((DeviceOutOfMemory, TornStep)) as caught:
        relay.step(batch(1))
    cause = caught.value.__cause__ if isinstance(caught.value, TornStep) else caught.value
    assert isinstance(cause, DeviceOutOfMemory)
    assert "Remedy" in str(cause) and "in use" in str(cause)
    check_torn_or_old(relay, before, caught.value, can_tear=True)
    device.ledger.limit_bytes = None
    check_clean(relay)


def test_ctrl_c_waits_for_the_step_to_finish(make_relay: Any) -> None:
    relay = make_relay()
    twin, handler = make_relay(), signal.getsignal(signal.SIGINT)
    relay.model.layers[1].trap = lambda: (
        os.kill(os.getpid(), signal.SIGINT) if not sent.append(1) and len(sent) == 1 else None
    )
    sent: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        relay.step(batch(1))
    relay.model.layers[1].trap = lambda: None
    assert relay.steps == 2
    twin.step(batch(1))
    assert not changed(state_of(twin), state_of(relay)), "the interrupted step is a whole one"
    assert signal.getsignal(signal.SIGINT) is handler
    check_clean(relay)


def test_ctrl_c_as_a_step_begins_leaves_no_lock_behind(make_relay: Any) -> None:
    relay = make_relay()
    lock = relay._busy

    class Pressed:
        release = lock.release

        def acquire(self, blocking: bool) -> bool:
            acquired = lock.acquire(blocking)
            os.kill(os.getpid(), signal.SIGINT)
            return acquired

    relay._busy = Pressed()
    with pytest.raises(KeyboardInterrupt):
        relay.step(batch(1))
    relay._busy = lock
    assert not lock.locked()
    check_clean(relay)


@pytest.mark.parametrize("infer", [Relay.forward, Relay.evaluate])
def test_ctrl_c_waits_for_an_inference_to_finish(make_relay: Any, infer: Any) -> None:
    relay = make_relay(stash="host")
    before, expected = state_of(relay), infer(relay, batch(1))
    calls: list[int] = []

    def press_once() -> None:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    relay.model.layers[1].trap = press_once
    with pytest.raises(KeyboardInterrupt):
        infer(relay, batch(1))
    assert len(calls) == MICRO_BATCHES, "it went on to the end"
    relay.model.layers[1].trap = lambda: None
    assert torch.equal(torch.as_tensor(infer(relay, batch(1))), torch.as_tensor(expected))
    assert not changed(before, state_of(relay))
    check_clean(relay)


def test_a_second_ctrl_c_does_not_wait(make_relay: Any) -> None:
    relay = make_relay(update="deferred")
    before = state_of(relay)
    relay.model.layers[1].trap = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        relay.step(batch(1))
    relay.model.layers[1].trap = lambda: None
    assert not changed(before, state_of(relay))
    check_clean(relay)


def test_an_interrupt_during_deferred_updates_undoes_those_under_way_too(make_relay: Any) -> None:
    relay = make_relay(update="deferred")
    before, calls = state_of(relay), iter(range(1 << 30))

    def press_twice() -> None:
        if next(calls) == 1:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)  # the old step is being restored, and this update still to come

    Optimizer.trap = staticmethod(press_twice)
    with pytest.raises(KeyboardInterrupt):
        relay.step(batch(1))
    time.sleep(0.1)
    Optimizer.trap = staticmethod(lambda: None)
    assert not changed(before, state_of(relay))
    check_clean(relay)


def test_no_thread_outlives_close(make_relay: Any) -> None:
    before = set(threading.enumerate())
    relay = make_relay(stash="host")
    relay.model.layers[0].trap = fail_at(MICRO_BATCHES)
    with pytest.raises(TornStep):
        relay.step(batch(1))
    assert set(threading.enumerate()) > before
    relay.close()
    relay.close()
    wait_until(lambda: set(threading.enumerate()) == before)
    with pytest.raises(RuntimeError, match="closed"):
        relay.step(batch(1))


def test_two_threads_cannot_step_at_once(make_relay: Any) -> None:
    relay = make_relay()
    errors: list[BaseException] = []
    inside, go_on = threading.Event(), threading.Event()
    relay.model.layers[0].trap = lambda: (inside.set(), go_on.wait(HANG_S))

    worker = threading.Thread(target=lambda: relay.step(batch(1)))
    worker.start()
    assert inside.wait(HANG_S)
    try:
        relay.step(batch(1))
    except RuntimeError as error:
        errors.append(error)
    go_on.set()
    worker.join()
    assert "another thread" in str(errors[0])


def test_a_failed_step_leaves_no_gradient_for_the_next_norm(make_relay: Any) -> None:
    """A clipped step fails after its norm; a layer that the next step does not train must not count in the next norm."""
    relay = make_relay(update="deferred", max_grad_norm=0.1)
    Optimizer.trap = staticmethod(fail_at(0))
    with pytest.raises(Fault):
        relay.step(batch(1))
    Optimizer.trap = staticmethod(lambda: None)
    assert all(param.grad is None for group in relay.optimizer.param_groups for param in group["params"])
    relay.model.layers[1].requires_grad_(False)
    assert relay.verify(batch(2)).equal


def test_a_proof_from_another_thread_in_mid_step_is_refused_and_changes_nothing() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert go_on.wait(HANG_S)

    with (
        small.make_relay(small.make_gpt(2)) as relay,
        small.make_relay(small.make_gpt(2)) as alone,
    ):
        losses = [alone.step(small.make_batch(seed)).loss for seed in (0, 1)]
        handle = relay.model.lm_head.register_forward_hook(wait)
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(relay.step(small.make_batch(0)).loss))
        thread.start()
        assert begun.wait(HANG_S)
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            relay.verify(small.make_batch(0))
        assert torch.equal(torch.get_rng_state(), state)
        go_on.set()
        thread.join(HANG_S)
        handle.remove()
        assert [*found, relay.step(small.make_batch(1)).loss] == losses
