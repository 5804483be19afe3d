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
from l2l_core.edits.optimizer_state import Held
from l2l_core.eps.blocks import Unit


class Done(NamedTuple):
    """Says how a change that has been carried out is taken back.

    Attributes:
        inverse: the change that takes it back, now or later.
        put_back: takes it back more exactly, as long as nothing else has changed since; None: the inverse is exact.
    """

    inverse: Change
    put_back: Callable[[], object] | None = None


class Change(ABC):
    """Is a step of an edit.

    Invariant: it never changes itself, so that several branches may hold it.
    """

    @abstractmethod
    def do(self, editor: Editor) -> Done:
        """Carry it out; returns what takes it back.

        Raises:
            ValueError: it cannot be done as things are now; nothing is changed then.
        """

    def settle(self, editor: Editor) -> None:  # noqa: B027 - most changes have nothing that cannot be undone
        """Hear that the group of edits that it belongs to is done."""

    def units(self) -> Sequence[Unit]:
        """List the layers that must stay available for as long as it may be done."""
        return ()


@dataclass(frozen=True, eq=False)
class Restack(Change):
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

    def do(self, editor: Editor) -> Done:
        put_back = editor.restack(self.stack, self.before, self.after, self.like, self.proven)
        return Done(Restack(self.stack, self.after, self.before, self.like, proven=True), put_back)

    def units(self) -> Sequence[Unit]:
        return (*self.before, *self.after)


@dataclass(frozen=True, eq=False)
class Rewrite(Change):
    """Gives some parameters of a layer other values, and the optimizer other knowledge of them.

    Attributes:
        unit: the layer.
        values: by parameter of its module: the new values and state (None: the optimizer starts anew).
    """

    unit: Unit
    values: Mapping[nn.Parameter, Held]

    def do(self, editor: Editor) -> Done:
        inverse = Rewrite(self.unit, editor.exchange(self.unit, self.values))
        editor.book_kept(inverse, inverse.values.values())  # for as long as some history or branch holds the inverse
        return Done(inverse, editor.store.at_hand.way_back(partial(inverse.do, editor)))

    def units(self) -> Sequence[Unit]:
        return (self.unit,)


@dataclass(frozen=True, eq=False)
class Retrain(Change):
    """Says which parameters are trained from now on, or no longer.

    Attributes:
        unit: the layer.
        trained: whether they are, by parameter.
    """

    unit: Unit
    trained: Mapping[nn.Parameter, bool]

    def do(self, editor: Editor) -> Done:
        return Done(Retrain(self.unit, editor.set_trained(self.unit, self.trained)))

    def units(self) -> Sequence[Unit]:
        return (self.unit,)


@dataclass(frozen=True, eq=False)
class _OfParked(Change):
    parked: tuple[Unit, ...]


@dataclass(frozen=True, eq=False)
class Spill(_OfParked):
    """Lets parked layers wait on disk; whatever brings them back fetches them."""

    def do(self, editor: Editor) -> Done:
        for unit in self.parked:
            editor.parking.spill(unit)
        return Done(Fetch(self.parked))


@dataclass(frozen=True, eq=False)
class Fetch(_OfParked):
    """Brings parked layers back to memory."""

    def do(self, editor: Editor) -> Done:
        for unit in self.parked:
            editor.parking.fetch(unit)
        return Done(Spill(self.parked))


@dataclass(frozen=True, eq=False)
class Lose(_OfParked):
    """Frees parked layers once the whole group of edits is done: from then on there is no way back."""

    def do(self, editor: Editor) -> Done:
        return Done(self)  # without effect both ways: only `settle` frees, when nothing can fail any more

    def settle(self, editor: Editor) -> None:
        for unit in self.parked:
            editor.lose(unit)


@dataclass(frozen=True, eq=False)
class Barred(Change):
    """Stands for what cannot be done any more.

    Attributes:
        why: in words.
    """

    why: str

    def do(self, editor: Editor) -> Done:
        raise ValueError(self.why)


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Group:
    """Holds changes that have been done, and what takes them back.

    Attributes:
        ways_back: gets what takes each change back while nothing else changes; the inverse may be less exact.
        changes: in order.
    """

    editor: Editor
    ways_back: ExitStack
    changes: list[Change] = field(default_factory=list)
    _backwards: list[Change] = field(default_factory=list)

    def do(self, change: Change) -> None:
        """Carry out one more."""
        done = change.do(self.editor)
        # As each is done: if a later one fails, the exit takes back those before it, the last one first
        self.ways_back.callback(done.put_back or partial(done.inverse.do, self.editor))
        self._backwards.append(done.inverse)
        self.changes.append(change)

    @property
    def inverse(self) -> tuple[Change, ...]:
        """What takes the group back, in the order in which it has to be done."""
        return tuple(reversed(self._backwards))


@contextmanager
def all_or_nothing(editor: Editor) -> Iterator[Group]:
    """Open a group for the changes of a block; if it fails, lets shared weights go or cannot be committed, it is taken back."""
    with ExitStack() as ways_back:
        ways_back.callback(editor.store.at_hand.abandon)  # the last of all, when memory is as it was
        yield Group(editor, ways_back)
        editor.check_shared()
        editor.commit()
        ways_back.pop_all()  # not kept: they know layers that the group may have freed
