"""The user's step hooks, called once per step with all gradients, as in plain training.

This needs deferred updates; with eager updates, hooks are refused. Hooks that PyTorch registers for its profilers read no
gradients and are called after every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l2l_core._torch import hooks_of_all_optimizers
from l2l_core.eps.blocks import Block, BlockGradient

Hook = Callable[..., Any]
Masters = Mapping[Block, Sequence[nn.Parameter]]

_hooks_lock = threading.RLock()  # global hooks are shared by all threads


def user_hooks(optimizer: Optimizer) -> list[Hook]:
    """Return the user's step hooks, of this optimizer and of all optimizers."""
    return [hook for hooks in _hooks(optimizer) for hook in hooks if not _is_torchs(hook)]


def check_hooks(optimizer: Optimizer, blocks: Sequence[Block], deferred: bool) -> None:
    """Refuse the user's hooks if they cannot be called with all gradients.

    Raises:
        ValueError: weights are not float32, or updates are eager.
    """
    names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in user_hooks(optimizer)]
    rounded = [block for block in blocks if block.values.dtype != torch.float32]
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


def call_before(optimizer: Optimizer, masters: Masters, gradients: dict[Block, BlockGradient]) -> None:
    """Call the hooks before a step, and store the gradients that they leave in `gradients`.

    Raises:
        ValueError: a hook sets a gradient that the step does not have, sets two for one parameter, or returns arguments.
    """
    with _in_place(masters, gradients):
        for hook in _hooks(optimizer)[0]:
            result = hook(optimizer, (optimizer,), {})
            if result is not None and not (isinstance(result, tuple) and result == ((optimizer,), {})):
                raise ValueError(
                    f"a step hook returns {result!r} for step(), which a relay calls without arguments: return None"
                )
        for block, params in masters.items():
            gradient = gradients.get(block)
            places, given = (gradient.all_views, gradient.views()) if gradient is not None else ({}, {})
            rows = enumerate(zip(block.names, block.params, params, strict=True))
            has_grad = [_collect_grad(*row, given.get(i), places.get(i)) for i, row in rows]
            if gradient is not None:
                gradients[block] = replace(gradient, covers=tuple(has_grad[i] for i in gradient.trained.indices))


def call_after(optimizer: Optimizer, masters: Masters, gradients: Mapping[Block, BlockGradient]) -> None:
    """Call the hooks after a step, with its gradients."""
    with _in_place(masters, gradients):
        for hook in _hooks(optimizer)[1]:
            hook(optimizer, (optimizer,), {})


def call_torchs(optimizer: Optimizer) -> None:
    """Call the hooks that PyTorch itself has registered for all optimizers, before and after a step."""
    for hook in (hook for hooks in _hooks(optimizer) for hook in hooks if _is_torchs(hook)):
        hook(optimizer, (optimizer,), {})


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Disable step hooks inside the block, the optimizer's and those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
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
    before = [*hooks_of_all_optimizers()[0].values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*optimizer._optimizer_step_post_hooks.values(), *hooks_of_all_optimizers()[1].values()]
    return before, after


def _is_torchs(hook: Hook) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")


@contextmanager
def _in_place(masters: Masters, gradients: Mapping[Block, BlockGradient]) -> Iterator[None]:
    """Set data and `grad` of the model's and the optimizer's parameters as in plain training."""
    saved = [(param, param.data) for block in masters for param in block.params]
    try:
        for block, params in masters.items():
            grads = gradients[block].views() if block in gradients else {}
            for i, (param, master, view) in enumerate(zip(block.params, params, block.views, strict=True)):
                param.data = view  # before `grad`, whose dtype must be that of the data
                param.grad = master.grad = grads.get(i)
        yield
    finally:
        for param in (param for block, params in masters.items() for param in (*block.params, *params)):
            param.grad = None  # a view of a buffer that will be reused
        for param, data in saved:
            param.data = data


def _collect_grad(
    name: str, param: nn.Parameter, master: nn.Parameter, given: Tensor | None, place: Tensor | None
) -> bool:
    """Copy a gradient that a hook has replaced to its place; return whether the parameter has a gradient."""
    new = {id(each.grad): each.grad for each in (master, param) if each.grad is not given}
    if len(new) > 1:
        raise ValueError(
            f"a step hook gives {name} one gradient through the optimizer and another one through the model: set it in one place"
        )
    grad = next(iter(new.values()), given)
    if grad is None:
        return False
    if place is None:
        raise ValueError(
            f"a step hook gives {name} a gradient, and its layer has none in this step (it is frozen or unused): change only "
            "existing gradients"
        )
    if new:
        place.copy_(grad)
    return True
