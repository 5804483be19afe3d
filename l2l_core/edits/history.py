"""What was edited, when, and what it did; and the way back.

Undo and redo are structural: what an edit changed comes back to the bit, other layers keep what they have learned since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from l2l_core.edits.change import Change, Group, all_or_nothing
from l2l_core.edits.edit import Do, Edit
from l2l_core.edits.editor import Editor
from l2l_core.eps.blocks import Unit


@dataclass(frozen=True)
class Entry:
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
class Inverse(Edit):
    """Is the way back from an edit, as an edit.

    Attributes:
        what: the edit in words.
        changes: what takes it back, in order.
    """

    what: str
    changes: tuple[Change, ...] = field(repr=False)
    preserved: bool

    @property
    def preserves_function(self) -> bool:
        return self.preserved

    def carry_out(self, editor: Editor, do: Do) -> None:
        for change in self.changes:
            do(change)


class Turn(NamedTuple):
    """Says how an edit is undone, or done again.

    Attributes:
        number: of its entry.
        changes: what does that, in order.
    """

    number: int
    changes: tuple[Change, ...]


class History:
    """Carries edits out, keeps the journal, and finds the way back.

    Invariant: `done` says of the edits that are in force, in order, what undoes them, and `undone` what would do the others
    again; a parked layer is kept as long as one of both may bring it back.
    """

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._entries: list[Entry] = []
        self.done: list[Turn] = []
        self.undone: list[Turn] = []
        self.loss: float | None = None  # of the last step

    def copy(self) -> History:
        """Copy the past, for a branch that goes its own way."""
        twin = History(self._editor)
        # Lists of its own suffice: entries and turns are values, and changes never change themselves
        twin._entries, twin.done, twin.undone = list(self._entries), list(self.done), list(self.undone)
        twin.loss = self.loss
        return twin

    @property
    def journal(self) -> tuple[Entry, ...]:
        """What was edited so far, oldest first."""
        return tuple(self._entries)

    @property
    def units(self) -> tuple[Unit, ...]:
        """Layers that an undo or a redo may bring back or change, each once."""
        turns = (*self.done, *self.undone)
        return tuple(dict.fromkeys(unit for turn in turns for change in turn.changes for unit in change.units()))

    def continue_from(self, journal: Sequence[Entry], done: Sequence[Turn], undone: Sequence[Turn]) -> None:
        """Take over the past of a saved relay."""
        self._entries, self.done, self.undone = list(journal), list(done), list(undone)

    def apply(self, edits: Sequence[Edit], step: int) -> Inverse:
        """Carry out edits as one group: all of them, or none if one cannot be.

        Raises:
            ValueError, TypeError: of the edit that cannot be; everything is as it was.
        """
        if not edits:
            raise ValueError(
                "apply() was given no edit, so there is nothing to do and nothing to undo: give at least one"
            )
        _check(edits)
        before, what = self._sizes(), "; ".join(map(repr, edits))
        places = self._places_in(what)
        put_back = self._editor.lineup.keep_keys(), self._editor.new_layers.keep_plans()
        try:
            with all_or_nothing(self._editor) as group:
                for edit in edits:
                    edit.carry_out(self._editor, group.do)
                self._editor.new_layers.try_out()
        except BaseException:
            self._editor.new_layers.untried.clear()
            self.forget()  # layers that were made in vain; the group has put everything back by now
            for way_back in put_back:  # the next new layer has the key, and the first weights, that it would have had
                way_back()
            raise
        for change in group.changes:  # only now: a group that fails brings its layers back
            change.settle(self._editor)
        preserves = all(edit.preserves_function for edit in edits)
        policy = "; ".join(dict.fromkeys(edit.optimizer_policy for edit in edits))
        entry = self._enter("edit", what, -1, preserves, policy, before, step, places)
        self.done.append(Turn(entry.number, group.inverse))
        self.undone.clear()
        self.forget()
        return Inverse(what, group.inverse, preserves)

    @contextmanager
    def trying(self, edits: Sequence[Edit]) -> Iterator[None]:
        """Let edits be in force in a block, as one group; after it nothing tells that they were: no line, no key, no layer.

        Raises:
            ValueError, TypeError: of the edit that cannot be; everything is as it was.
        """
        _check(edits)
        editor = self._editor
        put_keys_back = editor.lineup.keep_keys(), editor.new_layers.keep_plans()
        try:
            with ExitStack() as ways_back:  # exact, since nothing else is changed meanwhile
                ways_back.callback(editor.store.at_hand.abandon)
                group = Group(editor, ways_back)
                for edit in edits:
                    edit.carry_out(editor, group.do)
                editor.new_layers.try_out()
                editor.check_shared()
                yield
        finally:
            editor.new_layers.untried.clear()
            self.forget()  # layers that were made for the trial
            for put_back in put_keys_back:
                put_back()

    def undo(self, step: int) -> Entry:
        """Undo the last edit that is in force.

        Raises:
            ValueError: there is none, or what it dropped was not parked.
        """
        return self._turn("undo", self.done, self.undone, step)

    def redo(self, step: int) -> Entry:
        """Do again what was undone last.

        Raises:
            ValueError: there is nothing; a new edit ends what could be redone.
        """
        return self._turn("redo", self.undone, self.done, step)

    def note_loss(self, loss: float) -> None:
        """Note the loss of a step that is finished."""
        self.loss = loss

    def snapshot(self) -> Callable[[], None]:
        """Keep the loss of the last step; the result forgets what steps have told since."""
        loss = self.loss

        def put_back() -> None:
            self.loss = loss

        return put_back

    def _turn(self, kind: Literal["undo", "redo"], source: list[Turn], target: list[Turn], step: int) -> Entry:
        if not source:
            raise ValueError(f"there is nothing to {kind}: {_NOTHING[kind]}")
        number, changes = source[-1]
        before, edited = self._sizes(), self._entries[number]
        with all_or_nothing(self._editor) as group:
            for change in changes:
                group.do(change)
        source.pop()  # only now: a group that fails leaves the turn where it was
        target.append(Turn(number, group.inverse))
        policy = "as it was before" if kind == "undo" else "as it was when undone"
        what = f"{kind} {edited.what}"
        return self._enter(kind, what, number, edited.preserves_function, policy, before, step, edited.places)

    def _enter(
        self,
        kind: Any,
        what: str,
        of: int,
        preserves: bool,
        policy: str,
        before: tuple[int, int],
        step: int,
        places: Mapping[str, int],
    ) -> Entry:
        params, nbytes = (now - old for now, old in zip(self._sizes(), before, strict=True))
        layers = len(self._editor.lineup.layers)
        entry = Entry(
            len(self._entries), step, kind, what, of, preserves, policy, layers, params, nbytes, places=places
        )
        self._entries.append(entry)
        return entry

    def _places_in(self, what: str) -> Mapping[str, int]:
        """Where the layers are now that edits, as they print themselves, name by key."""
        return {unit.key: i for i, unit in enumerate(self._editor.lineup.layers) if repr(unit.key) in what}

    def _sizes(self) -> tuple[int, int]:
        """Count the weights of all layers, shared ones once, and their bytes with the optimizer's state."""
        blocks = {block for unit in self._editor.lineup.layers for block in unit.blocks}
        return sum(block.layout.used for block in blocks), self._editor.store.at_hand.nbytes(blocks)

    def forget(self) -> None:
        """Free layers that nothing can bring back any more."""
        self._editor.forget(set(self.units))


def _check(edits: Sequence[Edit]) -> None:
    if strangers := [edit for edit in edits if not isinstance(edit, Edit)]:
        shown = repr(strangers[0])
        raise TypeError(
            f"apply() was given {shown}, a {type(strangers[0]).__name__} and no edit: say what is to be done, as in "
            f"apply(Drop({shown if isinstance(strangers[0], int | str) else 0}), Swap(0, 1)), one argument for each edit"
        )


_NOTHING = {"undo": "no edit is in force", "redo": "nothing was undone since the last edit"}
