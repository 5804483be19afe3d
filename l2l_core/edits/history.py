"""What was edited, when, and what it did; and the way back.

Undo and redo are structural: what an edit changed comes back to the bit, other layers keep what they have learned since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from l2l_core.edits.commands import EditCommand, Transaction, transaction
from l2l_core.edits.edit import Edit, RunCommand
from l2l_core.edits.editor import Editor
from l2l_core.eps.blocks import Unit


@dataclass(frozen=True)
class JournalEntry:
    """Is one line of the journal.

    Attributes:
        number: from 0.
        step: steps that were finished.
        kind: what happened; "undo" and "redo" name the entry in `of`.
        what: the edits in words.
        of: number of the entry that was undone or redone, -1 otherwise.
        preserves_function: whether the model computed the same afterwards: to the bit, but that layers which end in a norm
            are inserted up to its eps (`identity.py`).
        optimizer: what became of the optimizer's state.
        layers: number of layers afterwards.
        params: change of the number of weights.
        nbytes: change of the bytes of weights and optimizer state in the EPS.
        places: position among all layers, just before, of those that `what` names by key.
    """

    number: int
    step: int
    kind: Literal["edit", "undo", "redo"]
    what: str
    of: int
    preserves_function: bool
    optimizer: str
    layers: int
    params: int
    nbytes: int
    places: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class InverseEdit(Edit):
    """Is the way back from an edit, as an edit.

    Attributes:
        what: the edit in words.
        changes: what takes it back, in order.
    """

    what: str
    commands: tuple[EditCommand, ...] = field(repr=False)
    preserved: bool

    @property
    def preserves_function(self) -> bool:
        return self.preserved

    def execute(self, editor: Editor, run: RunCommand) -> None:
        for change in self.commands:
            run(change)


class UndoStep(NamedTuple):
    """Says how an edit is undone, or done again.

    Attributes:
        number: of its entry.
        changes: what does that, in order.
    """

    number: int
    commands: tuple[EditCommand, ...]


class History:
    """Carries edits out, keeps the journal, and finds the way back.

    Invariant: `done` says of the edits that are in force, in order, what undoes them, and `undone` what would do the others
    again; a parked layer is kept as long as one of both may bring it back.
    """

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._entries: list[JournalEntry] = []
        self.undo_stack: list[UndoStep] = []
        self.redo_stack: list[UndoStep] = []
        self.loss: float | None = None  # of the last step

    def copy(self) -> History:
        """Copy the past, for a branch that goes its own way."""
        twin = History(self._editor)
        # Lists of its own suffice: entries and turns are values, and changes never change themselves
        twin._entries, twin.undo_stack, twin.redo_stack = (
            list(self._entries),
            list(self.undo_stack),
            list(self.redo_stack),
        )
        twin.loss = self.loss
        return twin

    @property
    def journal(self) -> tuple[JournalEntry, ...]:
        """What was edited so far, oldest first."""
        return tuple(self._entries)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Layers that an undo or a redo may bring back or change, each once."""
        turns = (*self.undo_stack, *self.redo_stack)
        return tuple(dict.fromkeys(unit for turn in turns for change in turn.commands for unit in change.units()))

    def restore(self, journal: Sequence[JournalEntry], done: Sequence[UndoStep], undone: Sequence[UndoStep]) -> None:
        """Take over the past of a saved relay."""
        self._entries, self.undo_stack, self.redo_stack = list(journal), list(done), list(undone)

    def apply(self, edits: Sequence[Edit], step: int) -> InverseEdit:
        """Carry out edits as one group: all of them, or none if one cannot be.

        Raises:
            ValueError, TypeError: of the edit that cannot be; everything is as it was.
        """
        if not edits:
            raise ValueError(
                "apply() was given no edit, so there is nothing to do and nothing to undo: give at least one"
            )
        _check_edits(edits)
        before, what = self._sizes(), "; ".join(map(repr, edits))
        places = self._positions_in(what)
        put_back = self._editor.registry.snapshot_keys(), self._editor.layer_factory.snapshot_plans()
        try:
            with transaction(self._editor) as group:
                for edit in edits:
                    edit.execute(self._editor, group.execute)
                self._editor.layer_factory.check_fits()
        except BaseException:
            self._editor.layer_factory.unverified.clear()
            self.free_unreachable()  # layers that were made in vain; the group has put everything back by now
            for way_back in put_back:  # the next new layer has the key, and the first weights, that it would have had
                way_back()
            raise
        for change in group.commands:  # only now: a group that fails brings its layers back
            change.finalize(self._editor)
        preserves = all(edit.preserves_function for edit in edits)
        policy = "; ".join(dict.fromkeys(edit.optimizer_policy for edit in edits))
        entry = self._add_entry("edit", what, -1, preserves, policy, before, step, places)
        self.undo_stack.append(UndoStep(entry.number, group.inverse))
        self.redo_stack.clear()
        self.free_unreachable()
        return InverseEdit(what, group.inverse, preserves)

    @contextmanager
    def try_edits(self, edits: Sequence[Edit]) -> Iterator[None]:
        """Let edits be in force in a block, as one group; after it nothing tells that they were: no line, no key, no layer.

        Raises:
            ValueError, TypeError: of the edit that cannot be; everything is as it was.
        """
        _check_edits(edits)
        editor = self._editor
        put_keys_back = editor.registry.snapshot_keys(), editor.layer_factory.snapshot_plans()
        try:
            with ExitStack() as ways_back:  # exact, since nothing else is changed meanwhile
                ways_back.callback(editor.store.edit_storage.rollback)
                group = Transaction(editor, ways_back)
                for edit in edits:
                    edit.execute(editor, group.execute)
                editor.layer_factory.check_fits()
                editor.check_shared()
                yield
        finally:
            editor.layer_factory.unverified.clear()
            self.free_unreachable()  # layers that were made for the trial
            for put_back in put_keys_back:
                put_back()

    def undo(self, step: int) -> JournalEntry:
        """Undo the last edit that is in force.

        Raises:
            ValueError: there is none, or what it dropped was not parked.
        """
        return self._move_step("undo", self.undo_stack, self.redo_stack, step)

    def redo(self, step: int) -> JournalEntry:
        """Do again what was undone last.

        Raises:
            ValueError: there is nothing; a new edit ends what could be redone.
        """
        return self._move_step("redo", self.redo_stack, self.undo_stack, step)

    def record_loss(self, loss: float) -> None:
        """Note the loss of a step that is finished."""
        self.loss = loss

    def snapshot(self) -> Callable[[], None]:
        """Keep the loss of the last step; the result forgets what steps have told since."""
        loss = self.loss

        def put_back() -> None:
            self.loss = loss

        return put_back

    def _move_step(
        self, kind: Literal["undo", "redo"], source: list[UndoStep], target: list[UndoStep], step: int
    ) -> JournalEntry:
        if not source:
            raise ValueError(f"there is nothing to {kind}: {_NOTHING[kind]}")
        number, changes = source[-1]
        before, edited = self._sizes(), self._entries[number]
        with transaction(self._editor) as group:
            for change in changes:
                group.execute(change)
        source.pop()  # only now: a group that fails leaves the turn where it was
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
        """Where the layers are now that edits, as they print themselves, name by key."""
        return {unit.key: i for i, unit in enumerate(self._editor.registry.layers) if repr(unit.key) in what}

    def _sizes(self) -> tuple[int, int]:
        """Count the weights of all layers, shared ones once, and their bytes with the optimizer's state."""
        blocks = {block for unit in self._editor.registry.layers for block in unit.blocks}
        return sum(block.layout.used for block in blocks), self._editor.store.edit_storage.nbytes(blocks)

    def free_unreachable(self) -> None:
        """Free layers that nothing can bring back any more."""
        self._editor.free_unneeded(set(self.units))


def _check_edits(edits: Sequence[Edit]) -> None:
    if strangers := [edit for edit in edits if not isinstance(edit, Edit)]:
        shown = repr(strangers[0])
        raise TypeError(
            f"apply() was given {shown}, a {type(strangers[0]).__name__} and no edit: say what is to be done, as in "
            f"apply(Drop({shown if isinstance(strangers[0], int | str) else 0}), Swap(0, 1)), one argument for each edit"
        )


_NOTHING = {"undo": "no edit is in force", "redo": "nothing was undone since the last edit"}
