"""The timeline of the step under way."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.panels.touch import touched
from workbench.pictures import Picture, Sweep, draw_timeline, show_timeline, sweep_of, timeline_table, words_of_sweep
from workbench.session import ShownStep, Snapshot


class TimelinePanel(Panel):
    """Shows lanes over time, exposed copies hatched, and overlap in figures. `WhyPanel` says what binds each phase."""

    def build(self) -> ipywidgets.DOMWidget:
        self._span_s = 0.0
        self._tabled: ShownStep | None = None
        self._sweep: Sweep | None = None
        self._picture, self._fold = touched(ipywidgets.HTML()), Fold("The last step's lanes as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        self._sweep = sweep = sweep_of(now, self._span_s)
        if sweep is None:
            self._picture.value = '<p class="l2l-empty">The timeline appears with the first step.</p>'
            return
        self._span_s = sweep.span_s
        self._picture.value = draw_timeline(**sweep._asdict())
        # once for a step, and not at every frame: an open fold makes its table anew each time it is shown one
        if (shown := now.shown) is not None and self._tabled is not shown:
            self._tabled = shown
            self._fold.show(lambda: timeline_table(shown.trace))

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [show_timeline(now.last)] if now.last is not None else []

    def whose(self, now: Snapshot) -> str:
        return words_of_sweep(now, self._sweep)

    def _whose_still(self, now: Snapshot) -> str:
        return now.shown_words
