"""Journal of edits, with undo and redo.

Undo restores the layers that an edit changed to the bit; other layers keep what they have learned since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from l2l_core.edits.commands import EditCommand, Transaction, transaction
from l2l_core.edits.edit import Edit, RunCommand
from l2l_core.edits.editor import Editor
from l2l_core.eps.blocks import Unit


@dataclass(frozen=True)
class JournalEntry:
    """One line of the journal."""

    number: int  # from 0
    step: int  # number of finished steps
    kind: Literal["edit", "undo", "redo"]
    what: str  # the edits, as they print themselves
    of: int  # number of the entry that was undone or redone, -1 otherwise
    preserves_function: bool  # to the bit; inserted layers that end in a norm up to its eps (`identity.py`)
    optimizer: str  # effect on the optimizer's state
    layers: int  # number of layers afterwards
    params: int  # change of the number of weights
    nbytes: int  # change of the bytes of weights and optimizer state in the EPS
    # Positions among all layers, before the edit, of layers that `what` names by key.
    places: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class InverseEdit(Edit):
    """The inverse of applied edits."""

    what: str  # the applied edits, as they print themselves
    commands: tuple[EditCommand, ...] = field(repr=False)
    preserved: bool  # the edits did not change the model's outputs

    @property
    def preserves_function(self) -> bool:
        return self.preserved

    def execute(self, editor: Editor, run: RunCommand) -> None:
        for command in self.commands:
            run(command)


class UndoStep(NamedTuple):
    """Commands that undo or redo an edit."""

    number: int  # of its entry in the journal
    commands: tuple[EditCommand, ...]


class History:
    """Applies, undoes and redoes edits, and keeps the journal.

    Invariant: a detached layer is kept as long as a command in `undo_stack` or `redo_stack` may restore it.
    """

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._entries: list[JournalEntry] = []
        self.undo_stack: list[UndoStep] = []
        self.redo_stack: list[UndoStep] = []
        self.loss: float | None = None  # of the last step

    def copy(self) -> History:
        """Copy the history, for a branch."""
        twin = History(self._editor)
        twin.restore(self._entries, self.undo_stack, self.redo_stack)
        twin.loss = self.loss
        return twin

    @property
    def journal(self) -> tuple[JournalEntry, ...]:
        """All entries, oldest first."""
        return tuple(self._entries)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Layers that an undo or a redo may restore or change, each once."""
        steps = (*self.undo_stack, *self.redo_stack)
        return tuple(dict.fromkeys(unit for step in steps for command in step.commands for unit in command.units()))

    def restore(self, journal: Sequence[JournalEntry], done: Sequence[UndoStep], undone: Sequence[UndoStep]) -> None:
        """Set the journal, the undo stack and the redo stack to copies of these."""
        self._entries, self.undo_stack, self.redo_stack = list(journal), list(done), list(undone)

    def apply(self, edits: Sequence[Edit], step: int) -> InverseEdit:
        """Apply edits as one group: all of them, or none if one fails.

        Raises:
            ValueError, TypeError: an edit is not possible; nothing has changed.
        """
        if not edits:
            raise ValueError("apply() was called without an edit: pass at least one")
        _check_edits(edits)
        before, what = self._sizes(), "; ".join(map(repr, edits))
        places = self._positions_in(what)
        rollbacks = self._editor.registry.snapshot_keys(), self._editor.layer_factory.snapshot_plans()
        try:
            with transaction(self._editor) as group:
                for edit in edits:
                    edit.execute(self._editor, group.execute)
                self._editor.layer_factory.check_fits()
        except BaseException:
            self._editor.layer_factory.unverified.clear()
            self.free_unreachable()  # the new layers, which are in no stack after the rollback
            for rollback in rollbacks:  # so that the next new layer gets the same key and initial weights
                rollback()
            raise
        for command in group.commands:  # after the group, because a failed group restores its layers
            command.finalize(self._editor)
        preserves = all(edit.preserves_function for edit in edits)
        policy = "; ".join(dict.fromkeys(edit.optimizer_policy for edit in edits))
        entry = self._add_entry("edit", what, -1, preserves, policy, before, step, places)
        self.undo_stack.append(UndoStep(entry.number, group.inverse))
        self.redo_stack.clear()
        self.free_unreachable()
        return InverseEdit(what, group.inverse, preserves)

    @contextmanager
    def try_edits(self, edits: Sequence[Edit]) -> Iterator[None]:
        """Apply edits as one group for a block, then undo them without an entry, a key or a layer left.

        Raises:
            ValueError, TypeError: an edit is not possible; nothing has changed.
        """
        _check_edits(edits)
        editor = self._editor
        restore_keys = editor.registry.snapshot_keys(), editor.layer_factory.snapshot_plans()
        try:
            with ExitStack() as rollbacks:
                rollbacks.callback(editor.store.edit_storage.rollback)
                group = Transaction(editor, rollbacks)
                for edit in edits:
                    edit.execute(editor, group.execute)
                editor.layer_factory.check_fits()
                editor.check_shared()
                yield
        finally:
            editor.layer_factory.unverified.clear()
            self.free_unreachable()  # layers that were made for the trial
            for restore in restore_keys:
                restore()

    def undo(self, step: int) -> JournalEntry:
        """Undo the last edit that was not undone.

        Raises:
            ValueError: there is no edit, or it freed the layers that it dropped.
        """
        return self._move_step("undo", self.undo_stack, self.redo_stack, step)

    def redo(self, step: int) -> JournalEntry:
        """Redo the edit that was undone last.

        Raises:
            ValueError: nothing was undone since the last new edit.
        """
        return self._move_step("redo", self.redo_stack, self.undo_stack, step)

    def record_loss(self, loss: float) -> None:
        """Store the loss of a finished step."""
        self.loss = loss

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the loss of the last step."""
        return partial(setattr, self, "loss", self.loss)

    def _move_step(
        self, kind: Literal["undo", "redo"], source: list[UndoStep], target: list[UndoStep], step: int
    ) -> JournalEntry:
        if not source:
            raise ValueError(f"there is nothing to {kind}: {_NOTHING[kind]}")
        number, commands = source[-1]
        before, edited = self._sizes(), self._entries[number]
        with transaction(self._editor) as group:
            for command in commands:
                group.execute(command)
        source.pop()  # after the group, which may fail
        target.append(UndoStep(number, group.inverse))
        policy = "as it was before" if kind == "undo" else "as it was when undone"
        what = f"{kind} {edited.what}"
        return self._add_entry(kind, what, number, edited.preserves_function, policy, before, step, edited.places)

    def _add_entry(
        self,
        kind: Any,
        what: str,
        of: int,
        preserves: bool,
        policy: str,
        before: tuple[int, int],
        step: int,
        places: Mapping[str, int],
    ) -> JournalEntry:
        params, nbytes = (now - old for now, old in zip(self._sizes(), before, strict=True))
        layers = len(self._editor.registry.layers)
        entry = JournalEntry(
            len(self._entries), step, kind, what, of, preserves, policy, layers, params, nbytes, places=places
        )
        self._entries.append(entry)
        return entry

    def _positions_in(self, what: str) -> Mapping[str, int]:
        """Return the positions of the layers whose keys occur in `what`."""
        return {unit.key: i for i, unit in enumerate(self._editor.registry.layers) if repr(unit.key) in what}

    def _sizes(self) -> tuple[int, int]:
        """Count the weights of all layers, shared ones once, and their bytes with the optimizer's state."""
        blocks = {block for unit in self._editor.registry.layers for block in unit.blocks}
        return sum(block.layout.used for block in blocks), self._editor.store.edit_storage.nbytes(blocks)

    def free_unreachable(self) -> None:
        """Free detached layers that no command can restore."""
        self._editor.free_unneeded(set(self.units))


def _check_edits(edits: Sequence[Edit]) -> None:
    wrong = next((edit for edit in edits if not isinstance(edit, Edit)), None)
    if wrong is not None:
        shown = repr(wrong)
        raise TypeError(
            f"apply() was called with {shown}, a {type(wrong).__name__}, which is not an edit: pass one argument for each edit, "
            f"as in apply(Drop({shown if isinstance(wrong, int | str) else 0}), Swap(0, 1))"
        )


_NOTHING = {"undo": "no edit is in force", "redo": "nothing was undone since the last edit"}
