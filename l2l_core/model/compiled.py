"""Parts of a model that `torch.compile` has compiled: which they are, where they may be, and copies of them.

A compiled part must lie within one layer, or between layers: code of one graph cannot stop at a layer call. There are three
ways to compile a module: in place (``module.compile()``), by a module around it (``torch.compile(module)``), and by its
``forward``. How such a part runs in a pass is told in `compiled_regions.py`.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from l2l_core._torch import dynamo_is_imported, optimized_module
from l2l_core.model.modules import module_name, modules_of

_COMPILED_ATTRIBUTES = ("_compiled_call_impl", "forward")  # where a module keeps what `torch.compile` has made of it


def is_compile_wrapper(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returns: a module around the one that is compiled."""
    # Who has compiled nothing has not imported Dynamo, which takes long.
    return dynamo_is_imported() and isinstance(module, optimized_module())


def compiled_attribute(module: nn.Module) -> str | None:
    """Name the attribute that is called when a compiled module is; None for a module that is not compiled."""
    held, forward = vars(module), type(module).forward
    if held.get("_compiled_call_impl") is not None:
        return "_compiled_call_impl"
    # A plain method need not be bound to be asked; and every step asks every module.
    if "forward" in held or type(forward) is not types.FunctionType:
        forward = getattr(module, "forward", None)
    return "forward" if hasattr(forward, "get_compiler_config") or is_compile_wrapper(module) else None


def call_attribute(module: nn.Module) -> str:
    """Name the attribute of a module to be shadowed in order to be asked before it runs."""
    return compiled_attribute(module) or "forward"


def compiled_modules(root: nn.Module) -> list[nn.Module]:
    """Find the compiled modules in and below `root`."""
    return [module for module in modules_of(root) if compiled_attribute(module) is not None]


def modules_in_graph(part: nn.Module) -> list[nn.Module]:
    """List the modules whose code, hooks included, a compiled part has in its graph."""
    modules = modules_of(part)
    return modules if compiled_attribute(part) == "_compiled_call_impl" else modules[1:]


def refuse_compiled_whole(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Refuse what is compiled together with layers in it; `layers` by name.

    Raises:
        ValueError: names the part and a layer, and says how to compile instead.
    """
    for part in compiled_modules(model):
        inside = set(part.modules()) - {part}
        held = [layer for layer, module in layers.items() if module in inside]
        if held or part is model:
            name = module_name(model, part)
            what = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"{what} is compiled as a whole, {f'layer {held[0]}' if held else 'layers'} included: one graph cannot stop "
                "where a relay loads the next layer. Compile the layers one by one instead, for example "
                "`for layer in model.layers: layer.compile()`, and give the relay the model that is not compiled"
            )


def refuse_compiled_hooks(layer: nn.Module, name: str) -> None:
    """Refuse hooks of the user's own in what is compiled of a layer: a recompute could not keep them from firing again.

    Raises:
        ValueError: names the module.
    """
    for part in compiled_modules(layer):
        for module in modules_in_graph(part):
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                    raise ValueError(
                        f"a {type(module).__name__} in the compiled part of layer {name} has a forward hook. It is compiled "
                        "too, and would fire again when the layer is recomputed. Remove it, or put torch.compile(layer) in the "
                        "layer's place and the hook on that: what torch.compile returns has hooks outside of the graph"
                    )


def force_eager() -> AbstractContextManager[Any]:
    """Run compiled modules as they are written in such a block, so that hooks and modes see what is in them."""
    return torch.compiler.set_stance("force_eager") if dynamo_is_imported() else nullcontext()


def deep_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy deeply, compiled as the module is; `copy.deepcopy` forgets that, or keeps the original's code in it."""
    twin = copy.deepcopy(module, memo)
    copies = dict(twin.named_modules())
    for name, own in module.named_modules():
        for entry in [] if is_compile_wrapper(own) else _COMPILED_ATTRIBUTES:
            if hasattr(made := vars(own).get(entry), "get_compiler_config"):
                vars(copies[name])[entry] = _recompiled(made, own, copies[name])
    return twin


def _recompiled(made: Callable[..., Any], own: nn.Module, new: nn.Module) -> Callable[..., Any]:
    """Make of a method of `new` what was made of the same method of `own`."""
    method = made._torchdynamo_orig_callable  # type: ignore[attr-defined]
    if getattr(method, "__self__", None) is not own:
        return made  # of a function, or of another module: nothing of its own to compile
    held = dict(zip(made.__code__.co_freevars, made.__closure__ or (), strict=True))
    compiler = held["self"].cell_contents  # backend and options; PyTorch keeps them nowhere else
    return compiler(types.MethodType(method.__func__, new))
