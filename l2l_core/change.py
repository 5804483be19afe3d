"""The three ways in which an edit changes a relay, each with its undoing.

Whatever an edit is called, it puts layers into another order (`Restack`), gives parameters other values (`Rewrite`), or
says what is trained (`Retrain`). To undo is to put back exactly what was changed, and nothing else: other layers keep what
they have learned since.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from l2l_core.units import Unit

if TYPE_CHECKING:
    from l2l_core.editor import Editor

Held = tuple[torch.Tensor, dict[str, Any] | None]  # a parameter's values and what the optimizer knows of it


class Change(ABC):
    """A step of an edit. `do` and `undo` take turns."""

    @abstractmethod
    def do(self, editor: Editor) -> None: ...

    @abstractmethod
    def undo(self, editor: Editor) -> None: ...

    def settle(self, editor: Editor) -> None:  # noqa: B027 - most changes have nothing that cannot be undone
        """The group of edits that it belongs to is done."""

    def units(self) -> Sequence[Unit]:
        """Layers that must stay available for as long as it may be done or undone."""
        return ()


class Restack(Change):
    """Another list of layers in one stack; layers that are in one list only come and go.

    Args:
        stack: its name.
        before, after: the layers in order.
        like: by new layer, the one that it was made like.
    """

    def __init__(
        self, stack: str, before: Sequence[Unit], after: Sequence[Unit], like: Mapping[Unit, Unit] | None = None
    ) -> None:
        self.stack, self.before, self.after, self.like = stack, tuple(before), tuple(after), dict(like or {})

    def do(self, editor: Editor) -> None:
        editor.restack(self.stack, self.before, self.after, self.like)

    def undo(self, editor: Editor) -> None:
        editor.restack(self.stack, self.after, self.before, self.like)

    def units(self) -> Sequence[Unit]:
        return (*self.before, *self.after)


class Rewrite(Change):
    """Other values for some parameters of a layer, and for what the optimizer knows of them.

    Args:
        unit: the layer.
        values: by parameter of its module: the new values and state (None: the optimizer starts anew).
    """

    def __init__(self, unit: Unit, values: Mapping[nn.Parameter, Held]) -> None:
        self._unit, self._other = unit, dict(values)

    def do(self, editor: Editor) -> None:
        self._other = editor.exchange(self._unit, self._other)

    undo = do  # what was there is kept, and comes back

    def units(self) -> Sequence[Unit]:
        return (self._unit,)


class Retrain(Change):
    """Parameters that are trained from now on, or no longer.

    Args:
        unit: the layer.
        trained: whether they are, by parameter.
    """

    def __init__(self, unit: Unit, trained: Mapping[nn.Parameter, bool]) -> None:
        self._unit, self._other = unit, dict(trained)

    def do(self, editor: Editor) -> None:
        self._other = editor.set_trained(self._unit, self._other)

    undo = do

    def units(self) -> Sequence[Unit]:
        return (self._unit,)


class Spill(Change):
    """Parked layers that wait on disk; whatever brings them back fetches them.

    Args:
        units: parked.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = tuple(units)

    def do(self, editor: Editor) -> None:
        for unit in self._units:
            editor.spill(unit)

    def undo(self, editor: Editor) -> None:
        pass


class Lose(Spill):
    """Parked layers that are freed once the whole group of edits is done: from then on there is no way back."""

    def do(self, editor: Editor) -> None:
        pass

    def settle(self, editor: Editor) -> None:
        for unit in self._units:
            editor.lose(unit)


class Inverted(Change):
    """A change the other way round."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def do(self, editor: Editor) -> None:
        self._change.undo(editor)

    def undo(self, editor: Editor) -> None:
        self._change.do(editor)

    def units(self) -> Sequence[Unit]:
        return self._change.units()
