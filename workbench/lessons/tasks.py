"""Tasks that a person does by hand in a workbench, and what of them is done."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from l2l_core.edits import JournalEntry
from workbench.session import Snapshot


class HasSnapshot(Protocol):
    """Names what tasks need of a session or a workbench."""

    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True)
class Task:
    """Describes something to do in the panels.

    Attributes:
        ask: what to do.
        where: to do it, as the view and the button.
        is_done: tells it from the session as it was when the tasks were set, and as it is now.
    """

    instruction: str
    location: str
    is_done: Callable[[Snapshot, Snapshot], bool]


def _branches_since(before: Snapshot, snapshot: Snapshot) -> set[str]:
    return {branch.name for branch in snapshot.branches} - {branch.name for branch in before.branches}


def _entries_since(before: Snapshot, snapshot: Snapshot) -> Sequence[tuple[JournalEntry, str]]:
    """Lines of the journal that were written since, and on which branch: the one of then, or one that is new."""
    known = max((entry.number for entry in before.journal), default=-1)
    made_on = {change.entry: change.branch for change in snapshot.changes}
    counting = {before.branch, *_branches_since(before, snapshot)}  # older ones have lines with numbers of their own
    since = [(entry, made_on.get(entry.number, "")) for entry in snapshot.journal if entry.number > known]
    return [(entry, branch) for entry, branch in since if branch in counting]


def _has_edit(entry: JournalEntry, kind: str, **fields: object) -> bool:
    """Whether among the edits of a line, as Python prints them, is one of this kind with these fields."""
    try:
        calls = [statement.value for statement in ast.parse(entry.what).body if isinstance(statement, ast.Expr)]
    except SyntaxError:  # a module in it prints itself in a way of its own; the edits of the tasks take none
        return False
    return entry.kind == "edit" and any(
        isinstance(call, ast.Call)
        and ast.unparse(call.func) == kind
        and fields.items() <= {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}.items()
        for call in calls
    )


def _identity_inserts(before: Snapshot, snapshot: Snapshot) -> set[int]:
    return {
        entry.number for entry, _ in _entries_since(before, snapshot) if _has_edit(entry, "Insert", init="identity")
    }


def _was_undone(before: Snapshot, snapshot: Snapshot) -> bool:
    inserted = _identity_inserts(before, snapshot)
    return any(entry.kind == "undo" and entry.of in inserted for entry, _ in _entries_since(before, snapshot))


def _was_dropped(before: Snapshot, snapshot: Snapshot) -> bool:
    new = _branches_since(before, snapshot)
    return any(branch in new and _has_edit(entry, "Drop") for entry, branch in _entries_since(before, snapshot))


def _was_raced(before: Snapshot, snapshot: Snapshot) -> bool:
    if snapshot.race is None or snapshot.race == before.race or not snapshot.race.is_over:
        return False
    made = [racer for racer in snapshot.race.racers if len(racer.steps) >= RACE_STEPS]
    names, new = {racer.name for racer in made}, _branches_since(before, snapshot)
    return any(racer.name in new and racer.parent in names for racer in made)


RACE_STEPS = 20

EDIT = Task(
    "insert a layer that is the identity, and see what the probe says of it",
    'view "edits", edit Insert, start as identity, then Apply',
    lambda before, now: bool(_identity_inserts(before, now)),
)
UNDO = Task("undo it", 'view "edits", Undo', _was_undone)
FORK = Task(
    "fork a branch, and drop a layer there",
    'view "edits", a name in "new branch", then Fork; then edit Drop, and Apply',
    _was_dropped,
)
RACE = Task(
    f"let the new branch and the one that it comes from race for {RACE_STEPS} steps",
    f'view "race", choose these two in the list and no other, steps {RACE_STEPS}, then Start race',
    _was_raced,
)


class Tasks:
    """Lists tasks and shows which are done. It shows itself at the end of a cell; running the cell again looks again.

    What happened before the tasks were set does not count, and what is done stays done.

    Args:
        bench: a workbench or a session, as it is now.
        tasks: in order.
    """

    def __init__(self, bench: HasSnapshot, *tasks: Task) -> None:
        self._bench, self._tasks = bench, tasks
        self._before = bench.snapshot()
        self._done: set[int] = set()

    def check(self) -> list[bool]:
        """Return which of them are done."""
        snapshot = self._bench.snapshot()
        self._done |= {i for i, task in enumerate(self._tasks) if task.is_done(self._before, snapshot)}
        return [i in self._done for i in range(len(self._tasks))]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        done = self.check()
        marked = [("✓" if is_done else "○", task) for is_done, task in zip(done, self._tasks, strict=True)]
        left = done.count(False)
        note = f"{left} of {len(done)} to do. Run this cell again to see what is done." if left else "All done."
        items = "".join(
            f"<li>{mark} {escape(task.instruction)} <em>({escape(task.location)})</em></li>" for mark, task in marked
        )
        return {
            "text/html": f'<strong>Your turn</strong><ul style="list-style:none">{items}</ul><p>{escape(note)}</p>',
            "text/plain": "\n".join(
                ["Your turn", *(f"{mark} {task.instruction} ({task.location})" for mark, task in marked), note]
            ),
        }
