"""Optimizers in a list stay the user's: their hooks, loads, and replaced state, groups and steps count as in a plain loop."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from residual import Net, batch, mean_square
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from l2l_core import Duplicate, FileShelf, Freeze, Relay, RelayConfig
from l2l_core.config import UpdateMode

CONFIG = RelayConfig(micro_batches=2)
Change = Callable[[nn.Module, list[Optimizer]], Any]


def make() -> tuple[nn.Module, list[Optimizer]]:
    """Return a model, and optimizers that share its layers: one for weights, one for biases."""
    model = Net()
    weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    return model, [AdamW(weights, lr=0.05), SGD(biases, lr=0.1, momentum=0.9)]


def train_plainly(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        for part in batch(step)[0].chunk(2):
            (mean_square(model(part)) / 2).backward()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()


def in_core(change: Change, steps: int = 4) -> list[Tensor]:
    """Weights of plain training with a change before the second step, and momenta after it."""
    model, optimizers = make()
    train_plainly(model, optimizers, range(1))
    change(model, optimizers)
    train_plainly(model, optimizers, range(1, steps))
    return results(model, optimizers)


def by_relay(change: Change, config: RelayConfig, steps: int = 4) -> list[Tensor]:
    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=config) as relay:
        relay.step(batch(0))
        change(model, optimizers)
        for step in range(1, steps):
            relay.step(batch(step))
    return results(model, optimizers)


def results(model: nn.Module, optimizers: list[Optimizer]) -> list[Tensor]:
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    states = [each.state.get(p, {}) for each in optimizers for group in each.param_groups for p in group["params"]]
    tensors = [value for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    rates = [torch.tensor(group["lr"]) for each in optimizers for group in each.param_groups]
    return [each.detach().clone() for each in (*params, *tensors, *rates)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# -- step hooks ---------------------------------------------------------------------------------------------------------


def clips_its_gradients(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    return optimizers[0].register_step_pre_hook(lambda its, *_: nn.utils.clip_grad_norm_(params_of(its), 0.01) and None)


def clips_all_gradients_after_another_has_stepped(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    return optimizers[1].register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None)


@torch.no_grad()
def _clamp_weights(optimizer: Optimizer, *_: Any) -> None:
    for param in params_of(optimizer):
        param.clamp_(-0.1, 0.1)


def clamps_weights(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    return optimizers[0].register_step_post_hook(_clamp_weights)


def changes_gradients_of_the_next(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    def hook(*_: Any) -> None:
        for param in params_of(optimizers[1]):
            assert param.grad is not None
            param.grad.mul_(params_of(optimizers[0])[0].detach().mean())

    return optimizers[0].register_step_post_hook(hook)


def before_all_steps(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    return register_optimizer_step_pre_hook(lambda its, *_: nn.utils.clip_grad_norm_(params_of(its), 0.01) and None)


def after_all_steps(model: nn.Module, optimizers: list[Optimizer]) -> Any:
    return register_optimizer_step_post_hook(_clamp_weights)


HOOKS = [
    clips_its_gradients,
    clips_all_gradients_after_another_has_stepped,
    clamps_weights,
    changes_gradients_of_the_next,
    before_all_steps,
    after_all_steps,
]


@pytest.mark.parametrize("update", ["deferred", "whole"])
@pytest.mark.parametrize("registers", HOOKS)
def test_step_hooks_of_one_of_them_train_as_in_a_plain_loop(registers: Change, update: UpdateMode) -> None:
    handles: list[Any] = []

    def register(model: nn.Module, optimizers: list[Optimizer]) -> None:
        handles.append(registers(model, optimizers))

    try:
        theirs = in_core(register)
        handles.pop().remove()
        ours = by_relay(register, replace(CONFIG, update=update))
    finally:
        for handle in handles:
            handle.remove()
    assert equal(ours, theirs)


@pytest.mark.parametrize("registers", HOOKS[:4])
def test_step_hooks_are_refused_with_eager_updates_and_the_remedy_works(registers: Change) -> None:
    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=CONFIG) as relay:
        relay.step(batch(0))
        registers(model, optimizers)
        before = results(model, optimizers)
        with pytest.raises(ValueError, match=r"has a step hook, .*RelayConfig\(update='deferred'\), or remove"):
            relay.step(batch(1))
        assert equal(results(model, optimizers), before)
        assert relay.verify(batch(1)).equal, "which calls no hooks"
        relay.config = replace(CONFIG, update="deferred")
        for step in range(1, 4):
            relay.step(batch(step))
    assert equal(results(model, optimizers), in_core(registers))


def test_a_layer_that_warms_up_is_refused_with_hooks_and_the_remedy_works() -> None:
    model, optimizers = make()
    config = replace(CONFIG, update="deferred")
    with Relay(model, optimizers, "cpu", loss=mean_square, config=config) as relay:
        relay.step(batch(0))
        relay.apply(Duplicate(1, warmup=3))
        handle = clamps_weights(model, optimizers)
        with pytest.raises(ValueError, match="insert it with warmup=0, or use update='deferred' without such hooks"):
            relay.step(batch(1))
        relay.undo()
        relay.apply(Duplicate(1, warmup=0))
        relay.step(batch(1))
        handle.remove()
        assert relay.verify(batch(2)).equal


def test_a_hook_that_fails_leaves_the_old_weights() -> None:
    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=replace(CONFIG, update="deferred")) as relay:
        relay.step(batch(0))
        before = results(model, optimizers)

        def fail(*_: Any) -> None:
            raise ArithmeticError("no step")

        handle = optimizers[1].register_step_pre_hook(fail)  # the first one has stepped already
        with pytest.raises(ArithmeticError, match="no step"):
            relay.step(batch(1))
        handle.remove()
        assert equal(results(model, optimizers), before)
        for step in range(1, 4):
            relay.step(batch(step))
    assert equal(results(model, optimizers), in_core(lambda *_: None))


@pytest.mark.parametrize("update", ["deferred", "whole"])
def test_a_hook_of_the_list_sees_all_gradients_once(update: UpdateMode) -> None:
    """In core: clipping by the norm of all parameters, in the order of the list, before any step."""
    model, optimizers = make()
    for step in range(3):
        for part in batch(step)[0].chunk(2):
            (mean_square(model(part)) / 2).backward()
        nn.utils.clip_grad_norm_([param for each in optimizers for param in params_of(each)], 0.01)
        for each in optimizers:
            each.step()
            each.zero_grad()
    theirs = results(model, optimizers)
    model, optimizers = make()
    calls: list[Any] = []
    with Relay(model, optimizers, "cpu", loss=mean_square, config=replace(CONFIG, update=update)) as relay:
        relay.optimizer.register_step_pre_hook(
            lambda whole, *_: calls.append(nn.utils.clip_grad_norm_(params_of(whole), 0.01))
        )
        relay.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        for step in range(3):
            relay.step(batch(step))
    assert equal(results(model, optimizers), theirs) and len(calls) == 6


# -- what is replaced or loaded -----------------------------------------------------------------------------------------


def resets_state(model: nn.Module, optimizers: list[Optimizer]) -> None:
    optimizers[0].state = defaultdict(dict)


def replaces_groups(model: nn.Module, optimizers: list[Optimizer]) -> None:
    optimizers[1].param_groups = [dict(group, lr=0.01) for group in optimizers[1].param_groups]


def clears_state(model: nn.Module, optimizers: list[Optimizer]) -> None:
    optimizers[1].state.clear()


def loads_a_first_state(model: nn.Module, optimizers: list[Optimizer]) -> None:
    for each, new in zip(optimizers, make()[1], strict=True):
        each.load_state_dict(new.state_dict())


def loads_half_the_rate(model: nn.Module, optimizers: list[Optimizer]) -> None:
    for each in optimizers:
        saved = copy.deepcopy(each.state_dict())
        saved["param_groups"][0]["lr"] *= 0.5
        for state in saved["state"].values():
            for value in state.values():
                value.mul_(0.5)
        each.load_state_dict(saved)


CHANGES = [resets_state, replaces_groups, clears_state, loads_a_first_state, loads_half_the_rate]


@pytest.mark.parametrize("update", ["eager", "deferred", "whole"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_or_loaded_in_one_of_them_counts(change: Change, update: UpdateMode) -> None:
    assert equal(by_relay(change, replace(CONFIG, update=update)), in_core(change))


def ends(verb: str, relay: Relay, folder: Path) -> None:
    if verb == "fork":
        relay.fork("other")
        relay.switch("main")
    elif verb == "apply":
        relay.apply(Freeze(0))
        relay.undo()
    elif verb == "verify":
        assert relay.verify(batch(9)).equal
        relay.evaluate(batch(9))
    elif verb == "save":
        relay.save(folder)


@pytest.mark.parametrize("verb", ["close", "fork", "apply", "verify", "save"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_the_last_step_is_neither_lost_nor_undone(
    change: Change, verb: str, tmp_path: Path
) -> None:
    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=CONFIG) as relay:
        relay.step(batch(0))
        change(model, optimizers)
        ends(verb, relay, tmp_path)
    if verb == "save":
        model, optimizers = make()
        Relay.load(tmp_path, model, optimizers, loss=mean_square, device="cpu").close()
    train_plainly(model, optimizers, range(1, 4))
    assert equal(results(model, optimizers), in_core(change))


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_a_replaced_step_is_refused_and_the_remedy_works(update: UpdateMode) -> None:
    def replaces_step(model: nn.Module, optimizers: list[Optimizer]) -> None:
        old = optimizers[1].step

        def step(closure: Any = None) -> Any:
            result = old(closure)
            _clamp_weights(optimizers[1])
            return result

        optimizers[1].step = step  # type: ignore[method-assign]

    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=replace(CONFIG, update=update)) as relay:
        relay.step(batch(0))
        replaces_step(model, optimizers)
        before = results(model, optimizers)
        with pytest.raises(
            ValueError, match=r"of this SGD was replaced by .*step, which.*RelayConfig\(update='whole'\)"
        ):
            relay.step(batch(1))
        with pytest.raises(
            ValueError, match="step was replaced by .*step, which cannot be called for the in-core side"
        ):
            relay.verify(batch(1))
        assert equal(results(model, optimizers), before)
        relay.config = replace(CONFIG, update="whole")
        for step in range(1, 4):
            relay.step(batch(step))
    assert equal(results(model, optimizers), in_core(replaces_step))


# -- the list as one optimizer ------------------------------------------------------------------------------------------


def test_the_list_saves_loads_and_is_reset_as_one_optimizer() -> None:
    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=CONFIG) as relay:
        whole = relay.optimizer
        relay.step(batch(0))
        saved, weights = copy.deepcopy(whole.state_dict()), copy.deepcopy(model.state_dict())
        relay.step(batch(7))
        optimizers[0].param_groups[0]["lr"] = 3.0
        whole.load_state_dict(saved)
        model.load_state_dict(weights)
        copied = copy.deepcopy(whole)
        assert copied.state_dict().keys() == saved.keys() and len(copied.state) == len(whole.state)
        assert copied.state.keys().isdisjoint(whole.state.keys())
        relay.step(batch(1))
        whole.state = defaultdict(dict)
        assert not optimizers[0].state and not optimizers[1].state
        for step in range(2, 4):
            relay.step(batch(step))
    plain, theirs = make()
    train_plainly(plain, theirs, range(2))
    for each in theirs:
        each.state = defaultdict(dict)
    train_plainly(plain, theirs, range(2, 4))
    assert equal(results(model, optimizers), results(plain, theirs))


def test_what_does_not_fit_the_list_is_refused_and_changes_nothing() -> None:
    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=CONFIG) as relay:
        relay.step(batch(0))
        before = results(model, optimizers)
        with pytest.raises(ValueError, match="add the group to one of the optimizers, and make a new relay"):
            relay.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(ValueError, match=r"1 groups for a list of optimizers that have 2 \(AdamW 1, SGD 1\)"):
            relay.optimizer.load_state_dict(optimizers[0].state_dict())
        other = relay.optimizer.state_dict()
        other["param_groups"][1]["params"] = other["param_groups"][1]["params"][:2]
        with pytest.raises(ValueError, match="a group of 2 parameters, and that of the optimizer has 4"):
            relay.optimizer.load_state_dict(other)
        assert equal(results(model, optimizers), before)


def test_a_step_by_hand_needs_a_gradient_in_the_list_and_keeps_branches() -> None:
    model, optimizers = make()
    with Relay(model, optimizers, "cpu", loss=mean_square, config=CONFIG) as relay:
        relay.step(batch(0))
        with pytest.raises(RuntimeError, match=r"AdamW.step\(\) where no parameter has a gradient would train nothing"):
            optimizers[0].step()
        before = results(model, optimizers)
        relay.fork("other")
        train_plainly(model, optimizers, range(1, 2))
        trained = results(model, optimizers)
        relay.switch("main")
        assert equal(results(model, optimizers), before)
        relay.switch("other")
        assert equal(results(model, optimizers), trained)
    assert equal(trained, in_core(lambda *_: None, steps=2))


def test_a_list_on_a_shelf_trains_as_a_plain_loop(tmp_path: Path) -> None:
    model, optimizers = make()
    with Relay(
        model, optimizers, "cpu", loss=mean_square, config=CONFIG, shelf=FileShelf(folder=tmp_path, memory_bytes=2**20)
    ) as relay:
        relay.step(batch(0))
        replaces_groups(model, optimizers)
        with pytest.raises(RuntimeError, match="shelf"):
            optimizers[0].state_dict()
        for step in range(1, 4):
            relay.step(batch(step))
        ours = {name: value.clone() for name, value in relay.shelf.weights()}
    plain, theirs = make()
    train_plainly(plain, theirs, range(1))
    replaces_groups(plain, theirs)
    train_plainly(plain, theirs, range(1, 4))
    assert all(torch.equal(ours[name], param) for name, param in plain.named_parameters())
