"""Check that a module fits at its position by running the model on a few rows.

Shapes are tried, not compared: a module may change the shape if the layers after it accept that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import Stack, preserve_module_state, preserve_random_state
from l2l_core.surgery.layer_replacement import replace_layers


@dataclass
class FitTrial:
    """Result of a trial run: the error, and the shapes of the module's floating-point tensors in its first call."""

    error: Exception | None = None
    input_shapes: list[tuple[int, ...]] = field(default_factory=list)
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)


def check_fit(model: nn.Module, call: Callable[[], Any], stack: Stack, at: int, names: Sequence[str]) -> None:
    """Run `call()`, which calls `model`, to check that the layer at position `at` of a stack fits there.

    Args:
        names: names of the stack's layers, for the message.

    Raises:
        ValueError: the layer does not fit; the message has its neighbours and the shapes.
    """
    # A failure there proves nothing, because the model may need the omitted layers; the whole model decides.
    if _run_nearby(model, call, stack, at).error is None:
        return
    trial = _run_model(model, call, stack.layers[at])
    if trial.error is not None:
        raise ValueError(_misfit_message(stack, at, names, trial)) from trial.error


def _run_nearby(model: nn.Module, call: Callable[[], Any], stack: Stack, at: int) -> FitTrial:
    """Run the model without most of the other layers, which takes less time."""
    kept = [layer for i, layer in enumerate(stack.layers) if i == 0 or abs(i - at) <= 1]
    try:
        restore = replace_layers(model, stack, kept, force=True)
    except (ValueError, TypeError) as error:
        return FitTrial(error)
    try:
        return _run_model(model, call, stack.layers[at])
    finally:
        restore()


def _misfit_message(stack: Stack, at: int, names: Sequence[str], trial: FitTrial) -> str:
    before = f"{names[at - 1]} before it" if at else "the part of the model before the stack"
    after = f"{names[at + 1]} after it" if at + 1 < len(names) else "the part of the model after the stack"
    given = _format_shapes(trial.input_shapes)
    if not trial.output_shapes:
        story = f"it does not accept the output of {before} ({given})"
    else:
        story = f"given {given} it returns {_format_shapes(trial.output_shapes)}, and the model fails there: {after} is next"
    return (
        f"the {type(stack.layers[at]).__name__} does not fit at position {at} of {stack.title}: {story}. "
        f"{type(trial.error).__name__}: {trial.error}. Use a module with the input and output shapes of the layers beside it, or "
        "insert adapters in the same apply()"
    )


def _format_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "no floating-point tensor"


def _run_model(model: nn.Module, call: Callable[[], Any], module: nn.Module) -> FitTrial:
    """Run the model and record the input and output shapes of `module`, without side effects."""
    trial = FitTrial()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trial.input_shapes = trial.input_shapes or _shapes((args, kwargs))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        trial.output_shapes = trial.output_shapes or _shapes(output)

    handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        with preserve_module_state(model), torch.no_grad(), preserve_random_state():
            call()
    except Exception as error:  # the model may raise anything
        trial.error = error
    finally:
        for handle in handles:
            handle.remove()
    return trial


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    leaves = pytree.tree_leaves(tree)
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
