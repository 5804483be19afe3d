"""Tasks to do by hand in a workbench, and checks that they are done."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from l2l_core.edits import JournalEntry
from workbench.session import Snapshot


class HasSnapshot(Protocol):
    """Interface that tasks need of a session or a workbench."""

    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True)
class Task:
    """A task to do in the panels.

    Attributes:
        instruction: task in words.
        location: view and button to use.
        is_done: decides from the snapshots at the start and now whether the task is done.
    """

    instruction: str
    location: str
    is_done: Callable[[Snapshot, Snapshot], bool]


def _branches_since(before: Snapshot, snapshot: Snapshot) -> set[str]:
    return {branch.name for branch in snapshot.branches} - {branch.name for branch in before.branches}


def _entries_since(before: Snapshot, snapshot: Snapshot) -> Sequence[tuple[JournalEntry, str]]:
    """Return the journal entries since `before` with their branches: the branch of then, or a new one."""
    last = max((entry.number for entry in before.journal), default=-1)
    made_on = {change.entry: change.branch for change in snapshot.changes}
    branches = {before.branch, *_branches_since(before, snapshot)}  # entries of older branches have separate numbers
    since = [(entry, made_on.get(entry.number, "")) for entry in snapshot.journal if entry.number > last]
    return [(entry, branch) for entry, branch in since if branch in branches]


def _has_edit(entry: JournalEntry, kind: str, **fields: object) -> bool:
    """Return True if an entry has an edit of this kind with these fields, in its printed form."""
    try:
        calls = [statement.value for statement in ast.parse(entry.what).body if isinstance(statement, ast.Expr)]
    except SyntaxError:  # an edit with a module has no parsable form; edits of the tasks have none
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
    "insert a layer that is the identity, and read the change of the probe's loss",
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
    f"let the new branch and its parent branch race for {RACE_STEPS} steps",
    f'view "race", choose these two in the list and no other, steps {RACE_STEPS}, then Start race',
    _was_raced,
)


class Tasks:
    """List of tasks with marks for those that are done, shown at the end of a cell.

    Running the cell again checks the tasks again. Actions before this list was made do not count; a done task stays done.

    Args:
        bench: a workbench or a session.
        tasks: tasks in order.
    """

    def __init__(self, bench: HasSnapshot, *tasks: Task) -> None:
        self._bench, self._tasks = bench, tasks
        self._before = bench.snapshot()
        self._done: set[int] = set()

    def check(self) -> list[bool]:
        """Return for each task whether it is done."""
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
