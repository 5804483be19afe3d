"""Names of a module's entries as keys of dictionaries that do not call the module's own `__hash__` and `__eq__`."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class ModuleKey(NamedTuple):
    """A module and the name of an attribute or a buffer of it, compared by the module's identity.

    A class of the user's may compute its hash from its attributes, as torchmetrics' do: it changes with them, and reads them.
    """

    module: nn.Module
    name: str

    def __hash__(self) -> int:
        return hash((id(self.module), self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleKey) and self.module is other.module and self.name == other.name

    def __ne__(self, other: object) -> bool:
        return not self == other
