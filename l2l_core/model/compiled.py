"""Modules compiled with `torch.compile`: detection, refusals and deep copies.

A compiled part must lie within one layer, or between layers: compiled code cannot stop at a layer call. A module can be
compiled in place (``module.compile()``), in a wrapper (``torch.compile(module)``), or through its ``forward``.
`compiled_regions.py` runs compiled parts in a pass.
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

_COMPILED_ATTRIBUTES = ("_compiled_call_impl", "forward")  # attributes that hold a module's compiled function


def module_name(root: nn.Module, module: nn.Module) -> str:
    """Return the dotted name of `module` in `root`, "" for `root` itself; a search, for messages."""
    return next(name for name, each in root.named_modules() if each is module)


def is_compile_wrapper(module: nn.Module) -> bool:
    """Return whether `module` is a wrapper as ``torch.compile(module)`` returns it."""
    # Importing Dynamo takes long; if nothing is compiled, it has not been imported.
    return dynamo_is_imported() and isinstance(module, optimized_module())


def compiled_attribute(module: nn.Module) -> str | None:
    """Return the attribute that holds a module's compiled function, or None if the module is not compiled."""
    attributes, forward = vars(module), type(module).forward
    if attributes.get("_compiled_call_impl") is not None:
        return "_compiled_call_impl"
    # Every step checks every module, so a plain method is not bound for the check.
    if "forward" in attributes or type(forward) is not types.FunctionType:
        forward = getattr(module, "forward", None)
    return "forward" if hasattr(forward, "get_compiler_config") or is_compile_wrapper(module) else None


def call_attribute(module: nn.Module) -> str:
    """Return the attribute to replace in order to run code before the module's forward."""
    return compiled_attribute(module) or "forward"


def compiled_modules(root: nn.Module) -> list[nn.Module]:
    """List the compiled modules among `root` and its submodules."""
    return [module for module in root.modules() if compiled_attribute(module) is not None]


def modules_in_graph(part: nn.Module) -> list[nn.Module]:
    """List the modules whose code and hooks are in the graph of a compiled part."""
    modules = list(part.modules())
    return modules if compiled_attribute(part) == "_compiled_call_impl" else modules[1:]


def refuse_compiled_whole(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if a compiled part of the model contains one of `layers` (name -> layer)."""
    for part in compiled_modules(model):
        inside = set(part.modules()) - {part}
        held = [layer for layer, module in layers.items() if module in inside]
        if held or part is model:
            name = module_name(model, part)
            title = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"{title} is compiled as a whole, {f'layer {held[0]}' if held else 'layers'} included: one graph cannot stop "
                "where a relay loads the next layer. Compile the layers one by one instead, for example "
                "`for layer in model.layers: layer.compile()`, and give the relay the model that is not compiled"
            )


def refuse_compiled_hooks(layer: nn.Module, name: str) -> None:
    """Raise ValueError if compiled code of a layer contains the user's hooks: they would fire again in a recompute."""
    for part in compiled_modules(layer):
        for module in modules_in_graph(part):
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                if not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch."):
                    raise ValueError(
                        f"a {type(module).__name__} in the compiled part of layer {name} has a forward hook. It is compiled "
                        "too, and would fire again when the layer is recomputed. Remove it, or put torch.compile(layer) in the "
                        "layer's place and register the hook on that: hooks of the returned module are outside of the graph"
                    )


def force_eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run eagerly, so that hooks and modes see their operations."""
    return torch.compiler.set_stance("force_eager") if dynamo_is_imported() else nullcontext()


def deep_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module deeply, with attributes of parameters and compiled code, which `copy.deepcopy` drops or shares."""
    twin = copy.deepcopy(module, memo)
    for param, own in zip(module.parameters(), twin.parameters(), strict=True):
        for attribute, value in vars(param).items():
            vars(own).setdefault(attribute, value)  # `deepcopy` drops them, unless a class copies its own
    copies = dict(twin.named_modules())
    for name, own in module.named_modules():
        for entry in [] if is_compile_wrapper(own) else _COMPILED_ATTRIBUTES:
            compiled = vars(own).get(entry)
            if compiled is not None and hasattr(compiled, "get_compiler_config"):
                vars(copies[name])[entry] = _recompiled(compiled, own, copies[name])
    return twin


def _recompiled(compiled: Any, own: nn.Module, new: nn.Module) -> Callable[..., Any]:
    """Compile a method of `new` as `compiled`, the same method of `own`, was compiled."""
    method = compiled._torchdynamo_orig_callable
    if getattr(method, "__self__", None) is not own:
        return compiled  # a function, or a method of another module
    held = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    compiler = held["self"].cell_contents  # backend and options; PyTorch keeps them nowhere else
    return compiler(types.MethodType(method.__func__, new))
