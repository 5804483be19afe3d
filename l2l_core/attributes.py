"""Plain attributes of the shell's modules, handed from micro-batch to micro-batch.

Paused forwards share their modules. A model that notes something on itself (`self.rows = len(x)`) and reads it after a
layer call would find what another micro-batch has noted meanwhile. So what a micro-batch has set is set again before it
goes on. Attributes of layers are not handled here: see `Call.attributes` and the checks in `pause`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

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
