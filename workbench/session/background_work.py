"""Progress of work between steps that takes long and can be cancelled: evaluations and the learning-rate finder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


class WorkCancelled(ValueError):
    """Raised in work that was cancelled; training is as before it."""


@dataclass(frozen=True, slots=True)
class WorkRow:
    """Work in progress.

    Attributes:
        state: short name of the state, such as "evaluating".
        unit: plural of the counted parts, such as "held-out batches".
        done: number of finished parts.
        total: number of all parts; None if it is not known.
        elapsed_s: seconds since the work began.
    """

    state: str
    unit: str
    done: int
    total: int | None
    elapsed_s: float

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the end; None before the first part, and if the total is not known."""
        if self.total is None or not self.done:
            return None
        return self.elapsed_s / self.done * max(0, self.total - self.done)


class BackgroundWork:
    """The work in progress, if there is any.

    Invariant: `row` is replaced on the session's thread; `cancel` may be called on any.

    Args:
        notify_change: called when `row` has changed.
    """

    def __init__(self, notify_change: Callable[[], None]) -> None:
        self._notify_change = notify_change
        self.row: WorkRow | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the work in progress before its next part."""
        self._is_cancelled = self.row is not None

    @contextmanager
    def watch(self, state: str, unit: str, total: int | None) -> Iterator[Callable[[], None]]:
        """Show work that runs in this context, which calls the yielded function after each part.

        The function raises WorkCancelled if the work was cancelled.
        """
        began_s = time.monotonic()
        self.row = WorkRow(state, unit, 0, total, 0.0)
        self._notify_change()

        def advance() -> None:
            assert self.row is not None
            if self._is_cancelled:
                raise WorkCancelled(f"{state} was cancelled after {self.row.done} {unit}; training is as before")
            self.row = replace(self.row, done=self.row.done + 1, elapsed_s=time.monotonic() - began_s)
            self._notify_change()

        try:
            yield advance
        finally:
            self.row, self._is_cancelled = None, False
            self._notify_change()
