"""Resolve and check the argument `layers=`: modules or dotted names."""

import difflib
from collections.abc import Iterable

from torch import nn

from l2l_core.model.layers import (
    NamedModules,
    can_run,
    empty_stack_message,
    find_layers,
    format_names,
    layer_candidates,
    submodules_of,
)


def resolve_layers(model: nn.Module, layers: Iterable[nn.Module | str] | None) -> NamedModules:
    """Return the given layers by dotted name, in the order given; `None` means `find_layers`.

    `layers` may mix modules and dotted names. Raises TypeError or ValueError for a value that cannot be a layer.
    """
    if layers is None:
        return find_layers(model)
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers={_shown(layers)} is one value; pass a sequence: layers=[{_shown(layers)}].")
    names = {module: name for name, module in model.named_modules()}
    resolved: NamedModules = {}
    for value in layers:
        module = _lookup(model, value)
        name = _checked_name(model, names, module, value)
        if name in resolved:
            raise ValueError(f"layers contains {name!r} twice (now as {_shown(value)}); list every layer once.")
        resolved[name] = module
    if not resolved:
        if (empty := empty_stack_message(model)) is not None:
            raise ValueError(f"layers=[] names no layer, and {empty}")
        raise ValueError("layers=[] names no layer; list at least one, or pass layers=None to find them.")
    _check_not_nested(resolved)
    return resolved


def _lookup(model: nn.Module, value: object) -> nn.Module:
    if isinstance(value, nn.Module):
        return value
    if not isinstance(value, str):
        raise TypeError(f"layers contains {_shown(value)}; pass modules or dotted names such as 'encoder.layer.0'.")
    modules = dict(model.named_modules(remove_duplicate=False))
    if value not in modules:
        close = difflib.get_close_matches(value, modules, n=3) or layer_candidates(model)
        raise ValueError(
            f"layers contains {value!r}, but {type(model).__name__} has no module of that name; "
            f"close ones: {format_names(close)}."
        )
    return modules[value]


def _checked_name(model: nn.Module, names: dict[nn.Module, str], module: nn.Module, value: object) -> str:
    """Return the first dotted name of `module`, given as `value`; raise ValueError if it cannot be a layer."""
    if module not in names:
        raise ValueError(
            f"layers contains {_shown(value)}, which is not part of the model; "
            "pass a module of this model (not of a copy), or its dotted name."
        )
    if names[module] == "":
        raise ValueError("layers contains the model itself; list modules inside it, or pass layers=None to find them.")
    if not can_run(module):
        empty = None if list(module.children()) else empty_stack_message(model)
        raise ValueError(
            f"layers contains {names[module]!r}, a {type(module).__name__} without a forward method; "
            f"{empty or 'list its members instead.'}"
        )
    return names[module]


def _check_not_nested(layers: NamedModules) -> None:
    for outer, module in layers.items():
        within = submodules_of(module)
        for inner in (name for name, layer in layers.items() if layer in within):
            raise ValueError(f"layers contains {inner!r}, which lies inside layer {outer!r}; list only one of the two.")


def _shown(value: object) -> str:
    return f"{type(value).__name__}(...)" if isinstance(value, nn.Module) else repr(value)
