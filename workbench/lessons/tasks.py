"""Tasks that a person does by hand in a workbench, and what of them is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from workbench.session import Snapshot


class Watched(Protocol):
    """Names what tasks need of a session or a workbench."""

    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True)
class Task:
    """Something to do in the panels.

    Attributes:
        ask: what to do.
        where: to do it, as the view and the button.
        is_done: tells it from the session as it was when the tasks were set, and as it is now.
    """

    ask: str
    where: str
    is_done: Callable[[Snapshot, Snapshot], bool]


def _edits(before: Snapshot, now: Snapshot, kind: str) -> bool:
    known = max((entry.number for entry in before.journal), default=-1)
    return any(entry.kind == kind and entry.number > known for entry in now.journal)


def _raced(before: Snapshot, now: Snapshot) -> bool:
    return (
        now.race is not None and now.race.is_over and now.race != before.race and any(r.steps for r in now.race.racers)
    )


EDIT = Task(
    "insert a layer that is the identity, and see what the probe says of it",
    'view "edits", edit Insert, start as identity, then Apply',
    lambda before, now: _edits(before, now, "edit"),
)
UNDO = Task("undo it", 'view "edits", Undo', lambda before, now: _edits(before, now, "undo"))
FORK = Task(
    "fork a branch, and drop a layer there",
    'view "edits", "new branch", then Fork',
    lambda before, now: bool({branch.name for branch in now.branches} - {branch.name for branch in before.branches}),
)
RACE = Task("let both branches race for 20 steps", 'view "race", mark both branches, then Start race', _raced)


class Tasks:
    """A list of tasks that shows what is done. At the end of a cell it shows the list; running the cell again looks again.

    What happened before the tasks were set does not count, and what is done stays done.

    Args:
        bench: a workbench or a session, as it is now.
        tasks: in order.
    """

    def __init__(self, bench: Watched, *tasks: Task) -> None:
        self._bench, self._tasks = bench, tasks
        self._before = bench.snapshot()
        self._done: set[int] = set()

    def look(self) -> list[bool]:
        """Which of them are done."""
        now = self._bench.snapshot()
        self._done |= {i for i, task in enumerate(self._tasks) if task.is_done(self._before, now)}
        return [i in self._done for i in range(len(self._tasks))]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        done = self.look()
        marked = [("✓" if is_done else "○", task) for is_done, task in zip(done, self._tasks, strict=True)]
        left = done.count(False)
        note = f"{left} of {len(done)} to do. Run this cell again to see what is done." if left else "All done."
        items = "".join(f"<li>{mark} {escape(task.ask)} <em>({escape(task.where)})</em></li>" for mark, task in marked)
        return {
            "text/html": f'<strong>Your turn</strong><ul style="list-style:none">{items}</ul><p>{escape(note)}</p>',
            "text/plain": "\n".join(
                ["Your turn", *(f"{mark} {task.ask} ({task.where})" for mark, task in marked), note]
            ),
        }
