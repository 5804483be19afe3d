"""The timeline of the step under way, and what binds it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import ref

import ipywidgets

from l2l_core import Trace
from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.pictures import Picture, draw_timeline, show_timeline, sweep_of, timeline_table
from workbench.session import Snapshot

PACE_S = 1.0


class TimelinePanel(Panel):
    """Lanes over time, exposed copies hatched, overlap in figures, and what binds each phase of the last step."""

    def build(self) -> ipywidgets.DOMWidget:
        self._span_s = self._next_s = 0.0
        self._told: tuple[ref[Trace] | None, Sequence[str]] = None, ()
        self._picture, self._fold = ipywidgets.HTML(), Fold("The last step's lanes as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        sweep = sweep_of(now, self._span_s)
        if sweep is None:
            self._picture.value = '<p class="l2l-empty">The timeline appears with the first step.</p>'
            return
        self._span_s = sweep.span_s
        self._picture.value = draw_timeline(
            **sweep._asdict(), names=_names(now), said=self._say(now.last, now.state == "running")
        )

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [show_timeline(now.last)] if now.last is not None else []

    def _say(self, last: Trace | None, running: bool) -> Sequence[str]:
        """What binds the last step; the table is made along with it."""
        if last is None:
            return ()
        told, sentences = self._told
        in_a_hurry = running and time.monotonic() < self._next_s  # nobody reads sentences that change all the time
        if told is None or (told() is not last and not in_a_hurry):
            self._next_s = time.monotonic() + PACE_S
            sentences = [str(bound) for bound in last.bound_by()]
            self._told = ref(last), sentences
            self._fold.show(lambda: timeline_table(last))
        return sentences


def _names(now: Snapshot) -> dict[str, str]:
    return {layer.key: layer.name for layer in now.layers}
