"""Waits between workers and the lanes of each worker, in a running or recorded training."""

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
    """Waits between workers in a step that all have completed and in the steps before, and every worker's lanes."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_trace: object = None  # the first of the traces shown
        self._picture, self._history_picture, self._lanes = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._fold = FoldedTable("Waits between workers as a table")
        self._history_fold = FoldedTable("Waits over the last steps as a table")
        parts = [self._picture, self._fold.widget, self._history_picture, self._history_fold.widget, self._lanes]
        return ipywidgets.VBox(parts)

    @abstractmethod
    def traces(self) -> Traces | None:
        """Return the traces of all workers of one step, or None while one is missing."""

    @abstractmethod
    def steps(self) -> Sequence[StepWaits]:
        """Return the waits of this step and of earlier steps with known waits, oldest first."""

    def draw(self, snapshot: Snapshot) -> None:
        traces = self.traces()
        if traces is None:
            self._drawn_trace, self._lanes.value, self._history_picture.value = None, "", ""
            self._picture.value = '<p class="l2l-empty">Waits appear once all workers have completed a step.</p>'
        elif traces[0] is not self._drawn_trace:
            self._drawn_trace = traces[0]
            waits, history = show_stragglers(traces), show_waits(self.steps())
            self._picture.value, self._history_picture.value = waits.svg, history.svg
            self._fold.show(lambda: waits.table)
            self._history_fold.show(lambda: history.table)
            heads = [f'<div class="l2l-heading">Worker {trace.worker.rank}</div>' for trace in traces]
            self._lanes.value = "".join(head + lanes.svg for head, lanes in zip(heads, show_lanes(traces), strict=True))

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        traces = self.traces()
        return [show_stragglers(traces), show_waits(self.steps()), *show_lanes(traces)] if traces is not None else []

    def caption(self, snapshot: Snapshot) -> str:
        return snapshot.shown_words


class RankWaitsPanel(WaitsPanel):
    """Waits of launched ranks in the last step and in the earlier steps that were drawn."""

    source_type = RankController
    session: RankController

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
        is_one_step = len({trace.step for trace in traces}) == 1  # otherwise a rank is one step ahead
        return Traces(traces) if len(traces) == len(found) and is_one_step else None


class RecordedWaitsPanel(WaitsPanel):
    """Waits of the newest step, up to a moment of a recorded run, that all workers recorded completely."""

    source_type = RunCursor
    session: RunCursor

    def traces(self) -> Traces | None:
        return self.session.run.traces(self.session.number)

    def steps(self) -> Sequence[StepWaits]:
        return [StepWaits.of(traces) for traces in self.session.run.last_traces(MAX_STEPS, self.session.number)]
