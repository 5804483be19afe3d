"""Put other modules into the places of those of some kinds, wherever a model holds them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], make: Callable[[nn.Module], nn.Module], setting: str
) -> list[str]:
    """Exchange modules in place; one that stands in several places gets one substitute. Returns the names of all places.

    Raises:
        ValueError: the model has no such module; `setting` names where others may be asked for.
    """
    places = [
        (f"{path}.{name}" if path else name, parent, name, child)
        for path, parent in model.named_modules(remove_duplicate=False)
        for name, child in parent._modules.items()
        if type(child) in kinds
    ]
    if not places:
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"the model has no module of the kinds {wanted}: name those that it has with {setting}")
    made = {id(child): make(child) for _, _, _, child in places}
    for _, parent, name, child in places:
        parent._modules[name] = made[id(child)]
    return [path for path, _, _, _ in places]
