"""Step hooks of optimizers see what they see in plain training, once per step, or are refused before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from l2l_core import EmulatedDevice, Freeze, Relay, RelayConfig, TornStep

EAGER = RelayConfig(micro_batches=2)
DEFERRED = RelayConfig(micro_batches=2, update="deferred")
KEPT_WHOLE = RelayConfig(micro_batches=2, rollback=True)
Hook = Callable[..., Any]
make = partial(AdamW, lr=1e-2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def batch(step: int) -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(step)),)


def mean_square(outputs: Tensor, batch: Any = None) -> Tensor:
    return outputs.square().mean()


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


def hides_its_errors(model: nn.Module, optimizer: Optimizer) -> Any:
    def hook(*_: Any) -> None:
        try:
            torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)
        except Exception:
            pass

    return optimizer.register_step_pre_hook(hook)


PRE_HOOKS = [clips_by_the_optimizer, clips_by_the_model, replaces_gradients, decays_weights, hides_its_errors]


@pytest.mark.parametrize("config", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_a_hook_that_sets_the_rate_works_in_both_kinds_of_updates(config: RelayConfig) -> None:
    assert equal(by_relay(sets_the_rate, config), in_core(sets_the_rate))


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


@pytest.mark.parametrize("register", PRE_HOOKS)
def test_a_hook_that_needs_gradients_is_refused_before_an_eager_step(register: Any) -> None:
    with relay_of(EAGER) as relay:
        relay.step(batch(0))
        before, rate = weights(relay.model), relay.optimizer.param_groups[0]["lr"]
        handle = register(relay.model, relay.optimizer)
        with pytest.raises(
            ValueError, match=r"pre-hook .*(touches the gradient of|changes weights of) .*update='deferred'"
        ):
            relay.step(batch(1))
        assert equal(relay.model, before) and relay.steps == 1 and relay.optimizer.param_groups[0]["lr"] == rate
        relay.config = DEFERRED
        relay.step(batch(1))
        handle.remove()
        relay.config = EAGER
        relay.step(batch(2))


def test_gradients_of_others_are_nobodys_business() -> None:
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    with relay_of(EAGER) as relay:
        relay.optimizer.register_step_pre_hook(lambda *_: other.grad.mul_(2) and None)  # type: ignore[union-attr, func-returns-value]
        with pytest.raises(RuntimeError, match="Boolean value"):
            relay.step(batch(0))
    assert float(other.grad[0]) == 2.0


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


def test_two_gradients_for_one_weight_are_refused() -> None:
    with relay_of(DEFERRED) as relay:

        def gives(optimizer: Optimizer, *_: Any) -> None:
            for param in (*relay.model.parameters(), *optimizer.param_groups[0]["params"]):
                param.grad = torch.ones_like(param)

        relay.optimizer.register_step_pre_hook(gives)
        with pytest.raises(ValueError, match="another one through the model"):
            relay.step(batch(0))


def test_arguments_for_step_are_refused() -> None:
    with relay_of(EAGER) as relay:
        relay.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, {"closure": None}))
        with pytest.raises(ValueError, match="as arguments of step"):
            relay.step(batch(0))
        relay.optimizer._optimizer_step_pre_hooks.clear()
        relay.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: (args, kwargs))
        relay.step(batch(0))


@pytest.mark.parametrize("config", [EAGER, DEFERRED, KEPT_WHOLE], ids=["eager", "deferred", "rollback"])
def test_what_hooks_make_of_settings_is_taken_back_with_a_step_that_fails(config: RelayConfig) -> None:
    with relay_of(config) as relay:
        sets_the_rate(relay.model, relay.optimizer)
        with pytest.raises(FloatingPointError):
            relay.step((torch.full((8, 6), torch.inf),))
        assert relay.optimizer.param_groups[0]["lr"] == 1e-2
        relay.step(batch(0))
        assert relay.optimizer.param_groups[0]["lr"] == 0.5e-2


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


def test_a_post_hook_that_looks_for_gradients_of_eager_updates_is_told() -> None:
    def looks(*_: Any) -> None:
        assert all(p.grad is None for p in relay.model.parameters())

    with relay_of(EAGER) as relay:
        relay.optimizer.register_step_post_hook(looks)
        with pytest.raises(TornStep, match=r"post-hook .* touches the gradient .*update='deferred'"):
            relay.step(batch(0))
    with relay_of(KEPT_WHOLE) as relay:
        before = weights(relay.model)
        relay.optimizer.register_step_post_hook(looks)
        with pytest.raises(ValueError, match="post-hook"):
            relay.step(batch(0))
        assert equal(relay.model, before) and relay.steps == 0


@pytest.mark.parametrize("config", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_a_post_hook_may_clear_gradients_and_change_weights(config: RelayConfig) -> None:
    def bounds(model: nn.Module, optimizer: Optimizer) -> None:
        def hook(optimizer: Optimizer, *_: Any) -> None:
            optimizer.zero_grad()
            for param in model.parameters():
                param.data.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(hook)

    assert equal(by_relay(bounds, config, device=EmulatedDevice()), in_core(bounds))


@pytest.mark.parametrize("config", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_weights_that_a_hook_changes_stay_what_they_were_on_other_branches(config: RelayConfig) -> None:
    with relay_of(config) as relay:
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


# -- hooks of all optimizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [EAGER, DEFERRED], ids=["eager", "deferred"])
def test_hooks_of_all_optimizers_fire_once_per_step(config: RelayConfig) -> None:
    fired: Counter[str] = Counter()
    handles = [
        register_optimizer_step_pre_hook(lambda *_: fired.update(["before"])),
        register_optimizer_step_post_hook(lambda *_: fired.update(["after"])),
    ]
    try:
        with relay_of(config) as relay:
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


def test_a_hook_of_all_optimizers_that_reads_gradients_is_refused_too() -> None:
    def reads(optimizer: Optimizer, *_: Any) -> None:
        sum(p.grad.sum() for group in optimizer.param_groups for p in group["params"])

    handle = register_optimizer_step_pre_hook(reads)
    try:
        with relay_of(EAGER) as relay, pytest.raises(ValueError, match="update='deferred'"):
            relay.step(batch(0))
    finally:
        handle.remove()


def test_an_optimizer_made_of_another_one_fires_them_once() -> None:
    """Its `step` calls a `step` that fires hooks by itself."""

    class Twice(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    fired = []
    handle = register_optimizer_step_post_hook(lambda *_: fired.append(1))
    try:
        with Relay(Net(), partial(Twice, lr=0.1), "cpu", loss=mean_square, config=EAGER) as relay:
            relay.step(batch(0))
    finally:
        handle.remove()
    assert fired == [1]
