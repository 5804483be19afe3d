"""What was edited, when, and what it did; and the way back.

Undo and redo are structural: what an edit changed comes back to the bit, other layers keep what they have learned since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from l2l_core.change import Change, Inverted
from l2l_core.edit import Do, Edit
from l2l_core.editor import Editor


@dataclass(frozen=True)
class Entry:
    """One line of the journal.

    Attributes:
        number: from 0.
        step: steps that were finished.
        kind: what happened; "undo" and "redo" name the entry in `of`.
        what: the edits in words.
        of: number of the entry that was undone or redone, -1 otherwise.
        preserves_function: whether the model computed the same afterwards.
        optimizer: what became of the optimizer's state.
        layers: number of layers afterwards.
        params: change of the number of weights.
        nbytes: change of the bytes of weights and optimizer state in the EPS.
        loss_before: of the last step before, None if there was none.
        loss_after: of the first step afterwards, None until then.
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
    loss_before: float | None
    loss_after: float | None = None


@dataclass(frozen=True)
class Inverse(Edit):
    """The way back from an edit, as an edit.

    Attributes:
        what: the edit in words.
        changes: what it did, in order.
    """

    what: str
    changes: tuple[Change, ...] = field(repr=False)
    preserved: bool

    @property
    def preserves_function(self) -> bool:
        return self.preserved

    def carry_out(self, editor: Editor, do: Do) -> None:
        for change in reversed(self.changes):
            do(Inverted(change))


class History:
    """Carries edits out, keeps the journal, and finds the way back.

    Invariant: `_done` are the edits that are in force, in order; a parked layer is kept as long as one of `_done` or
    `_undone` may bring it back.
    """

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._entries: list[Entry] = []
        self._done: list[tuple[int, tuple[Change, ...]]] = []
        self._undone: list[tuple[int, tuple[Change, ...]]] = []
        self._loss: float | None = None

    @property
    def journal(self) -> tuple[Entry, ...]:
        """What was edited so far, oldest first."""
        return tuple(self._entries)

    def continue_from(self, journal: Sequence[Entry]) -> None:
        """Take over the journal of a saved relay; what it did can be read, but not undone: its parked layers are not saved."""
        self._entries = list(journal)

    def apply(self, edits: Sequence[Edit], step: int) -> Inverse:
        """Carry out edits as one group: all of them, or none if one cannot be.

        Raises:
            ValueError, TypeError: of the edit that cannot be; everything is as it was.
        """
        changes: list[Change] = []
        before = self._sizes()
        try:
            with self._editor.atomic() as do:

                def note(change: Change) -> None:
                    do(change)
                    changes.append(change)

                for edit in edits:
                    edit.carry_out(self._editor, note)
        except BaseException:
            self._forget()  # layers that were made in vain
            raise
        for change in changes:
            change.settle(self._editor)
        what = "; ".join(map(repr, edits))
        preserves = all(edit.preserves_function for edit in edits)
        policy = "; ".join(dict.fromkeys(edit.optimizer_policy for edit in edits))
        entry = self._enter("edit", what, -1, preserves, policy, before, step)
        self._done.append((entry.number, tuple(changes)))
        self._undone.clear()
        self._forget()
        return Inverse(what, tuple(changes), preserves)

    def undo(self, step: int) -> Entry:
        """Undo the last edit that is in force.

        Raises:
            ValueError: there is none, or what it dropped was not parked.
        """
        return self._turn("undo", self._done, self._undone, step)

    def redo(self, step: int) -> Entry:
        """Do again what was undone last.

        Raises:
            ValueError: there is nothing; a new edit ends what could be redone.
        """
        return self._turn("redo", self._undone, self._done, step)

    def note_loss(self, loss: float) -> None:
        """A step is finished."""
        self._loss = loss
        for i in range(len(self._entries) - 1, -1, -1):
            if self._entries[i].loss_after is not None:
                break
            self._entries[i] = replace(self._entries[i], loss_after=loss)

    def snapshot(self) -> Callable[[], None]:
        """Keep what is known of losses; the result forgets what steps have told since."""
        entries, loss = list(self._entries), self._loss

        def put_back() -> None:
            self._entries, self._loss = entries, loss

        return put_back

    def _turn(self, kind: Literal["undo", "redo"], source: list[Any], target: list[Any], step: int) -> Entry:
        if not source:
            raise ValueError(f"there is nothing to {kind}: {_NOTHING[kind]}")
        number, changes = source[-1]
        before, edited = self._sizes(), self._entries[number]
        with self._editor.atomic() as do:
            for change in reversed(changes) if kind == "undo" else changes:
                do(Inverted(change) if kind == "undo" else change)
        target.append(source.pop())
        policy = "as it was before" if kind == "undo" else "as it was when undone"
        return self._enter(kind, f"{kind} {edited.what}", number, edited.preserves_function, policy, before, step)

    def _enter(
        self, kind: Any, what: str, of: int, preserves: bool, policy: str, before: tuple[int, int], step: int
    ) -> Entry:
        params, nbytes = (now - old for now, old in zip(self._sizes(), before, strict=True))
        layers = len(self._editor.layers)
        entry = Entry(len(self._entries), step, kind, what, of, preserves, policy, layers, params, nbytes, self._loss)
        self._entries.append(entry)
        return entry

    def _sizes(self) -> tuple[int, int]:
        """Weights of all layers, and their bytes with the optimizer's state."""
        layers = self._editor.layers
        return sum(u.num_params for u in layers), sum(u.nbytes for u in layers) + self._editor.store.optimizer_bytes

    def _forget(self) -> None:
        self._editor.forget(
            {u for _, changes in (*self._done, *self._undone) for change in changes for u in change.units()}
        )


_NOTHING = {"undo": "no edit is in force", "redo": "nothing was undone since the last edit"}
