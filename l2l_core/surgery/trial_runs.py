"""Runs of the model on a few rows: arguments of layer calls, and a check of new modules.

Runs restore training modes, buffers, hooks and random generators. The tensors of a sample are copies on the host, so that a
layer, or a copy of it, can be run on it repeatedly. The check tries shapes and does not compare them: a module may change the
shape if the layers after it accept that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import Stack, is_cache, preserve_module_state, preserve_random_state
from l2l_core.surgery.layer_replacement import replace_layers

_SHARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, nn.Module)


class CallSample(NamedTuple):
    """Arguments of one layer call; tensors are on the host and require no gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """The arguments as a flat list of pytree leaves."""
        return pytree.tree_leaves((self.args, self.kwargs), is_leaf=is_cache)

    def clone(self, replaced: dict[int, Any] | None = None) -> CallSample:
        """Return a copy that a layer may write into; `replaced` maps the `id` of leaves to other values.

        A tensor that occurs twice is one tensor in the copy, too.
        """
        memo: dict[int, Any] = {}
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs), is_leaf=is_cache)
        for leaf in leaves:
            if id(leaf) not in memo:
                memo[id(leaf)] = _copy_leaf((replaced or {}).get(id(leaf), leaf))
        return CallSample(*pytree.tree_unflatten([memo[id(leaf)] for leaf in leaves], spec))


def capture_samples(
    model: nn.Module, call: Callable[[], Any], layers: Sequence[nn.Module]
) -> dict[nn.Module, CallSample]:
    """Run `call()`, which calls `model`; return the arguments of the first call of each of `layers`.

    The run is in eval mode without gradients, and ends when the last of `layers` is called.

    Raises:
        ValueError: a layer was not called.
    """
    pending, found = set(layers), dict[nn.Module, CallSample]()

    def capture(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer in pending:
            found[layer] = CallSample(args, kwargs).clone()  # before the layer writes into its arguments
            pending.remove(layer)
        if not pending:
            raise _CapturedAllError

    handles = []
    with preserve_module_state(model), torch.no_grad(), preserve_random_state():
        try:
            handles += [layer.register_forward_pre_hook(capture, with_kwargs=True) for layer in pending]
            if pending:
                call()
        except _CapturedAllError:
            pass
        finally:
            for handle in handles:
                handle.remove()
    if missing := [name for name, module in model.named_modules() if module in pending]:
        raise ValueError(
            f"layer {missing[0]} was not called in a forward in eval mode ({len(missing)} of {len({*layers})} layers were "
            'not), so that its arguments are missing. Use init="copy" or "fresh"'
        )
    return {layer: found[layer] for layer in layers}


class _CapturedAllError(BaseException):
    """Ends a forward; a BaseException, so that no model catches it by accident."""


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu", copy=True)
    return leaf if isinstance(leaf, _SHARED) else copy.deepcopy(leaf)


# -- the fit of a module ----------------------------------------------------------------------------------------------


def check_fit(model: nn.Module, call: Callable[[], Any], stack: Stack, at: int, names: Sequence[str]) -> None:
    """Run `call()`, which calls `model`, to check that the layer at position `at` of a stack with layers `names` fits.

    Raises:
        ValueError: the layer does not fit; the message has its neighbours and the shapes.
    """
    # First without most of the other layers, which takes less time. A failure proves nothing: the model may need them.
    kept = [layer for i, layer in enumerate(stack.layers) if i == 0 or abs(i - at) <= 1]
    with suppress(Exception):
        restore = replace_layers(model, stack, kept, force=True)
        try:
            _run_model(model, call, stack.layers[at], {})
            return
        finally:
            restore()
    shapes: dict[str, str] = {}
    try:
        _run_model(model, call, stack.layers[at], shapes)
    except Exception as error:  # the model may raise anything
        before = f"{names[at - 1]} before it" if at else "the part of the model before the stack"
        after = f"{names[at + 1]} after it" if at + 1 < len(names) else "the part of the model after the stack"
        given = shapes.get("input", "no floating-point tensor")
        if "output" in shapes:
            story = f"given {given} it returns {shapes['output']}, and the model fails there: {after} is next"
        else:
            story = f"it does not accept the output of {before} ({given})"
        raise ValueError(
            f"the {type(stack.layers[at]).__name__} does not fit at position {at} of {stack.title}: {story}. "
            f"{type(error).__name__}: {error}. Use a module with the input and output shapes of the layers beside it, or "
            "insert adapters in the same apply()"
        ) from error


def _run_model(model: nn.Module, call: Callable[[], Any], module: nn.Module, shapes: dict[str, str]) -> None:
    """Run the model without side effects; store the "input" and "output" shapes of the module's first call in `shapes`."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.setdefault("input", _describe_shapes((args, kwargs)))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        shapes.setdefault("output", _describe_shapes(output))

    handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        with preserve_module_state(model), torch.no_grad(), preserve_random_state():
            call()
    finally:
        for handle in handles:
            handle.remove()


def _describe_shapes(tree: Any) -> str:
    """List the shapes of the floating-point tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no floating-point tensor"
