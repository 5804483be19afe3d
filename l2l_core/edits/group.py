"""Changes that are done together or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from l2l_core.edits.change import Change
from l2l_core.edits.editor import Editor


@dataclass(eq=False)
class Group:
    """Changes that have been done, and what takes them back.

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
        self.ways_back.callback(done.put_back or partial(done.inverse.do, self.editor))
        self._backwards.append(done.inverse)
        self.changes.append(change)

    @property
    def inverse(self) -> tuple[Change, ...]:
        """What takes the group back, in the order in which it has to be done."""
        return tuple(reversed(self._backwards))


@contextmanager
def all_or_nothing(editor: Editor) -> Iterator[Group]:
    """A group to which the block adds changes; if the block fails, or they let shared weights go, they are taken back."""
    with ExitStack() as ways_back:
        yield Group(editor, ways_back)
        editor.check_shared()
        ways_back.pop_all()  # not kept: they know layers that the group may have freed
