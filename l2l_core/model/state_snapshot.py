"""Snapshots that restore containers, tensors, random generators and global state in place.

Restoring writes into the same objects, so that other references to them see it, which a deep copy would not allow.
Modules, parameters and objects of other classes are kept by reference; their contents are not restored.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import backends, nn

from l2l_core.model.compiled import force_eager
from l2l_core.model.thread_state import RandomState

Restore = Callable[[], object]

MOST_ITEMS = 10_000
_EXACT, _UNSET = "ieee", "none"
_NEVER_CHANGED = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
INTERNALS = frozenset(vars(nn.Module())) - {"training"}  # parameters and buffers are restored elsewhere
HOOK_DICTS = tuple(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, dict))


def snapshot_value(value: Any, memo: dict[int, Any] | None = None) -> Restore:
    """Copy the contents of `value` at any depth; return a function that writes them back into the same objects.

    Of a container with more than `MOST_ITEMS` items, which holds data, the items themselves are not copied.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return _restore_nothing  # a second reference to the same object
    memo[id(value)] = value  # keeps the object alive, so that its id stays unique
    if isinstance(value, torch.Tensor):
        return _snapshot_tensor(value)
    if isinstance(value, tuple):
        return restore_all([snapshot_value(item, memo) for item in value])
    if not isinstance(value, dict | list | deque | set):
        return _snapshot_generator(value)
    items: list[Any] = list(value.items() if isinstance(value, dict) else value)
    held = value.values() if isinstance(value, dict) else () if isinstance(value, set) else value
    held = held if len(value) <= MOST_ITEMS else ()
    inner = [snapshot_value(item, memo) for item in held]

    def restore() -> None:
        value.clear()
        if isinstance(value, dict):
            _fill(value, items)
        else:
            value.update(items) if isinstance(value, set) else value.extend(items)
        restore_all(inner)()

    return restore


def snapshot_attributes(modules: Iterable[nn.Module]) -> Restore:
    """Snapshot the plain attributes of modules, `training` among them, and their hooks.

    Hooks and attributes belong together: models of transformers record in an attribute that they installed their hooks,
    and would install them twice if only the attribute were restored.
    """
    memo: dict[int, Any] = {}
    # Few objects for each module: a deep model has thousands, and the garbage collector would run for each snapshot
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    hooks: dict[int, tuple[dict[int, Any], list[Any]]] = {}  # by address; those that are not empty
    inner: list[Restore] = []
    for module in modules:
        attributes = vars(module)
        kept.append((attributes, {name: value for name, value in attributes.items() if name not in INTERNALS}))
        inner += _snapshot_held(kept[-1][1], memo)
        for name in HOOK_DICTS:
            if each := attributes.get(name):
                hooks[id(each)] = each, [*each.items()]

    def restore() -> None:
        for attributes, before in kept:
            _restore_names(attributes, before, INTERNALS)
            for name in HOOK_DICTS:
                if (each := attributes.get(name)) and id(each) not in hooks:
                    each.clear()
        for each, items in hooks.values():
            if [*each.items()] != items:
                each.clear()
                _fill(each, items)

    return restore_all([*inner, restore])


def snapshot_except(held: dict[str, Any], excluded: Collection[str]) -> Restore:
    """Snapshot a dictionary except some of its entries."""
    kept = {name: value for name, value in held.items() if name not in excluded}
    return restore_all([partial(_restore_names, held, kept, excluded), *_snapshot_held(kept, {})])


def _snapshot_held(kept: dict[str, Any], memo: dict[int, Any]) -> list[Restore]:
    """Snapshot the contents of values that may change, which few are."""
    return [snapshot_value(value, memo) for value in kept.values() if type(value) not in _NEVER_CHANGED]


def _restore_names(held: dict[str, Any], kept: dict[str, Any], excluded: Collection[str]) -> None:
    for name in [name for name in held if name not in kept and name not in excluded]:
        del held[name]
    for name, value in kept.items():
        if held.get(name, _restore_nothing) is not value:
            held[name] = value


def _fill(held: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    for key, item in items:
        held[key] = item  # noqa: PERF403 - `update` of a Counter would add


def _snapshot_tensor(tensor: torch.Tensor) -> Restore:
    if isinstance(tensor, nn.Parameter) or not _is_writable(tensor):
        return _restore_nothing
    value = tensor.detach().clone()

    def restore() -> None:
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            tensor.data = value.clone()  # it was resized or cast; the object stays the same
        elif not torch.equal(tensor, value):  # writing equal values would still increment the tensor's version
            with (
                torch.inference_mode(tensor.is_inference()),
                torch.no_grad(),
            ):  # outside, inference tensors are read-only
                tensor.copy_(value)

    return restore


def _is_writable(tensor: torch.Tensor) -> bool:
    """Return whether `copy_` into the tensor works: an expanded tensor has fewer places than elements."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized or 0 in tensor.stride())


def _snapshot_generator(value: Any) -> Restore:
    if isinstance(value, torch.Generator | numpy.random.RandomState):
        state: Any = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if isinstance(value, numpy.random.Generator):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state)
    if isinstance(value, numpy.ndarray):
        array = value.copy()
        return lambda: numpy.copyto(value, array)
    return _restore_nothing


def restore_all(many: list[Restore]) -> Restore:
    """Return a function that calls all of `many`, in order."""

    def restore() -> None:
        for each in many:
            each()

    return restore


def _restore_nothing() -> None:
    """Restore nothing: the value cannot change, or another snapshot covers it."""


def snapshot_random_state() -> Restore:
    """Capture the random generators of torch, Python and NumPy; return a function that restores them."""
    before, numpy_before = RandomState.capture(), numpy.random.get_state(legacy=False)
    return restore_all([before.restore, partial(numpy.random.set_state, numpy_before)])


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random generators of torch, Python and NumPy after a block."""
    restore = snapshot_random_state()
    try:
        yield
    finally:
        restore()


@contextmanager
def preserve_module_state(model: nn.Module) -> Iterator[None]:
    """Run a block in eval mode and without compiled code, then restore modes and buffers."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, snapshot_value(buffer))
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    for module, _ in modes:  # not model.eval(), which a model may override
        module.training = False
    try:
        with force_eager():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for module, name, buffer, restore in buffers:
            module._buffers[name] = buffer  # the forward may have replaced the tensor
            restore()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in full float32 precision on `device`: without autocast, TF32 or bfloat16 in matrix products and convolutions."""
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    kinds = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    before = [(kind, kind.fp32_precision) for kind in kinds if kind.fp32_precision not in (_EXACT, _UNSET)]
    try:
        for kind, _ in before:
            kind.fp32_precision = _EXACT
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for kind, precision in before:
            kind.fp32_precision = precision
