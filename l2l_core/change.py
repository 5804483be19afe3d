"""The few ways in which an edit changes a relay. Each is a value, and doing it gives the one that takes it back.

Whatever an edit is called, it puts layers into another order (`Restack`), gives parameters other values (`Rewrite`), or
says what is trained (`Retrain`); layers that left may wait on disk (`Spill`) or be given up (`Lose`). To undo is to put
back exactly what was changed, and nothing else: other layers keep what they have learned since.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from l2l_core.units import Unit

if TYPE_CHECKING:
    from l2l_core.editor import Editor

Held = tuple[torch.Tensor, dict[str, Any] | None]  # a parameter's values and what the optimizer knows of it


class Change(ABC):
    """A step of an edit.

    Invariant: it never changes itself, so that several branches may hold it.
    """

    @abstractmethod
    def do(self, editor: Editor) -> Change:
        """Carry it out; the change that takes it back.

        Raises:
            ValueError: it cannot be done as things are now; nothing is changed then.
        """

    def settle(self, editor: Editor) -> None:  # noqa: B027 - most changes have nothing that cannot be undone
        """The group of edits that it belongs to is done."""

    def units(self) -> Sequence[Unit]:
        """Layers that must stay available for as long as it may be done."""
        return ()


@dataclass(frozen=True, eq=False)
class Restack(Change):
    """Another list of layers in one stack; layers that are in one list only come and go.

    Attributes:
        stack: its name.
        before, after: the layers in order.
        like: by new layer, the one that it was made like.
    """

    stack: str
    before: tuple[Unit, ...]
    after: tuple[Unit, ...]
    like: Mapping[Unit, Unit] = field(default_factory=dict)

    def do(self, editor: Editor) -> Restack:
        editor.restack(self.stack, self.before, self.after, self.like)
        return Restack(self.stack, self.after, self.before, self.like)

    def units(self) -> Sequence[Unit]:
        return (*self.before, *self.after)


@dataclass(frozen=True, eq=False)
class Rewrite(Change):
    """Other values for some parameters of a layer, and for what the optimizer knows of them.

    Attributes:
        unit: the layer.
        values: by parameter of its module: the new values and state (None: the optimizer starts anew).
    """

    unit: Unit
    values: Mapping[nn.Parameter, Held]

    def do(self, editor: Editor) -> Rewrite:
        return Rewrite(self.unit, editor.exchange(self.unit, self.values))

    def units(self) -> Sequence[Unit]:
        return (self.unit,)


@dataclass(frozen=True, eq=False)
class Retrain(Change):
    """Parameters that are trained from now on, or no longer.

    Attributes:
        unit: the layer.
        trained: whether they are, by parameter.
    """

    unit: Unit
    trained: Mapping[nn.Parameter, bool]

    def do(self, editor: Editor) -> Retrain:
        return Retrain(self.unit, editor.set_trained(self.unit, self.trained))

    def units(self) -> Sequence[Unit]:
        return (self.unit,)


@dataclass(frozen=True, eq=False)
class Spill(Change):
    """Parked layers that wait on disk; whatever brings them back fetches them.

    Attributes:
        parked: the layers.
    """

    parked: tuple[Unit, ...]

    def do(self, editor: Editor) -> Fetch:
        for unit in self.parked:
            editor.spill(unit)
        return Fetch(self.parked)


@dataclass(frozen=True, eq=False)
class Fetch(Spill):
    """Parked layers that come back to memory."""

    def do(self, editor: Editor) -> Spill:  # type: ignore[override]
        for unit in self.parked:
            editor.fetch(unit)
        return Spill(self.parked)


@dataclass(frozen=True, eq=False)
class Lose(Change):
    """Parked layers that are freed once the whole group of edits is done: from then on there is no way back.

    Attributes:
        parked: the layers.
    """

    parked: tuple[Unit, ...]

    def do(self, editor: Editor) -> Lose:
        return self

    def settle(self, editor: Editor) -> None:
        for unit in self.parked:
            editor.lose(unit)
