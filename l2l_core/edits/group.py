"""Changes that are done together or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from l2l_core.edits.change import Change
from l2l_core.edits.editor import Editor


@dataclass(eq=False)
class Group:
    """Changes that have been done, and what takes them back.

    Attributes:
        changes: in order.
    """

    editor: Editor
    changes: list[Change] = field(default_factory=list)
    _backwards: list[Change] = field(default_factory=list)

    def do(self, change: Change) -> None:
        """Carry out one more."""
        self._backwards.append(change.do(self.editor))
        self.changes.append(change)

    @property
    def inverse(self) -> tuple[Change, ...]:
        """What takes the group back, in the order in which it has to be done."""
        return tuple(reversed(self._backwards))


@contextmanager
def all_or_nothing(editor: Editor) -> Iterator[Group]:
    """A group to which the block adds changes; if the block fails, or they let shared weights go, they are taken back."""
    group = Group(editor)
    try:
        yield group
        editor.check_shared()
    except BaseException:
        for change in group.inverse:
            editor.take_back(change)
        raise
    finally:
        editor.put_back.clear()  # it knows layers that are gone
