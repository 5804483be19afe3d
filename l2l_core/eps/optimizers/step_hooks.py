"""Step hooks of the user's optimizer: called once per step of deferred updates, with all gradients there, as in plain training.

With eager updates all gradients are never there at once, so hooks are refused. Hooks that PyTorch registers for its profilers
read no gradients: they are called after every step.
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

_hooks_lock = threading.RLock()  # PyTorch keeps the hooks of all optimizers for all threads


def user_hooks(optimizer: Optimizer) -> list[Hook]:
    """List the hooks around a step of the optimizer that the user has registered, for it or for all optimizers."""
    return [hook for hooks in _hooks(optimizer) for hook in hooks if not _is_torchs(hook)]


def check_hooks(optimizer: Optimizer, blocks: Sequence[Block], deferred: bool) -> None:
    """Refuse the user's hooks if they cannot be called with all gradients.

    Raises:
        ValueError: weights are not of float32, or updates are eager.
    """
    names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in user_hooks(optimizer)]
    rounded = [block for block in blocks if block.values.dtype != torch.float32]
    if names and rounded:
        raise ValueError(
            f"the step hook {names[0]} would see weights of {rounded[0].values.dtype} ({rounded[0].key}) with gradients of "
            "float32, which PyTorch does not pair: remove the hook, or leave the model in float32, in which the optimizer "
            "rounds weights to the same values"
        )
    if names and not deferred:
        raise ValueError(
            f"the optimizer has a step hook, {names[0]}, which is to be called when all gradients are there. With update='eager' "
            "they never are: each layer is updated as soon as its gradient arrives. Use RelayConfig(update='deferred'), or "
            "remove the hook; to clip gradients, set max_grad_norm. Nothing has been trained"
        )


def call_before(optimizer: Optimizer, masters: Masters, whole: dict[Block, BlockGradient]) -> None:
    """Call the hooks before a step. Afterwards `whole` has the gradients that they have left.

    Args:
        masters: the optimizer's parameters of every block, in the order of the block's own.
        whole: the gradients of the step.

    Raises:
        ValueError: a hook gives a gradient to a parameter that has none, or two to one, or arguments to `step`.
    """
    with _in_place(masters, whole):
        for hook in _hooks(optimizer)[0]:
            result = hook(optimizer, (optimizer,), {})
            if result is not None and not (isinstance(result, tuple) and result == ((optimizer,), {})):
                raise ValueError(
                    f"a step hook returns {result!r} for step(), which a relay calls without arguments: return None"
                )
        for block, params in masters.items():
            places = whole[block].all_views if block in whole else {}
            given = whole[block].views() if block in whole else {}
            rows = enumerate(zip(block.names, block.params, params, strict=True))
            left = [_take_back(*row, given.get(i), places.get(i)) for i, row in rows]
            if block in whole:
                whole[block] = replace(whole[block], covers=tuple(left[i] for i in whole[block].trained.indices))


def call_after(optimizer: Optimizer, masters: Masters, whole: Mapping[Block, BlockGradient]) -> None:
    """Call the hooks after a step, with the gradients that it had."""
    with _in_place(masters, whole):
        for hook in _hooks(optimizer)[1]:
            hook(optimizer, (optimizer,), {})


def call_torchs(optimizer: Optimizer) -> None:
    """Call the hooks that PyTorch itself has registered for all optimizers, before and after a step."""
    for hook in (hook for hooks in _hooks(optimizer) for hook in hooks if _is_torchs(hook)):
        hook(optimizer, (optimizer,), {})


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Call no step hooks in the block, neither the optimizer's nor those of all optimizers."""
    hooks = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        *hooks_of_all_optimizers(),
    ]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()  # not another dictionary: handles that remove hooks point to this one
    try:
        yield
    finally:
        for each, known in zip(hooks, kept, strict=True):
            each.update(known)


def step_part(part: Optimizer) -> None:
    """Take a part's step without calling hooks of all optimizers: these are called once, for the whole."""
    if not any(hooks_of_all_optimizers()):
        part.step()
        return
    with _hooks_lock, without_step_hooks(part):
        part.step()


def _hooks(optimizer: Optimizer) -> tuple[list[Hook], list[Hook]]:
    """List the hooks before a step and those after it, in the order in which PyTorch calls them."""
    before = [*hooks_of_all_optimizers()[0].values(), *optimizer._optimizer_step_pre_hooks.values()]
    after = [*optimizer._optimizer_step_post_hooks.values(), *hooks_of_all_optimizers()[1].values()]
    return before, after


def _is_torchs(hook: Hook) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")


@contextmanager
def _in_place(masters: Masters, whole: Mapping[Block, BlockGradient]) -> Iterator[None]:
    """Put masters and gradients into the model's parameters and the optimizer's, as plain training has them."""
    held = [(param, param.data) for block in masters for param in block.params]
    try:
        for block, params in masters.items():
            grads = whole[block].views() if block in whole else {}
            for i, (param, master, view) in enumerate(zip(block.params, params, block.views, strict=True)):
                param.data = view  # before `grad`, which PyTorch takes in the type of the data only
                param.grad = master.grad = grads.get(i)
        yield
    finally:
        for param in (param for block, params in masters.items() for param in (*block.params, *params)):
            param.grad = None  # a view of a buffer that the next step uses
        for param, data in held:
            param.data = data


def _take_back(
    name: str, param: nn.Parameter, master: nn.Parameter, given: Tensor | None, place: Tensor | None
) -> bool:
    """Copy a gradient that a hook has exchanged to its place; return whether the parameter has one."""
    new = {id(each.grad): each.grad for each in (master, param) if each.grad is not given}
    if len(new) > 1:
        raise ValueError(
            f"a step hook gives {name} one gradient through the optimizer and another one through the model: set it in one place"
        )
    grad = next(iter(new.values()), given)
    if grad is not None and place is None:
        raise ValueError(
            f"a step hook gives {name} a gradient, and its layer has none in this step (it is frozen or sits out): change only "
            "gradients that are there"
        )
    if new and grad is not None:
        place.copy_(grad)  # type: ignore[union-attr]
    return grad is not None
