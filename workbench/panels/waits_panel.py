"""Who waits for whom among several workers, and the lanes of each: of a run under way, or of a recorded one."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

import ipywidgets

from l2l_core import Traces
from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import Panel
from workbench.pictures import MAX_STEPS, Picture, StepWaits, Table, show_lanes, show_stragglers, show_waits
from workbench.ranks import RankController
from workbench.runs import RunCursor
from workbench.session import Snapshot


class WaitsPanel(Panel):
    """Shows who waited for whom in a step that all workers have finished and over the last ones, and every worker's lanes."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_trace: object = None  # the first trace of those that are shown
        self._picture, self._history_picture, self._lanes = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._fold = FoldedTable("Who waits for whom, as a table")
        self._history_fold = FoldedTable("Over the last steps, as a table")
        parts = [self._picture, self._fold.widget, self._history_picture, self._history_fold.widget, self._lanes]
        return ipywidgets.VBox(parts)

    @abstractmethod
    def traces(self) -> Traces | None:
        """Put the traces of the step together; None if there is none of which all are known."""

    @abstractmethod
    def steps(self) -> Sequence[StepWaits]:
        """Give what was waited in this step and in those before it, as far as that is known; oldest first."""

    def draw(self, snapshot: Snapshot) -> None:
        traces = self.traces()
        if traces is None:
            self._drawn_trace, self._lanes.value, self._history_picture.value = None, "", ""
            self._picture.value = '<p class="l2l-empty">What workers waited for appears with a step of all of them.</p>'
        elif traces[0] is not self._drawn_trace:
            self._drawn_trace, shown = traces[0], show_stragglers(traces)
            self._picture.value = shown.svg
            self._fold.show(lambda: shown.table)
            over = show_waits(self.steps())
            self._history_picture.value = over.svg
            self._history_fold.show(lambda: over.table)
            heads = [f'<div class="l2l-heading">Worker {trace.worker.rank}</div>' for trace in traces]
            self._lanes.value = "".join(a + b.svg for a, b in zip(heads, show_lanes(traces), strict=True))

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        traces = self.traces()
        return [show_stragglers(traces), show_waits(self.steps()), *show_lanes(traces)] if traces is not None else []

    def caption(self, snapshot: Snapshot) -> str:
        return snapshot.shown_words


class RankWaitsPanel(WaitsPanel):
    """Shows the last step of ranks that were launched; over steps, those that it has drawn."""

    source_type = RankController

    def build(self) -> ipywidgets.DOMWidget:
        self._steps: deque[StepWaits] = deque(maxlen=MAX_STEPS)
        return super().build()

    def steps(self) -> Sequence[StepWaits]:
        traces = self.traces()
        if traces is not None and not (self._steps and self._steps[-1].step == traces[0].step):
            self._steps.append(StepWaits.of(traces))
        return list(self._steps)

    def traces(self) -> Traces | None:
        found = [one.snapshot().last for one in self.session.ranks]
        traces = [trace for trace in found if trace is not None]
        is_one_step = len({trace.step for trace in traces}) == 1  # else some rank is a step ahead
        return Traces(traces) if len(traces) == len(found) and is_one_step else None


class RecordedWaitsPanel(WaitsPanel):
    """Shows the newest step by a moment of a recorded run that all workers have recorded whole."""

    source_type = RunCursor

    def traces(self) -> Traces | None:
        return self.session.run.traces(self.session.number)

    def steps(self) -> Sequence[StepWaits]:
        return [StepWaits.of(traces) for traces in self.session.run.last_traces(MAX_STEPS, self.session.number)]
