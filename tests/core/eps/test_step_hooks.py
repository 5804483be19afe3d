"""Step hooks of optimizers: called once per step of deferred updates as in plain training, refused with eager ones."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from residual import Net, batch, mean_square
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from l2l_core import EmulatedDevice, Freeze, Relay, RelayConfig
from l2l_core.eps.optimizers import is_same

EAGER = RelayConfig(micro_batches=2)
DEFERRED = RelayConfig(micro_batches=2, update="deferred")
Hook = Callable[..., Any]
make = partial(AdamW, lr=1e-2)


def relay_of(config: RelayConfig, device: Any = "cpu") -> Relay:
    return Relay(Net(), make, device, loss=mean_square, config=config)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(ours: nn.Module, theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours.parameters(), theirs))


def in_core(register: Callable[[nn.Module, Optimizer], Any], steps: int = 3) -> list[Tensor]:
    """Weights after plain training with a hook."""
    model = Net()
    optimizer = make(model.parameters())
    register(model, optimizer)
    for step in range(steps):
        for part in batch(step)[0].chunk(2):
            (mean_square(model(part)) / 2).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None
    return weights(model)


def by_relay(
    register: Callable[[nn.Module, Optimizer], Any], config: RelayConfig, steps: int = 3, **options: Any
) -> nn.Module:
    with relay_of(config, **options) as relay:
        register(relay.model, relay.optimizer)
        for step in range(steps):
            relay.step(batch(step))
        return relay.model


# -- hooks, as they are written -----------------------------------------------------------------------------------------


def sets_the_rate(model: nn.Module, optimizer: Optimizer) -> Any:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert args == (optimizer,) and kwargs == {}
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return optimizer.register_step_pre_hook(hook)


def clips_by_the_optimizer(model: nn.Module, optimizer: Optimizer) -> Any:
    def hook(optimizer: Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)

    return optimizer.register_step_pre_hook(hook)


def clips_by_the_model(model: nn.Module, optimizer: Optimizer) -> Any:
    return optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None)


def replaces_gradients(model: nn.Module, optimizer: Optimizer) -> Any:
    def hook(*_: Any) -> None:
        for param in model.parameters():
            param.grad = param.grad.sign() if param.dim() > 1 else None

    return optimizer.register_step_pre_hook(hook)


def decays_weights(model: nn.Module, optimizer: Optimizer) -> Any:
    def hook(optimizer: Optimizer, *_: Any) -> None:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            param.data.mul_(0.9)

    return optimizer.register_step_pre_hook(hook)


PRE_HOOKS = [clips_by_the_optimizer, clips_by_the_model, replaces_gradients, decays_weights, sets_the_rate]


def nothing(*_: Any) -> None: ...


def registers(which: str, of: str, optimizer: Optimizer) -> Any:
    if of == "all":
        return {"pre": register_optimizer_step_pre_hook, "post": register_optimizer_step_post_hook}[which](nothing)
    return getattr(optimizer, f"register_step_{which}_hook")(nothing)


@pytest.mark.parametrize("of", ["one", "all"])
@pytest.mark.parametrize("which", ["pre", "post"])
def test_hooks_are_refused_with_eager_updates_and_the_remedy_works(which: str, of: str) -> None:
    with relay_of(EAGER) as relay:
        relay.step(batch(0))
        before = weights(relay.model)
        handle = registers(which, of, relay.optimizer)
        try:
            with pytest.raises(
                ValueError, match=r"has a step hook, nothing, .*RelayConfig\(update='deferred'\), or remove"
            ):
                relay.step(batch(1))
            assert equal(relay.model, before) and relay.steps == 1
            assert relay.verify(batch(1)).equal, "which calls no hooks"
            relay.config = DEFERRED
            relay.step(batch(1))
        finally:
            handle.remove()
        relay.config = EAGER
        relay.step(batch(2))
        assert equal(relay.model, in_core(nothing))


@pytest.mark.parametrize("kind", ["post-accumulate", "of a tied weight"])
def test_a_hook_that_logs_norms_of_gradients_is_refused_and_the_remedy_works(kind: str) -> None:
    def net() -> nn.Module:
        model = Net()
        if kind == "of a tied weight":
            model.layers[2].weight = model.stem.weight
        return model

    def logs_by_the_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, list[float]]:
        log: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}

        def hook(*_: Any) -> None:
            for name, param in model.named_parameters():
                log[name].append(param.grad.norm().item())

        optimizer.register_step_pre_hook(hook)
        return log

    plain = net()
    norms: dict[str, list[float]] = {name: [] for name, _ in plain.named_parameters()}
    for name, param in plain.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: norms[name].append(p.grad.norm().item()))
    optimizer = make(plain.parameters())
    for seed in range(3):
        for part in batch(seed)[0].chunk(2):
            (mean_square(plain(part)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: each[1::2] for name, each in norms.items()}  # of both micro-batches together

    model = net()
    if kind == "post-accumulate":
        handle = model.layers[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    else:
        handle = model.stem.weight.register_hook(lambda grad: grad)
    optimizer = make(model.parameters())
    with Relay(model, optimizer, "cpu", loss=mean_square, config=EAGER) as relay:
        before = weights(model)
        with pytest.raises(ValueError, match=r"register_step_pre_hook with RelayConfig\(update='deferred'\)"):
            relay.step(batch(0))
        assert equal(model, before)
        handle.remove()
        relay.config = DEFERRED
        log = logs_by_the_optimizer(model, optimizer)
        for seed in range(3):
            relay.step(batch(seed))
        assert equal(model, weights(plain)) and log == expected


@pytest.mark.parametrize("register", PRE_HOOKS)
def test_gradients_are_there_in_deferred_updates(register: Any) -> None:
    expected = in_core(register)
    assert not equal(by_relay(lambda *_: None, DEFERRED), expected), "the hook does something"
    assert equal(by_relay(register, DEFERRED), expected)


def test_gradients_are_there_beside_compute_in_another_type() -> None:
    """The shell is on the device during a step, as a copy; a hook on the model sees masters all the same."""
    config = RelayConfig(micro_batches=2, update="deferred", precision="bf16", stash="host")
    seen = []

    def looks(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: seen.append([(p.dtype, p.grad.dtype) for p in model.parameters()]))

    by_relay(looks, config, device=EmulatedDevice())
    assert len(seen) == 3 and {pair for pairs in seen for pair in pairs} == {(torch.float32, torch.float32)}


def test_what_clipping_does_before_the_hook_it_sees() -> None:
    norms = []
    config = RelayConfig(micro_batches=2, update="deferred", max_grad_norm=1e-3)
    with relay_of(config) as relay:
        params = list(relay.model.parameters())
        relay.optimizer.register_step_pre_hook(
            lambda *_: norms.append(float(torch.stack([p.grad.norm() for p in params]).norm()))
        )
        relay.step(batch(0))
    assert norms == [pytest.approx(1e-3, rel=1e-3)]


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("update", ["eager", "deferred", "whole"])
def test_a_step_returns_the_norm_of_all_gradients(update: Any, max_norm: float | None) -> None:
    if update == "eager" and max_norm is not None:
        return
    model = Net()
    for part in batch(0)[0].chunk(2):
        (mean_square(model(part)) / 2).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf))
    with relay_of(RelayConfig(micro_batches=2, update=update, max_grad_norm=max_norm)) as relay:
        found = relay.step(batch(0)).grad_norm
    assert found == (expected if max_norm else pytest.approx(expected, rel=1e-6))


def test_a_gradient_out_of_nothing_is_refused() -> None:
    with relay_of(DEFERRED) as relay:
        relay.apply(Freeze(1))
        before = weights(relay.model)

        def gives(*_: Any) -> None:
            for param in relay.model.layers[1].parameters():
                param.grad = torch.ones_like(param)

        relay.optimizer.register_step_pre_hook(gives)
        with pytest.raises(ValueError, match=r"gives layers.1.weight a gradient, and its layer has none"):
            relay.step(batch(0))
        assert equal(relay.model, before)


def test_the_model_and_the_optimizer_have_the_same_parameters() -> None:
    """A hook may set a gradient through either."""
    with relay_of(DEFERRED) as relay:
        assert relay.optimizer.param_groups[0]["params"] == [*relay.model.parameters()]
        given = [torch.full_like(param, 0.5) for param in relay.model.parameters()]

        def gives(optimizer: Optimizer, *_: Any) -> None:
            for param, grad in zip(relay.model.parameters(), given, strict=True):
                param.grad = grad

        relay.optimizer.register_step_pre_hook(gives)
        before = copy.deepcopy(relay.model)
        relay.step(batch(0))
        plain = make(before.parameters())
        for param, grad in zip(before.parameters(), given, strict=True):
            param.grad = grad
        plain.step()
        assert equal(relay.model, weights(before))


def test_arguments_for_step_are_refused() -> None:
    with relay_of(DEFERRED) as relay:
        relay.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, {"closure": None}))
        with pytest.raises(ValueError, match="which a relay calls without arguments"):
            relay.step(batch(0))
        relay.optimizer._optimizer_step_pre_hooks.clear()
        relay.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs))
        relay.step(batch(0))


@pytest.mark.parametrize("which", ["pre", "post"])
def test_what_hooks_change_is_taken_back_with_a_step_that_fails(which: str) -> None:
    """Weights that are trained and frozen ones, settings and state."""
    fails = True

    def hook(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            for param in group["params"]:
                param.data.mul_(0.9)
                if "exp_avg" in optimizer.state[param]:
                    optimizer.state[param]["exp_avg"].zero_()
        if fails:
            raise OSError("on purpose")

    with relay_of(DEFERRED) as relay:
        relay.step(batch(0))
        relay.apply(Freeze(1))
        before, state = weights(relay.model), copy.deepcopy(relay.optimizer.state_dict())
        getattr(relay.optimizer, f"register_step_{which}_hook")(hook)
        with pytest.raises(OSError, match="on purpose"):
            relay.step(batch(1))
        assert equal(relay.model, before) and is_same(relay.optimizer.state_dict(), state)
        fails = False
        relay.step(batch(1))
        assert relay.optimizer.param_groups[0]["lr"] == 0.5e-2 and not equal(relay.model, before)


# -- after the step -----------------------------------------------------------------------------------------------------


def test_a_post_hook_sees_the_gradients_of_deferred_updates() -> None:
    seen: dict[str, list[float]] = {"in core": [], "relay": []}

    def looks(which: str, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.register_step_post_hook(
            lambda *_: seen[which].append(float(sum(p.grad.sum() for p in model.parameters())))
        )

    in_core(partial(looks, "in core"))
    by_relay(partial(looks, "relay"), DEFERRED)
    assert len(seen["relay"]) == 3 and seen["relay"] == seen["in core"]


def test_a_post_hook_may_clear_gradients_and_change_weights() -> None:
    def bounds(model: nn.Module, optimizer: Optimizer) -> None:
        def hook(optimizer: Optimizer, *_: Any) -> None:
            optimizer.zero_grad()
            for param in model.parameters():
                param.data.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(hook)

    assert equal(by_relay(bounds, DEFERRED, device=EmulatedDevice()), in_core(bounds))


def test_weights_that_a_hook_changes_stay_what_they_were_on_other_branches() -> None:
    with relay_of(DEFERRED) as relay:
        relay.step(batch(0))
        relay.apply(Freeze(1))
        before = weights(relay.model)
        relay.fork("aside")

        def zeroes(*_: Any) -> None:
            for param in relay.model.layers[1].parameters():
                param.data.zero_()

        handle = relay.optimizer.register_step_post_hook(zeroes)
        relay.step(batch(1))
        handle.remove()
        assert not relay.model.layers[1].weight.any()
        relay.switch("main")
        assert equal(relay.model, before)


# -- what is no hook of the user's ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_torchs_own_hooks_are_called_once_per_step(config: RelayConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch registers one for all optimizers if a daemon profiles the process."""
    counted: list[str] = []
    monkeypatch.setattr(torch.profiler.KinetoStepTracker, "increment_step", counted.append)
    handle = register_optimizer_step_post_hook(torch.profiler._optimizer_post_hook)
    try:
        with relay_of(config) as relay:
            relay.step(batch(0))
            relay.step(batch(1))
            relay.verify(batch(2))
            assert counted == ["Optimizer"] * 2
            assert equal(relay.model, in_core(nothing, steps=2))
    finally:
        handle.remove()


@pytest.mark.parametrize("config", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_what_wraps_steps_without_hooks_goes_on(config: RelayConfig) -> None:
    """A profiler, schedulers, averages of weights and a gradient scaler around one optimizer."""
    with relay_of(config) as relay, torch.autograd.profiler.profile():
        optimizer = relay.optimizer
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
            torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1, anneal_epochs=2),
        ]
        averaged = torch.optim.swa_utils.AveragedModel(relay.model)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(2):
            relay.step(batch(step))
            averaged.update_parameters(relay.model)
            scaler.update()
            for scheduler in schedulers:
                scheduler.step()
        assert relay.steps == 2 and int(averaged.n_averaged) == 2


def test_forecasts_and_trials_call_no_hooks() -> None:
    fired: Counter[str] = Counter()
    handles = [
        register_optimizer_step_pre_hook(lambda *_: fired.update(["before"])),
        register_optimizer_step_post_hook(lambda *_: fired.update(["after"])),
    ]
    try:
        with relay_of(DEFERRED) as relay:
            assert not fired
            relay.step(batch(0))
            relay.step(batch(1))
            assert fired == {"before": 2, "after": 2}
            relay.verify(batch(2))
            relay.forecast(batch(2), RelayConfig(micro_batches=4))
            assert fired == {"before": 2, "after": 2}
    finally:
        for handle in handles:
            handle.remove()


def test_an_optimizer_made_of_another_one_calls_them_once() -> None:
    """Its `step` calls a `step` that calls hooks by itself."""

    class Twice(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    fired = []
    handle = register_optimizer_step_post_hook(lambda *_: fired.append(1))
    try:
        with Relay(Net(), partial(Twice, lr=0.1), "cpu", loss=mean_square, config=DEFERRED) as relay:
            relay.step(batch(0))
    finally:
        handle.remove()
    assert fired == [1]
