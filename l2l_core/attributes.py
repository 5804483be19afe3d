"""Plain attributes of the shell's modules, handed from micro-batch to micro-batch.

Paused forwards share their modules. A model that notes something on itself (`self.rows = len(x)`) and reads it after a
layer call would find what another micro-batch has noted meanwhile. So what a micro-batch has set is set again before it
goes on. A number that the shell sets on a layer anew for every micro-batch is refused: the layer would run with another's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from l2l_core.units import Unit

Place = tuple[nn.Module, str]


class Attributes:
    """Finds out which attributes a micro-batch has set.

    Args:
        modules: of the shell.
        places: where an earlier pass has seen changes; None looks everywhere, which costs time, and learns.
    """

    def __init__(self, modules: Iterable[nn.Module], places: Collection[Place] | None) -> None:
        self._modules, self._places = list(modules), places
        self.seen: set[Place] = set(places or ())

    def now(self) -> dict[Place, Any]:
        """The attributes as they stand."""
        if self._places is not None:
            return {(module, name): vars(module)[name] for module, name in self._places if name in vars(module)}
        return {(module, name): value for module in self._modules for name, value in vars(module).items()}

    def since(self, before: dict[Place, Any]) -> dict[Place, Any]:
        """Those that hold another object than `before`, or are new."""
        now = self.now()
        changed = {place: value for place, value in now.items() if place not in before or before[place] is not value}
        self.seen.update(changed)
        return changed


def put(values: dict[Place, Any]) -> None:
    """Set attributes to `values`."""
    for (module, name), value in values.items():
        vars(module)[name] = value


def of_layer(unit: Unit) -> dict[Place, Any]:
    """Numbers and strings that the layer's modules keep as attributes."""
    found = ((module, name, value) for module in unit.module.modules() for name, value in vars(module).items())
    return {(module, name): value for module, name, value in found if isinstance(value, int | float | str)}


def check_layer(unit: Unit, before: dict[Place, Any]) -> None:
    """Raise RuntimeError if an attribute of the layer is not what it was when the micro-batch came to it."""
    now = of_layer(unit)
    changed = sorted({name for (module, name), value in before.items() if now.get((module, name)) != value})
    if changed:
        raise RuntimeError(
            f"attribute {changed[0]!r} of layer {unit.name} is set anew for every micro-batch, and micro-batches take turns: the "
            "layer would see another micro-batch's value. Pass it as an argument of the layer"
        )
