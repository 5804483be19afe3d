"""The way back for values that others may write into: containers, tensors and random generators keep who they are.

A deep copy would be another object, and whoever holds the first one would not see it come back. So what is kept is what
each object held, and it is written into that object again. What it is not: a walk through everything. Modules,
parameters and objects of other classes are held by reference, and what they hold is theirs.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

PutBack = Callable[[], None]

_MODULES_OWN = frozenset(vars(nn.Module())) - {"training"}  # parameters and buffers have keepers of their own
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))


def keep(value: Any, memo: dict[int, Any] | None = None) -> PutBack:
    """Copy what `value` holds, at any depth; the result writes it back, into the same objects."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return _nothing  # it is in here twice
    memo[id(value)] = value  # held, so that no other object gets its id
    if isinstance(value, torch.Tensor):
        return _keep_tensor(value)
    if isinstance(value, dict):
        return _keep_items(value, list(value.items()), lambda items: _fill(value, items), memo)
    if isinstance(value, list | deque):
        return _keep_items(value, list(enumerate(value)), lambda items: value.extend(item for _, item in items), memo)
    if isinstance(value, set):
        return _keep_items(value, [], lambda _, items=frozenset(value): value.update(items), memo)
    if isinstance(value, tuple):
        return _all_of([keep(item, memo) for item in value])
    return _keep_generator(value)


def keep_attributes(modules: Iterable[nn.Module]) -> PutBack:
    """Keep the plain attributes of modules, `training` among them, and their hooks.

    What a forward counts or notes there comes back. So does the note that it has installed hooks, as models of transformers
    do once: hooks that stayed would be installed a second time.
    """
    memo: dict[int, Any] = {}
    back = []
    for module in modules:
        back.append(_keep_names(vars(module), vars(module).keys() - _MODULES_OWN, memo, _MODULES_OWN))
        back += [_keep_hooks(hooks) for name in _HOOKS if (hooks := vars(module).get(name)) is not None]
    return _all_of(back)


def keep_without(held: dict[str, Any], left_out: Collection[str]) -> PutBack:
    """Keep a dictionary but for some of its entries."""
    return _keep_names(held, held.keys() - left_out, {}, left_out)


def _keep_names(
    held: dict[str, Any], names: Collection[str], memo: dict[int, Any], left_out: Collection[str]
) -> PutBack:
    kept = {name: held[name] for name in names}
    inner = [keep(value, memo) for value in kept.values()]

    def put_back() -> None:
        for name in held.keys() - kept.keys() - set(left_out):
            del held[name]
        for name, value in kept.items():
            if held.get(name, _nothing) is not value:
                held[name] = value
        _all_of(inner)()

    return put_back


def _keep_hooks(hooks: dict[int, Any]) -> PutBack:
    kept = list(hooks.items())

    def put_back() -> None:
        if list(hooks.items()) != kept:
            hooks.clear()
            _fill(hooks, kept)

    return put_back


def _keep_items(
    holder: Any, items: list[tuple[Any, Any]], fill: Callable[[list[tuple[Any, Any]]], None], memo: dict[int, Any]
) -> PutBack:
    inner = [keep(item, memo) for _, item in items]

    def put_back() -> None:
        holder.clear()
        fill(items)
        _all_of(inner)()

    return put_back


def _fill(held: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    for key, item in items:  # not `update`, which adds in a Counter
        held[key] = item


def _keep_tensor(tensor: torch.Tensor) -> PutBack:
    if isinstance(tensor, nn.Parameter) or not _is_writable(tensor):
        return _nothing
    value = tensor.detach().clone()

    def put_back() -> None:
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            tensor.data = value.clone()  # it was resized, or cast: the object stays
        elif not torch.equal(tensor, value):  # writing the same would still count up the version of the tensor
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # its tensors are refused outside of it
                tensor.copy_(value)

    return put_back


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether a copy can be written into it: an expanded tensor has fewer places than elements."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized or 0 in tensor.stride())


def _keep_generator(value: Any) -> PutBack:
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        state: Any = value.get_state()
        return lambda: value.set_state(state)  # type: ignore[return-value]
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        state = value.get_state()
        return lambda: value.set_state(state)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state)
    if numpy is not None and isinstance(value, numpy.ndarray):
        array = value.copy()
        return lambda: numpy.copyto(value, array)
    return _nothing


def _all_of(many: list[PutBack]) -> PutBack:
    def put_back() -> None:
        for each in many:
            each()

    return put_back


def _nothing() -> None:
    """There is nothing that could have changed."""
