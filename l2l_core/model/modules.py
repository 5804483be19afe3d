"""Fast listing of a model's modules; every step lists them several times."""

from __future__ import annotations

from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """List `root` and its submodules, each once, in the order of `root.modules()`."""
    found: dict[nn.Module, None] = {}
    _add(root, found)
    return list(found)


def module_name(root: nn.Module, module: nn.Module) -> str:
    """Return the dotted name of `module` in `root`, "" for `root` itself; a slow search, for messages."""
    return next(name for name, each in root.named_modules() if each is module)


def _add(module: nn.Module, found: dict[nn.Module, None]) -> None:
    # `modules()` nests one generator per level, and every module passes through all of them.
    if module not in found:
        found[module] = None
        for child in module._modules.values():
            if child is not None:
                _add(child, found)
