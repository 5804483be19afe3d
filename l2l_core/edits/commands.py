"""Commands: the elementary changes of edits, each with its inverse.

Commands change the layers of a stack, the values of parameters, or which parameters are trained; others move detached layers
to disk or free them. An undo restores exactly the values that were changed; other layers keep what they have learned since. The
commands of a group are executed together or not at all (`transaction`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import nn

from l2l_core.edits.editor import Editor
from l2l_core.edits.optimizer_state import ParameterSnapshot
from l2l_core.eps.blocks import Unit


class UndoInfo(NamedTuple):
    """Ways to undo an executed command."""

    inverse: EditCommand  # now or later
    put_back: Callable[[], object] | None = None  # more exactly, if nothing else has changed; None: `inverse` is exact


class EditCommand(ABC):
    """One change of an edit; immutable, so that several branches may share it."""

    @abstractmethod
    def execute(self, editor: Editor) -> UndoInfo:
        """Make the change and return how to undo it; raise ValueError, without a change, if it is impossible."""

    def finalize(self, editor: Editor) -> None:  # noqa: B027 - most commands do nothing here
        """Make the part of the change that cannot be undone; called when its whole group is done."""

    def units(self) -> Sequence[Unit]:
        """List the layers that must stay available while the command may be executed."""
        return ()


@dataclass(frozen=True, eq=False)
class RestackCommand(EditCommand):
    """Replaces the layers of one stack."""

    stack: str  # its first name
    before: tuple[Unit, ...]
    after: tuple[Unit, ...]
    like: Mapping[Unit, Unit] = field(default_factory=dict)  # new layer -> the layer like which it was made
    proven: bool = False  # the stack has been in this order before

    def execute(self, editor: Editor) -> UndoInfo:
        put_back = editor.restack(self.stack, self.before, self.after, self.like, self.proven)
        return UndoInfo(RestackCommand(self.stack, self.after, self.before, self.like, proven=True), put_back)

    def units(self) -> Sequence[Unit]:
        return (*self.before, *self.after)


@dataclass(frozen=True, eq=False)
class SetLoopsCommand(EditCommand):
    """Sets the numbers that determine how often the model's forward runs a stack."""

    stack: str  # its first name
    numbers: Mapping[str, int]  # by dotted name

    def execute(self, editor: Editor) -> UndoInfo:
        old, put_back = editor.set_loops(self.stack, self.numbers)
        return UndoInfo(SetLoopsCommand(self.stack, old), put_back)


@dataclass(frozen=True, eq=False)
class _LayerCommand(EditCommand):
    unit: Unit

    def units(self) -> Sequence[Unit]:
        return (self.unit,)


@dataclass(frozen=True, eq=False)
class RewriteCommand(_LayerCommand):
    """Replaces values and optimizer state of some parameters of a layer."""

    values: Mapping[nn.Parameter, ParameterSnapshot]

    def execute(self, editor: Editor) -> UndoInfo:
        inverse = RewriteCommand(self.unit, editor.swap_values(self.unit, self.values))
        editor.book_snapshots(inverse, inverse.values.values())  # for as long as some history or branch holds it
        return UndoInfo(inverse, editor.store.storage.undo_for(partial(inverse.execute, editor)))


@dataclass(frozen=True, eq=False)
class SetTrainedCommand(_LayerCommand):
    """Freezes or unfreezes parameters of a layer."""

    trained: Mapping[nn.Parameter, bool]

    def execute(self, editor: Editor) -> UndoInfo:
        return UndoInfo(SetTrainedCommand(self.unit, editor.set_trained(self.unit, self.trained)))


@dataclass(frozen=True, eq=False)
class _DetachedCommand(EditCommand):
    layers: tuple[Unit, ...]


@dataclass(frozen=True, eq=False)
class SpillCommand(_DetachedCommand):
    """Moves detached layers to disk; commands that insert them load them."""

    def execute(self, editor: Editor) -> UndoInfo:
        for unit in self.layers:
            editor.detached.spill(unit)
        return UndoInfo(FetchCommand(self.layers))


@dataclass(frozen=True, eq=False)
class FetchCommand(_DetachedCommand):
    """Loads detached layers from disk."""

    def execute(self, editor: Editor) -> UndoInfo:
        for unit in self.layers:
            editor.detached.load(unit)
        return UndoInfo(SpillCommand(self.layers))


@dataclass(frozen=True, eq=False)
class FreeCommand(_DetachedCommand):
    """Frees detached layers once the whole group of edits is done; this cannot be undone."""

    def execute(self, editor: Editor) -> UndoInfo:
        return UndoInfo(self)  # without effect: `finalize` frees, when nothing can fail any more

    def finalize(self, editor: Editor) -> None:
        for unit in self.layers:
            editor.free_detached(unit)


@dataclass(frozen=True, eq=False)
class ImpossibleCommand(EditCommand):
    """A command that is no longer possible; `why` is the error message."""

    why: str

    def execute(self, editor: Editor) -> UndoInfo:
        raise ValueError(self.why)


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Transaction:
    """Commands of a group that have been executed, with their inverses."""

    editor: Editor
    rollbacks: ExitStack  # exact undo functions, for a failure of the group
    commands: list[EditCommand] = field(default_factory=list)
    _inverses: list[EditCommand] = field(default_factory=list)

    def execute(self, command: EditCommand) -> None:
        """Execute one more command."""
        done = command.execute(self.editor)
        self.rollbacks.callback(done.put_back or partial(done.inverse.execute, self.editor))
        self._inverses.append(done.inverse)
        self.commands.append(command)

    @property
    def inverse(self) -> tuple[EditCommand, ...]:
        """The commands that undo the group, in the order of execution."""
        return tuple(reversed(self._inverses))


@contextmanager
def transaction(editor: Editor) -> Iterator[Transaction]:
    """Run the commands of a block as a group; undo them if anything fails."""
    with ExitStack() as rollbacks:
        rollbacks.callback(editor.store.storage.rollback)  # called last, when memory is restored
        yield Transaction(editor, rollbacks)
        editor.check_shared()
        editor.agree()
        editor.commit()
        rollbacks.pop_all()  # dropped: they refer to layers that the group may have freed
