"""The verdict on the last step in one line, and the bound of each of its phases."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ipywidgets

from l2l_core.analysis import Bound
from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import Panel
from workbench.pictures import Sentence, Table, bounds_table, plain_text, verdict_html, verdict_of
from workbench.session import ShownStep, Snapshot

MIN_INTERVAL_S = 1.0


class VerdictPanel(Panel):
    """Bound of the last step, share of its copies that compute hides, and the comparison with the budget."""

    has_own_caption = True

    def build(self) -> ipywidgets.Box:
        self._shown_step: ShownStep | None = None
        self._shown_label = ""
        self._next_s = 0.0
        self._line = ipywidgets.HTML()
        return ipywidgets.VBox([self._line])

    def draw(self, snapshot: Snapshot) -> None:
        shown = snapshot.shown
        if shown is None:
            text = f"{snapshot.shown_words.capitalize()}." if snapshot.steps else "No step yet: press Run, or Step."
            self._shown_step, self._line.value = None, verdict_html("", [text])
            return
        # limited during a run, since `bound_by` takes milliseconds; a switch of branches is shown at once
        too_early = snapshot.state == "running" and time.monotonic() < self._next_s
        same_branch = self._shown_step is not None and self._shown_step.branch == shown.branch
        if (too_early and same_branch) or (self._shown_step is shown and self._shown_label == snapshot.shown_words):
            return
        self._shown_step, self._shown_label = shown, snapshot.shown_words
        self._next_s = time.monotonic() + MIN_INTERVAL_S
        self._line.value = verdict_html(self._shown_label, _find_verdict(shown, snapshot.budget_bytes)[1])

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        if snapshot.shown is None:
            return []
        bounds, verdict = _find_verdict(snapshot.shown, snapshot.budget_bytes)
        label = snapshot.shown_words
        return [bounds_table(bounds, f"{label[:1].upper()}{label[1:]}: {plain_text(verdict)}")]


class BoundsPanel(Panel):
    """Bound of each phase of the step that the timeline shows, with advice, in a fold."""

    has_own_caption = True

    def build(self) -> ipywidgets.Box:
        self._shown_step: ShownStep | None = None
        self._fold = FoldedTable("Why: the bound of each phase")
        self._fold.widget.add_class("l2l-why")
        return ipywidgets.VBox([self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        shown = snapshot.shown
        if shown is not None and shown is not self._shown_step:
            self._shown_step, title = shown, snapshot.shown_words
            self._fold.show(lambda: bounds_table(shown.trace.bound_by(), title))

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return []  # part of the verdict's still


def _find_verdict(step: ShownStep, budget_bytes: int | None) -> tuple[Sequence[Bound], Sentence]:
    bounds = step.trace.bound_by()
    return bounds, verdict_of(step.trace, bounds, budget_bytes, step.in_core_bytes)
