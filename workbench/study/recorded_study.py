"""Studies as their folders record them: frame, table and figure, without a model."""

from __future__ import annotations

from pathlib import Path

from workbench.study.study_figure import save_figure
from workbench.study.study_records import StudyRecords
from workbench.study.study_table import StudyTable, compare_variants


class RecordedStudy(StudyRecords):
    """One or more studies read from their folders, with their comparison."""

    def table(self, baseline: str | None = None, by: str = "flop") -> StudyTable:
        """Return the comparison of the variants over the seeds.

        Two runs are compared where the shorter of them ends. If the learning rate of the longer one changes after that, its loss
        is that of the middle of a schedule, and the table's notes name it.

        Args:
            baseline: variant that the others are compared with; default the first.
            by: axis on which runs are compared at equal values: "flop", "tokens", "step" or "seconds".

        Raises:
            ValueError: there is no such variant or axis.
        """
        return compare_variants(self, baseline, by)

    def save(self, path: str | Path, x: str = "flop", size: tuple[float, float] = (3.5, 2.5)) -> Path:
        """Save the figure for a paper: mean lines with bands over seeds.

        Args:
            path: `*.pdf`, `*.svg` or `*.png`.
            x: "step", "flop", "tokens" or "seconds".
            size: width and height in inches.

        Raises:
            ValueError: another suffix or axis, or there are no losses yet.
        """
        return save_figure(self, Path(path), x, size)

    def _ipython_display_(self) -> None:
        from workbench.study.study_view import StudyView

        StudyView(self).open()
