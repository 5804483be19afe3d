"""Partial optimizers: clones over other parameters, updates of some parameters at a time, and the user's step hooks.

A part shares the state of the whole optimizer and gets copies of its settings (`optimizer_settings.py`).
`optimizer_conformance.py` checks that updates in parts give the same bits as one step over all parameters.

The user's hooks are called once per step with all gradients, as in plain training. This needs deferred updates; with eager
updates, hooks are refused. Hooks that PyTorch registers for its profilers read no gradients and are called after every step.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l2l_core._torch import hooks_of_all_optimizers
from l2l_core.eps.blocks import Block, BlockGradient, clear_used_gradients
from l2l_core.eps.optimizers.optimizer_list import OptimizerList, members_of, state_of_groups, with_members
from l2l_core.eps.optimizers.optimizer_settings import (
    SettingChanges,
    changes_of,
    copy_plain,
    copy_settings,
    settings_of,
)

Hook = Callable[..., Any]

_hooks_lock = threading.RLock()  # global hooks are shared by all threads
# Not copied. The last two may be a scheduler's wrappers around the methods.
_PER_INSTANCE = ("param_groups", "defaults", "state", "step", "zero_grad")


def clone_shallow(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """Clone an optimizer over other parameter groups, with copies of the settings and without hooks and wrappers.

    Values that are not plain (a dictionary by parameter, for example) are shared with `optimizer`, as parts need them;
    `clone_deep` shares nothing.
    """
    if isinstance(optimizer, OptimizerList):
        parts = optimizer.split(groups)
        return OptimizerList([clone_shallow(each, own, state_of_groups(own, state)) for each, own in parts])
    clone = object.__new__(type(optimizer))  # the constructor's arguments are unknown

    def copied(value: Any) -> Any:
        is_method = isinstance(value, MethodType) and value.__self__ is optimizer
        return MethodType(value.__func__, clone) if is_method else copy_plain(value)

    return _filled(clone, optimizer, groups, state, copied)


def clone_deep(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Any, counterparts: Mapping[Any, Any]
) -> Optimizer:
    """Clone an optimizer, no list, over other groups, sharing nothing with it, without hooks.

    `groups` and `state` are those of the new parameters; all other values in groups are deep-copied. `counterparts` replace
    objects that the optimizer refers to: parameters, the model.
    """
    clone = object.__new__(type(optimizer))
    memo = {id(old): new for old, new in counterparts.items()} | {id(optimizer): clone}

    def copied(value: Any) -> Any:
        try:
            return copy.deepcopy(value, memo)
        except Exception:  # a lock, a file, a tensor with a graph
            return value

    return _filled(clone, optimizer, groups, state, copied)


def _filled(
    clone: Optimizer, optimizer: Optimizer, groups: list[dict[str, Any]], state: Any, copied: Callable[[Any], Any]
) -> Optimizer:
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            clone.__dict__[name] = OrderedDict()
        elif name not in _PER_INSTANCE:
            clone.__dict__[name] = copied(value)
    clone.defaults = {name: copied(value) for name, value in optimizer.defaults.items()}
    clone.param_groups = [{n: value if n == "params" else copied(value) for n, value in g.items()} for g in groups]
    clone.state = state
    return clone


def replace_params(optimizer: Optimizer, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Make `optimizer` update `new[p]` instead of `p`; groups, order and state are kept."""
    for each in members_of(optimizer):
        for group in each.param_groups:
            group["params"] = [new.get(param, param) for param in group["params"]]
        for old, param in new.items():
            if old in each.state:
                each.state[param] = each.state.pop(old)


def refuse_other_params(held: Container[nn.Parameter], optimizer: Optimizer) -> None:
    """Make the optimizer's state refuse to make entries for parameters that are not in `held`, which may change later."""
    optimizer.state = _StateOfMasters(held, optimizer.state)


class _StateOfMasters(defaultdict[Any, Any]):
    """State of an optimizer over masters.

    A plain one would make an empty entry for ``optimizer.state[p]`` of a model's parameter, and fail in ``state_dict()``.
    """

    def __init__(self, held: Container[nn.Parameter], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._held = held

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, nn.Parameter) and key not in self._held:
            raise RuntimeError(
                f"optimizer.state has no entry for a parameter of shape {tuple(key.shape)}: with a shelf or several workers the "
                "optimizer has masters in place of the model's parameters. With workers, read "
                "`with relay.gathered(): relay.optimizer.state_dict()['state']`, whose keys are the places of the parameters in "
                "the groups; with a shelf, the state is in its files, and relay.save(folder) copies it"
            )
        return super().__missing__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))


def restrict_optimizer(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> Optimizer:
    """Return a part of `optimizer` for some of its parameters, with shared state and copied settings."""
    if isinstance(optimizer, OptimizerList):
        return OptimizerList([restrict_optimizer(each, params) for each in optimizer.optimizers])
    wanted = set(params)  # keep empty groups: parts and the whole are matched by group
    groups = [{**g, "params": [p for p in g["params"] if p in wanted]} for g in optimizer.param_groups]
    part = clone_shallow(optimizer, groups, optimizer.state)
    manager: Any = vars(part).get("mng")
    if hasattr(manager, "index2config"):
        # bitsandbytes keeps overrides by place in a group, where parts have other parameters. Each finds its own by identity
        manager = part.__dict__["mng"] = copy.copy(manager)
        manager.index2config = {}
    return part


def scale_lr(part: Optimizer, factor: float) -> None:
    """Multiply the learning rate of every group, until settings are copied again."""
    if factor != 1.0:
        for group in part.param_groups:
            if group["lr"] is not None:  # None: computed by the step (Adafactor with relative_step)
                group["lr"] = group["lr"] * factor


def update_part(part: Optimizer, whole: Optimizer, lr_factor: float = 1.0) -> SettingChanges:
    """Update the parameters of a part, at `lr_factor` times the learning rate.

    Returns the part's changes of the settings, for `apply_changes` after all parts of the step.
    """
    copy_settings(whole, part)
    scale_lr(part, lr_factor)
    given = settings_of(part)  # after scaling, which is not a change by the part
    step_part(part)
    changes = changes_of(part, given)
    # A learning rate derived from a scaled one is not a change of the whole
    return changes if lr_factor == 1.0 else {place: value for place, value in changes.items() if place[1] != "lr"}


def user_hooks(optimizer: Optimizer) -> list[Hook]:
    """Return the user's step hooks, of this optimizer, of those in a list, and of all optimizers."""
    found = (hook for each in with_members(optimizer) for hooks in _hooks(each) for hook in hooks)
    return [hook for hook in dict.fromkeys(found) if not _is_torchs(hook)]


def hooks_take_turns(optimizer: Optimizer) -> bool:
    """Return whether hooks must run between the steps of a list's optimizers, so that these step as a whole."""
    return isinstance(optimizer, OptimizerList) and any(user_hooks(each) for each in optimizer.optimizers)


def check_hooks(optimizer: Optimizer, blocks: Sequence[Block], deferred: bool) -> None:
    """Refuse the user's hooks if they cannot be called with all gradients.

    Raises:
        ValueError: weights are not float32, or updates are eager.
    """
    names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in user_hooks(optimizer)]
    rounded = [block for block in blocks if not block.in_bytes and block.values.dtype != torch.float32]
    if names and rounded:
        raise ValueError(
            f"the step hook {names[0]} would see {rounded[0].values.dtype} weights ({rounded[0].key}) with float32 gradients, "
            "which PyTorch does not allow: remove the hook, or leave the model in float32, where the optimizer rounds weights "
            "to the same values"
        )
    if names and not deferred:
        raise ValueError(
            f"the optimizer has a step hook, {names[0]}, which needs all gradients at once. With update='eager' each layer is "
            "updated as soon as its gradient arrives. Use RelayConfig(update='deferred'), or "
            "remove the hook; to clip gradients, set max_grad_norm. Nothing has been trained"
        )


def check_own_step(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose `step` was replaced on the object: parts use the method of the class.

    Raises:
        ValueError: it was wrapped, compiled or replaced, by others than a learning rate scheduler.
    """
    for each in with_members(optimizer):
        if name := _replaced_step(each):
            raise ValueError(
                f"optimizer.step of this {type(each).__name__} was replaced by {name}, which updates of one layer at a time do "
                "not call. RelayConfig(update='whole') calls it once per step, when all gradients are there; to clip gradients, "
                "RelayConfig(update='deferred', max_grad_norm=...) is enough. Nothing has been trained"
            )


def replaced_step(optimizer: Optimizer) -> str:
    """Return the name of what replaces `step` on the object; empty if nothing does, or only a learning rate scheduler.

    Of a list, also what replaces that of an optimizer in it.
    """
    return next(filter(None, map(_replaced_step, with_members(optimizer))), "")


def _replaced_step(optimizer: Optimizer) -> str:
    step = vars(optimizer).get("step")
    if hasattr(step, "_wrapped_by_lr_sched"):
        step = getattr(step, "__wrapped__", None)
    step = getattr(step, "__func__", step) if getattr(step, "__self__", optimizer) is optimizer else step  # put back
    return "" if step is None or step is type(optimizer).step else getattr(step, "__qualname__", repr(step))


def _do_nothing() -> None:
    pass


class StepGuard:
    """Hook on a relay's optimizer, and those in a list, that lets users step only if there are gradients.

    Args:
        before_write: called before a step that changes weights.

    Attributes:
        is_active: False while the relay itself takes a step of the whole optimizer.
    """

    def __init__(self, optimizer: Optimizer, before_write: Callable[[], None]) -> None:
        self._before_write, self.is_active = before_write, True
        self._members = members_of(optimizer)
        self._handles = [each.register_step_pre_hook(self) for each in with_members(optimizer)]

    def remove(self) -> None:
        """Remove the hooks, and drop the references to `before_write` and the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._before_write, self._members = _do_nothing, ()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_active:
            return
        # Those of the whole list: in a plain loop, one of its optimizers may have nothing to train
        params = [param for each in self._members for group in each.param_groups for param in group["params"]]
        clear_used_gradients(params)
        has_closure = any(given is not None for given in (*args[1:], *kwargs.values()))  # it makes the gradients
        if not has_closure and all(param.grad is None for param in params):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() where no parameter has a gradient would train nothing: relay.step(batch) has "
                "updated every layer already. Leave optimizer.step() out of the loop, and zero_grad(); to clip gradients, "
                "RelayConfig(update='deferred', max_grad_norm=...). Where a framework calls it, use the RelayTrainer or "
                "RelayStrategy of l2l_core.integrations"
            )
        self._before_write()


def call_before(optimizer: Optimizer, blocks: Sequence[Block], gradients: dict[Block, BlockGradient]) -> None:
    """Call the hooks before a step, and store the gradients that they leave in `gradients`.

    Raises:
        ValueError: a hook sets a gradient that the step does not have, or returns arguments.
    """
    with _grads_set(blocks, gradients):
        for hook in _hooks(optimizer)[0]:
            result = hook(optimizer, (optimizer,), {})
            if result is not None and not (isinstance(result, tuple) and result == ((optimizer,), {})):
                raise ValueError(
                    f"a step hook returns {result!r} for step(), which a relay calls without arguments: return None"
                )
        for block in blocks:
            gradient = gradients.get(block)
            places, given = (gradient.all_views, gradient.views()) if gradient is not None else ({}, {})
            rows = enumerate(zip(block.names, block.params, strict=True))
            has_grad = [_collect_grad(*row, given.get(i), places.get(i)) for i, row in rows]
            if gradient is not None:
                gradients[block] = replace(gradient, covers=tuple(has_grad[i] for i in gradient.trained.indices))


def call_after(optimizer: Optimizer, blocks: Sequence[Block], gradients: Mapping[Block, BlockGradient]) -> None:
    """Call the hooks after a step, with its gradients."""
    with _grads_set(blocks, gradients):
        for hook in _hooks(optimizer)[1]:
            hook(optimizer, (optimizer,), {})


def call_torchs(optimizer: Optimizer) -> None:
    """Call the hooks that PyTorch itself has registered for all optimizers, before and after a step."""
    for hook in (hook for hooks in _hooks(optimizer) for hook in hooks if _is_torchs(hook)):
        hook(optimizer, (optimizer,), {})


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Disable step hooks inside the block: the optimizer's, those of a list's members, and those of all optimizers."""
    owners = with_members(optimizer)
    own = [hooks for each in owners for hooks in (each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks)]
    hooks = [*own, *hooks_of_all_optimizers()]
    saved = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()  # in place: handles that remove hooks refer to this dictionary
    try:
        yield
    finally:
        for each, old in zip(hooks, saved, strict=True):
            each.update(old)


def step_part(part: Optimizer) -> None:
    """Step a part without the hooks of all optimizers, which are called once for the whole optimizer."""
    if not any(hooks_of_all_optimizers()):
        part.step()
        return
    with _hooks_lock, without_step_hooks(part):
        part.step()


def _hooks(optimizer: Optimizer) -> tuple[list[Hook], list[Hook]]:
    """Return the hooks before a step and those after it, in PyTorch's order."""
    own = (hook for hook in optimizer._optimizer_step_pre_hooks.values() if not isinstance(hook, StepGuard))
    before = [*hooks_of_all_optimizers()[0].values(), *own]
    after = [*optimizer._optimizer_step_post_hooks.values(), *hooks_of_all_optimizers()[1].values()]
    return before, after


def _is_torchs(hook: Hook) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")


@contextmanager
def _grads_set(blocks: Sequence[Block], gradients: Mapping[Block, BlockGradient]) -> Iterator[None]:
    """Set `grad` of the parameters, which point to their masters, as in plain training."""
    try:
        for block in blocks:
            grads = gradients[block].views() if block in gradients else {}
            for i, param in enumerate(block.params):
                param.grad = grads.get(i)
        yield
    finally:
        for block in blocks:
            for param in block.params:
                param.grad = None  # a view of a buffer that will be reused


def _collect_grad(name: str, param: nn.Parameter, given: Tensor | None, place: Tensor | None) -> bool:
    """Copy a gradient that a hook has replaced to its place; return whether the parameter has a gradient."""
    grad = param.grad
    if grad is None:
        return False
    if place is None:
        raise ValueError(
            f"a step hook gives {name} a gradient, and its layer has none in this step (it is frozen or unused): change only "
            "existing gradients"
        )
    if grad is not given:
        place.copy_(grad)
    return True
