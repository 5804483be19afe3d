"""The few ways in which an edit changes a relay. Each is a value, and doing it gives the one that takes it back.

Whatever an edit is called, it puts layers into another order (`Restack`), gives parameters other values (`Rewrite`), or
says what is trained (`Retrain`); layers that left may wait on disk (`Spill`) or be given up (`Lose`). To undo is to put
back exactly what was changed, and nothing else: other layers keep what they have learned since. The changes of a group are
done together or not at all (`all_or_nothing`).
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
    """Says how a change that has been carried out is taken back.

    Attributes:
        inverse: the change that takes it back, now or later.
        put_back: takes it back more exactly, as long as nothing else has changed since; None: the inverse is exact.
    """

    inverse: EditCommand
    put_back: Callable[[], object] | None = None


class EditCommand(ABC):
    """Is a step of an edit.

    Invariant: it never changes itself, so that several branches may hold it.
    """

    @abstractmethod
    def execute(self, editor: Editor) -> UndoInfo:
        """Carry it out; returns what takes it back.

        Raises:
            ValueError: it cannot be done as things are now; nothing is changed then.
        """

    def finalize(self, editor: Editor) -> None:  # noqa: B027 - most changes have nothing that cannot be undone
        """Hear that the group of edits that it belongs to is done."""

    def units(self) -> Sequence[Unit]:
        """List the layers that must stay available for as long as it may be done."""
        return ()


@dataclass(frozen=True, eq=False)
class RestackCommand(EditCommand):
    """Puts another list of layers into one stack; layers that are in one list only come and go.

    Attributes:
        stack: the name that it had first.
        before, after: the layers in order.
        like: by new layer, the one that it was made like.
        proven: whether the stack has been in this order before.
    """

    stack: str
    before: tuple[Unit, ...]
    after: tuple[Unit, ...]
    like: Mapping[Unit, Unit] = field(default_factory=dict)
    proven: bool = False

    def execute(self, editor: Editor) -> UndoInfo:
        put_back = editor.restack(self.stack, self.before, self.after, self.like, self.proven)
        return UndoInfo(RestackCommand(self.stack, self.after, self.before, self.like, proven=True), put_back)

    def units(self) -> Sequence[Unit]:
        return (*self.before, *self.after)


@dataclass(frozen=True, eq=False)
class RewriteCommand(EditCommand):
    """Gives some parameters of a layer other values, and the optimizer other knowledge of them.

    Attributes:
        unit: the layer.
        values: by parameter of its module: the new values and state (None: the optimizer starts anew).
    """

    unit: Unit
    values: Mapping[nn.Parameter, ParameterSnapshot]

    def execute(self, editor: Editor) -> UndoInfo:
        inverse = RewriteCommand(self.unit, editor.swap_values(self.unit, self.values))
        editor.book_snapshots(
            inverse, inverse.values.values()
        )  # for as long as some history or branch holds the inverse
        return UndoInfo(inverse, editor.store.edit_storage.undo_for(partial(inverse.execute, editor)))

    def units(self) -> Sequence[Unit]:
        return (self.unit,)


@dataclass(frozen=True, eq=False)
class SetTrainedCommand(EditCommand):
    """Says which parameters are trained from now on, or no longer.

    Attributes:
        unit: the layer.
        trained: whether they are, by parameter.
    """

    unit: Unit
    trained: Mapping[nn.Parameter, bool]

    def execute(self, editor: Editor) -> UndoInfo:
        return UndoInfo(SetTrainedCommand(self.unit, editor.set_trained(self.unit, self.trained)))

    def units(self) -> Sequence[Unit]:
        return (self.unit,)


@dataclass(frozen=True, eq=False)
class _DetachedCommand(EditCommand):
    layers: tuple[Unit, ...]


@dataclass(frozen=True, eq=False)
class SpillCommand(_DetachedCommand):
    """Lets parked layers wait on disk; whatever brings them back fetches them."""

    def execute(self, editor: Editor) -> UndoInfo:
        for unit in self.layers:
            editor.detached.spill(unit)
        return UndoInfo(FetchCommand(self.layers))


@dataclass(frozen=True, eq=False)
class FetchCommand(_DetachedCommand):
    """Brings parked layers back to memory."""

    def execute(self, editor: Editor) -> UndoInfo:
        for unit in self.layers:
            editor.detached.load(unit)
        return UndoInfo(SpillCommand(self.layers))


@dataclass(frozen=True, eq=False)
class FreeCommand(_DetachedCommand):
    """Frees parked layers once the whole group of edits is done: from then on there is no way back."""

    def execute(self, editor: Editor) -> UndoInfo:
        return UndoInfo(self)  # without effect both ways: only `settle` frees, when nothing can fail any more

    def finalize(self, editor: Editor) -> None:
        for unit in self.layers:
            editor.free_detached(unit)


@dataclass(frozen=True, eq=False)
class ImpossibleCommand(EditCommand):
    """Stands for what cannot be done any more.

    Attributes:
        why: in words.
    """

    why: str

    def execute(self, editor: Editor) -> UndoInfo:
        raise ValueError(self.why)


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Transaction:
    """Holds changes that have been done, and what takes them back.

    Attributes:
        ways_back: gets what takes each change back while nothing else changes; the inverse may be less exact.
        changes: in order.
    """

    editor: Editor
    rollbacks: ExitStack
    commands: list[EditCommand] = field(default_factory=list)
    _inverses: list[EditCommand] = field(default_factory=list)

    def execute(self, command: EditCommand) -> None:
        """Carry out one more."""
        done = command.execute(self.editor)
        # As each is done: if a later one fails, the exit takes back those before it, the last one first
        self.rollbacks.callback(done.put_back or partial(done.inverse.execute, self.editor))
        self._inverses.append(done.inverse)
        self.commands.append(command)

    @property
    def inverse(self) -> tuple[EditCommand, ...]:
        """What takes the group back, in the order in which it has to be done."""
        return tuple(reversed(self._inverses))


@contextmanager
def transaction(editor: Editor) -> Iterator[Transaction]:
    """Open a group for the changes of a block; if it fails, lets shared weights go or cannot be committed, it is taken back."""
    with ExitStack() as ways_back:
        ways_back.callback(editor.store.edit_storage.rollback)  # the last of all, when memory is as it was
        yield Transaction(editor, ways_back)
        editor.check_shared()
        editor.commit()
        ways_back.pop_all()  # not kept: they know layers that the group may have freed
