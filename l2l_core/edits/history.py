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
    # Numbers of loops that edits have set, by dotted name, afterwards.
    loops: Mapping[str, int] = field(default_factory=dict, hash=False)


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
        self.journal: tuple[JournalEntry, ...] = ()  # oldest first
        self.undo_stack: list[UndoStep] = []
        self.redo_stack: list[UndoStep] = []
        self.loss: float | None = None  # of the last step

    def copy(self) -> History:
        """Copy the history, for a branch."""
        twin = History(self._editor)
        twin.restore(self.journal, self.undo_stack, self.redo_stack)
        twin.loss = self.loss
        return twin

    @property
    def units(self) -> tuple[Unit, ...]:
        """Layers that an undo or a redo may restore or change, each once."""
        steps = (*self.undo_stack, *self.redo_stack)
        return tuple(dict.fromkeys(unit for step in steps for command in step.commands for unit in command.units()))

    def restore(self, journal: Sequence[JournalEntry], done: Sequence[UndoStep], undone: Sequence[UndoStep]) -> None:
        """Set the journal, the undo stack and the redo stack to copies of these."""
        self.journal, self.undo_stack, self.redo_stack = tuple(journal), list(done), list(undone)

    def apply(self, edits: Sequence[Edit], step: int) -> InverseEdit:
        """Apply edits as one group: all of them, or none if one fails.

        Raises:
            ValueError, TypeError: an edit is not possible; nothing has changed.
        """
        if not edits:
            raise ValueError("apply() was called without an edit: pass at least one")
        _check_edits(edits)
        before, what = self._sizes(), "; ".join(map(repr, edits))
        places = {unit.key: i for i, unit in enumerate(self._editor.registry.layers) if repr(unit.key) in what}
        remove_new_layers = self._new_layers_remover()
        try:
            with transaction(self._editor) as group:
                for edit in edits:
                    edit.execute(self._editor, group.execute)
                self._editor.layer_factory.check_fits()
        except BaseException:
            remove_new_layers()
            raise
        self._editor.layer_factory.forget_given()
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
        editor, remove_new_layers = self._editor, self._new_layers_remover()
        try:
            with ExitStack() as rollbacks:
                rollbacks.callback(editor.store.storage.rollback)
                group = Transaction(editor, rollbacks)
                for edit in edits:
                    edit.execute(editor, group.execute)
                editor.layer_factory.check_fits()
                editor.check_shared()
                yield
        finally:
            remove_new_layers()

    def _new_layers_remover(self) -> Callable[[], None]:
        """Return a function that removes the layers made since, which are in no stack by then."""
        registry, factory = self._editor.registry, self._editor.layer_factory
        rollbacks = registry.snapshot_keys(), factory.snapshot_plans()

        def remove() -> None:
            factory.restore_given()
            self.free_unreachable()
            for rollback in rollbacks:  # so that the next new layer gets the same key and initial weights
                rollback()

        return remove

    def undo(self, step: int) -> JournalEntry:
        """Undo the last edit that was not undone; raise ValueError if that is not possible."""
        return self._move_step("undo", self.undo_stack, self.redo_stack, step)

    def redo(self, step: int) -> JournalEntry:
        """Redo the edit that was undone last; raise ValueError if that is not possible."""
        return self._move_step("redo", self.redo_stack, self.undo_stack, step)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the loss of the last step."""
        return partial(setattr, self, "loss", self.loss)

    def _move_step(
        self, kind: Literal["undo", "redo"], source: list[UndoStep], target: list[UndoStep], step: int
    ) -> JournalEntry:
        if not source:
            raise ValueError(f"there is nothing to {kind}: {_NOTHING[kind]}")
        number, commands = source[-1]
        before, edited = self._sizes(), self.journal[number]
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
        number, layers = len(self.journal), len(self._editor.registry.layers)
        loops = {name: n for numbers in self._editor.registry.loops.values() for name, n in numbers.items()}
        entry = JournalEntry(number, step, kind, what, of, preserves, policy, layers, params, nbytes, places, loops)
        self.journal = (*self.journal, entry)
        return entry

    def _sizes(self) -> tuple[int, int]:
        """Count the weights of all layers, shared ones once, and their bytes with the optimizer's state."""
        blocks = {block for unit in self._editor.registry.layers for block in unit.blocks}
        return sum(block.layout.used for block in blocks), self._editor.store.storage.nbytes(blocks)

    def free_unreachable(self) -> None:
        """Free detached layers that no command can restore."""
        self._editor.free_unneeded(set(self.units))


def _check_edits(edits: Sequence[Edit]) -> None:
    for edit in edits:
        if not isinstance(edit, Edit):
            raise TypeError(
                f"apply() was called with {edit!r}, a {type(edit).__name__}, which is not an edit: pass one argument for each "
                f"edit, as in apply(Drop({repr(edit) if isinstance(edit, int | str) else 0}), Swap(0, 1))"
            )


_NOTHING = {"undo": "no edit is in force", "redo": "nothing was undone since the last edit"}
