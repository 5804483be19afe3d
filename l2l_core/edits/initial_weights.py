"""Initial weights of a new layer, drawn as the layers of its model were drawn, or refused."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType

import torch
from torch import nn

from l2l_core.model import names_in

_RESETS = ("reset_parameters", "_reset_parameters")  # the second one of nn.MultiheadAttention
_OF_TENSORS = {"normal_", "uniform_", "zero_", "fill_", "copy_", "mul_", "div_"}
_WRITES = _OF_TENSORS | {name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")}
_OTHER_WAYS = {"apply", "init_weights", "initialize_weights", "_initialize_weights", *_RESETS}
_REMEDY = "Make a layer as the model makes it, and pass it as module="


def initialise(module: nn.Module, model: nn.Module, like: nn.Module) -> None:
    """Draw the weights of a new layer as a new model does.

    By `reset_parameters` of the layer and the modules in it, inner ones first; then by `_init_weights` of the model, or of a part
    of it that has the layer, as transformers has it.

    Args:
        module: the layer; its values are lost, also if this raises.
        model: that it becomes a part of.
        like: the layer of that model that it is a copy of.

    Raises:
        ValueError: a parameter is set by neither, or the code of the layer or of the model sets weights in another way.
    """
    around = [each for each in model.modules() if each is not like and any(inner is like for inner in each.modules())]
    init = next((f for each in reversed(around) if callable(f := getattr(each, "_init_weights", None))), None)
    _refuse_other_ways(module, around, init is not None)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(torch.nan)
            vars(param).pop("_is_hf_initialized", None)  # transformers leaves weights alone that were loaded
    module.apply(_reset)
    if init is not None:
        module.apply(partial(_reset_by, init))
    for name, param in module.named_parameters():
        if param.isnan().any():
            raise ValueError(
                f"init='fresh': neither the model's _init_weights nor reset_parameters() sets {name}. {_REMEDY}"
            )


def _reset(module: nn.Module) -> None:
    if (name := _reset_of(type(module))) is not None:
        getattr(module, name)()


def _reset_of(cls: type) -> str | None:
    return next((name for name in _RESETS if hasattr(cls, name)), None)


def _reset_by(init: Callable[[nn.Module], object], module: nn.Module) -> None:
    vars(module).pop("_is_hf_initialized", None)
    init(module)


def _refuse_other_ways(module: nn.Module, around: Iterable[nn.Module], has_init: bool) -> None:
    """Refuse a layer or a model that sets weights in its constructor; warn if these may be others."""
    for cls in () if has_init else dict.fromkeys(map(type, module.modules())):
        if _reset_of(cls) is None and (found := _setters(cls, _WRITES | _OTHER_WAYS)):
            raise ValueError(
                f"init='fresh': {cls.__name__}.__init__ sets weights itself ({found}), and PyTorch's reset_parameters() would "
                f"give others. {_REMEDY}; or give {cls.__name__} a method reset_parameters() that sets them"
            )
    for cls in dict.fromkeys(map(type, around)):
        if not has_init and (found := _setters(cls, _OTHER_WAYS)):
            raise ValueError(
                f"init='fresh': {cls.__name__}.__init__ sets weights by {found}, and PyTorch's reset_parameters() would give "
                f"others. {_REMEDY}"
            )
        if found := _setters(cls, _WRITES):
            warnings.warn(
                f"Insert(init='fresh'): {cls.__name__}.__init__ sets weights itself ({found}). If some are those of layers, the "
                f"new layer has others, by {'_init_weights' if has_init else 'reset_parameters'} alone. {_REMEDY}",
                stacklevel=2,
            )


def _setters(cls: type, names: Iterable[str]) -> str:
    """Return which of these names a user's constructors refer to, and methods and functions of the user that these call."""
    wanted, found, seen = set(names), set[str](), set[FunctionType]()
    waiting = [vars(base).get("__init__") for base in cls.__mro__ if base is nn.Transformer or not _is_of_library(base)]
    while waiting:
        function = inspect.unwrap(each) if isinstance(each := waiting.pop(), FunctionType) else each
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        for name in names_in(function.__code__):
            if name in wanted:
                found.add(name)
            elif name not in ("forward", "_init_weights"):  # a layer is drawn by the second one
                called = (getattr(cls, name, None), function.__globals__.get(name))
                waiting += [each for each in called if isinstance(each, FunctionType) and not _is_of_library(each)]
    return ", ".join(sorted(found))


def _is_of_library(value: type | FunctionType) -> bool:
    return value.__module__.partition(".")[0] in ("torch", "transformers", "builtins")
