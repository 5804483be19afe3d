"""Progress of a study in plain lines: finished runs, the segments in training, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from workbench.study.segment import Counts
from workbench.study.segment_queue import SegmentTask
from workbench.study.segment_training import Budget
from workbench.study.study_records import StudyRecords

EVERY_S = 5.0  # from one line to the next
MINUTES_FROM_S = 90  # longer times are in minutes


class StudyProgress:
    """Lines about a study in training: at the begin of every segment, every few seconds, and at the end.

    Args:
        study: records of the study.
        budget: of each run.
        report: gets a line.
    """

    def __init__(self, study: StudyRecords, budget: Budget, report: Callable[[str], object]) -> None:
        self._study, self._budget, self._report = study, budget, report
        self._began_s = self._last_s = time.monotonic()
        self._done = 0.0  # steps or FLOP since then
        self._counts: dict[str, Counts | None] = {}  # of each segment in training, by its name; None: not begun
        self._texts: dict[str, str] = {}

    def begin(self, task: SegmentTask) -> None:
        """Take a segment that is trained next."""
        self._counts[task.segment.name] = None

    def update(self, task: SegmentTask, counts: Counts, loss: float | None) -> None:
        """Take the counts after a step, and report them if a line is due."""
        name = task.segment.name
        before, self._counts[name] = self._counts[name], counts
        if before is not None:
            self._done += self._budget.left(before) - self._budget.left(counts)
        self._texts[name] = f"{task}, step {counts.step}" + ("" if loss is None else f", loss {loss:.4f}")
        if before is None or time.monotonic() - self._last_s > EVERY_S:
            self._last_s = time.monotonic()
            self._report(f"{self._study.finished_runs()}: {'; '.join(self._texts.values())}{self._time_left()}")

    def end(self, task: SegmentTask) -> None:
        """Take a segment out, which is not in training any more."""
        self._texts.pop(task.segment.name, None)

    def finish(self) -> None:
        """Report the end, and what common beginnings have saved."""
        self._report(f"{self._study.finished_runs()}. {self._study.saving}")

    def _time_left(self) -> str:
        """Return the time left if no more steps are shared, at the mean speed of this call."""
        if not self._done:
            return ""
        runs = [run for run in self._study.runs if self._study.diverged_at(*run) is None]
        left = sum(self._budget.left(self._study.last_counts(*run)) for run in runs)
        seconds = left * (time.monotonic() - self._began_s) / self._done
        text = f"{seconds / 60:.0f} min" if seconds > MINUTES_FROM_S else f"{seconds:.0f} s"
        return f", at most about {text} left"
