"""Timeline of the current step."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.folded_table import FoldedTable
from workbench.panels.layer_picker import make_pickable
from workbench.panels.panel import Panel
from workbench.pictures import Picture, Sweep, describe_sweep, draw_timeline, make_sweep, show_timeline, timeline_table
from workbench.session import ShownStep, Snapshot


class TimelinePanel(Panel):
    """Lanes over time with exposed copies hatched, and the overlap. `BoundsPanel` lists the bound of each phase."""

    def build(self) -> ipywidgets.DOMWidget:
        self._span_s = 0.0
        self._table_step: ShownStep | None = None
        self._sweep: Sweep | None = None
        self._picture, self._fold = make_pickable(ipywidgets.HTML()), FoldedTable("The last step's lanes as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        self._sweep = sweep = make_sweep(snapshot, self._span_s)
        if sweep is None:
            self._picture.value = '<p class="l2l-empty">The timeline appears with the first step.</p>'
            return
        self._span_s = sweep.span_s
        self._picture.value = draw_timeline(**sweep._asdict())
        # once per step, not per frame: an open fold draws its table at every `show`
        if (shown := snapshot.shown) is not None and self._table_step is not shown:
            self._table_step = shown
            self._fold.show(lambda: timeline_table(shown.trace))

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [show_timeline(snapshot.last)] if snapshot.last is not None else []

    def caption(self, snapshot: Snapshot) -> str:
        return describe_sweep(snapshot, self._sweep)

    def _still_caption(self, snapshot: Snapshot) -> str:
        return snapshot.shown_words
