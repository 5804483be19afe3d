"""Replacement of all modules of some classes in a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replace_modules(
    model: nn.Module, kinds: tuple[type[ModuleT], ...], make: Callable[[ModuleT], nn.Module]
) -> list[str]:
    """Replace modules in place, a shared module by one substitute; return the names of all places.

    Raises:
        ValueError: the model has no module of these classes.
    """
    places = [
        (f"{path}.{name}" if path else name, parent, name, child)
        for path, parent in model.named_modules(remove_duplicate=False)
        for name, child in parent._modules.items()
        if isinstance(child, kinds) and type(child) in kinds
    ]
    if not places:
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"the model has no module of the kinds {wanted}: give classes of its modules as kinds=")
    made = {id(child): make(child) for _, _, _, child in places}
    for _, parent, name, child in places:
        parent._modules[name] = made[id(child)]
    return [path for path, _, _, _ in places]
