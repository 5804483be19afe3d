"""Modules of a model, listed quickly: every step looks through all of them several times."""

from __future__ import annotations

from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """List what `root.modules()` gives, in its order: `root` and all that is below it, each once."""
    found: dict[nn.Module, None] = {}
    _add(root, found)
    return list(found)


def module_name(root: nn.Module, module: nn.Module) -> str:
    """Return the name of a module below `root`; "" of `root` itself. For messages: it looks through all of them."""
    return next(name for name, each in root.named_modules() if each is module)


def _add(module: nn.Module, found: dict[nn.Module, None]) -> None:
    # Not by `modules()`: generators within generators, through which every module passes once per level above it.
    if module not in found:
        found[module] = None
        for child in module._modules.values():
            if child is not None:
                _add(child, found)
