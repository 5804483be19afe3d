"""Progress of a study in plain lines: finished runs, the segment in training, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from workbench.study.segment import Counts, SharedSegment
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
        self._label, self._counts, self._is_new = "", Counts(), True

    def begin(self, segment: SharedSegment, names: Sequence[str]) -> None:
        """Take the segment that is trained next, and its variants."""
        seed = segment.name.partition("-")[0][1:]
        self._label, self._is_new = f"seed {seed}, {' + '.join(names)}", True

    def update(self, counts: Counts, loss: float | None) -> None:
        """Take the counts after a step, and report them if a line is due."""
        if not self._is_new:
            self._done += self._budget.left(self._counts) - self._budget.left(counts)
        is_due = self._is_new or time.monotonic() - self._last_s > EVERY_S
        self._counts, self._is_new = counts, False
        if is_due:
            self._last_s = time.monotonic()
            loss_text = "" if loss is None else f", loss {loss:.4f}"
            self._report(
                f"{self._study.finished_runs()}: {self._label}, step {counts.step}{loss_text}{self._time_left()}"
            )

    def finish(self) -> None:
        """Report the end, and what common beginnings have saved."""
        self._report(f"{self._study.finished_runs()}. {self._study.saving}")

    def _time_left(self) -> str:
        """Return the time left if no more steps are shared, at the mean speed of this call."""
        if not self._done:
            return ""
        runs = [(name, seed) for name in self._study.names for seed in self._study.seeds]
        left = sum(self._budget.left(self._study.last_counts(*run)) for run in runs)
        seconds = left * (time.monotonic() - self._began_s) / self._done
        text = f"{seconds / 60:.0f} min" if seconds > MINUTES_FROM_S else f"{seconds:.0f} s"
        return f", at most about {text} left"
