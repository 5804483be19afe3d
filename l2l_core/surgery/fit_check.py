"""Whether a module of the user's fits where it was put: found by running the model with it on a few rows.

Shapes are not compared but tried: a module may change the shape if what comes behind it takes that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.model import Stack
from l2l_core.surgery.layer_replacement import replace_layers
from l2l_core.surgery.sample import preserve_module_state, preserve_random_state


@dataclass
class FitTrial:
    """Holds what came of running a model.

    Attributes:
        error: what ended the run; None if nothing did.
        given, gave: shapes of the floating-point tensors that the module was given and gave in its first call.
    """

    error: Exception | None = None
    input_shapes: list[tuple[int, ...]] = field(default_factory=list)
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)


def check_fit(model: nn.Module, call: Callable[[], Any], stack: Stack, at: int, names: Sequence[str]) -> None:
    """Run `call()`, which calls `model`, to see whether the layer at position `at` of a stack fits there.

    Args:
        names: of the layers of the stack, for the message.

    Raises:
        ValueError: it does not; names the neighbours and the shapes.
    """
    # A failure there proves nothing, since the model may need what was left out: the whole decides
    if _run_nearby(model, call, stack, at).error is None:
        return
    trial = _run_model(model, call, stack.layers[at])
    if trial.error is not None:
        raise ValueError(_misfit_message(stack, at, names, trial)) from trial.error


def _run_nearby(model: nn.Module, call: Callable[[], Any], stack: Stack, at: int) -> FitTrial:
    """Try it in the model without most of the other layers, which takes less time."""
    kept = [layer for i, layer in enumerate(stack.layers) if i == 0 or abs(i - at) <= 1]
    try:
        put_back = replace_layers(model, stack, kept, force=True)
    except (ValueError, TypeError) as error:
        return FitTrial(error)
    try:
        return _run_model(model, call, stack.layers[at])
    finally:
        put_back()


def _misfit_message(stack: Stack, at: int, names: Sequence[str], trial: FitTrial) -> str:
    before = f"{names[at - 1]} before it" if at else "what comes before the stack"
    behind = f"{names[at + 1]} behind it" if at + 1 < len(names) else "what comes behind the stack"
    if not trial.output_shapes:
        story = f"it does not take what {before} gives ({_format_shapes(trial.input_shapes)})"
    else:
        story = f"given {_format_shapes(trial.input_shapes)} it gives {_format_shapes(trial.output_shapes)}, and the model stops there: {behind} is next"
    return (
        f"the {type(stack.layers[at]).__name__} does not fit at position {at} of {stack.title}: {story}. "
        f"{type(trial.error).__name__}: {trial.error}. Give a module that takes and gives what the layers beside it do, or put "
        "in what adapts it in the same apply()"
    )


def _format_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "no floating-point tensor"


def _run_model(model: nn.Module, call: Callable[[], Any], module: nn.Module) -> FitTrial:
    """Run the model, and look at what `module` in it is given and gives; nothing stays behind."""
    trial = FitTrial()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trial.input_shapes = trial.input_shapes or _shapes((args, kwargs))

    def behind(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        trial.output_shapes = trial.output_shapes or _shapes(output)

    handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(behind)]
    try:
        with preserve_module_state(model), torch.no_grad(), preserve_random_state():
            call()
    except Exception as error:  # of anybody's code
        trial.error = error
    finally:
        for handle in handles:
            handle.remove()
    return trial


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    leaves = pytree.tree_leaves(tree)
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
