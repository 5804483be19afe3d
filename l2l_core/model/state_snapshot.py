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

Restore = Callable[[], None]

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}  # parameters and buffers have keepers of their own
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))


def snapshot_value(value: Any, memo: dict[int, Any] | None = None) -> Restore:
    """Copy what `value` holds, at any depth; the result writes it back, into the same objects."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return _restore_nothing  # it is in here twice
    memo[id(value)] = value  # held, so that no other object gets its id
    if isinstance(value, torch.Tensor):
        return _snapshot_tensor(value)
    if isinstance(value, dict):
        return _snapshot_items(value, list(value.items()), lambda items: _fill(value, items), memo)
    if isinstance(value, list | deque):
        return _snapshot_items(
            value, list(enumerate(value)), lambda items: value.extend(item for _, item in items), memo
        )
    if isinstance(value, set):
        return _snapshot_items(value, [], lambda _, items=frozenset(value): value.update(items), memo)
    if isinstance(value, tuple):
        return _restore_all([snapshot_value(item, memo) for item in value])
    return _snapshot_generator(value)


def snapshot_attributes(modules: Iterable[nn.Module]) -> Restore:
    """Keep the plain attributes of modules, `training` among them, and their hooks.

    What a forward counts or notes there comes back. So does the note that it has installed hooks, as models of transformers
    do once: hooks that stayed would be installed a second time.
    """
    memo: dict[int, Any] = {}
    back = []
    for module in modules:
        back.append(_snapshot_names(vars(module), vars(module).keys() - _MODULE_INTERNALS, memo, _MODULE_INTERNALS))
        back += [_snapshot_hooks(hooks) for name in _HOOKS if (hooks := vars(module).get(name)) is not None]
    return _restore_all(back)


def snapshot_except(held: dict[str, Any], excluded: Collection[str]) -> Restore:
    """Keep a dictionary but for some of its entries."""
    return _snapshot_names(held, held.keys() - excluded, {}, excluded)


def _snapshot_names(
    held: dict[str, Any], names: Collection[str], memo: dict[int, Any], excluded: Collection[str]
) -> Restore:
    kept = {name: held[name] for name in names}
    inner = [snapshot_value(value, memo) for value in kept.values()]

    def put_back() -> None:
        for name in held.keys() - kept.keys() - set(excluded):
            del held[name]
        for name, value in kept.items():
            if held.get(name, _restore_nothing) is not value:
                held[name] = value
        _restore_all(inner)()

    return put_back


def _snapshot_hooks(hooks: dict[int, Any]) -> Restore:
    kept = list(hooks.items())

    def put_back() -> None:
        if list(hooks.items()) != kept:
            hooks.clear()
            _fill(hooks, kept)

    return put_back


def _snapshot_items(
    holder: Any, items: list[tuple[Any, Any]], fill: Callable[[list[tuple[Any, Any]]], None], memo: dict[int, Any]
) -> Restore:
    inner = [snapshot_value(item, memo) for _, item in items]

    def put_back() -> None:
        holder.clear()
        fill(items)
        _restore_all(inner)()

    return put_back


def _fill(held: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    for key, item in items:  # not `update`, which adds in a Counter
        held[key] = item


def _snapshot_tensor(tensor: torch.Tensor) -> Restore:
    if isinstance(tensor, nn.Parameter) or not _is_writable(tensor):
        return _restore_nothing
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


def _snapshot_generator(value: Any) -> Restore:
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
    return _restore_nothing


def _restore_all(many: list[Restore]) -> Restore:
    def put_back() -> None:
        for each in many:
            each()

    return put_back


def _restore_nothing() -> None:
    """There is nothing that could have changed."""
