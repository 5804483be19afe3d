"""How the step went: one line under the buttons, and why, phase by phase, behind a fold below the timeline."""

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
    """Says what binds the last step, how much of its copying is hidden, and whether it fits."""

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
            words = (
                "No step yet: press Run, or Step." if not snapshot.steps else f"{snapshot.shown_words.capitalize()}."
            )
            self._shown_step, self._line.value = None, verdict_html("", [words])
            return
        # nobody reads what changes all the time, and `bound_by` takes milliseconds; but a switch of branches shows at once
        in_a_hurry = snapshot.state == "running" and time.monotonic() < self._next_s
        told = self._shown_step is not None and self._shown_step.branch == shown.branch and in_a_hurry
        if told or (self._shown_step is shown and self._shown_label == snapshot.shown_words):
            return
        self._shown_step, self._shown_label, self._next_s = (
            shown,
            snapshot.shown_words,
            time.monotonic() + MIN_INTERVAL_S,
        )
        self._line.value = verdict_html(self._shown_label, _find_verdict(shown, snapshot.budget_bytes)[1])

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        if snapshot.shown is None:
            return []
        found, said = _find_verdict(snapshot.shown, snapshot.budget_bytes)
        words = snapshot.shown_words
        return [bounds_table(found, f"{words[:1].upper()}{words[1:]}: {plain_text(said)}")]


class BoundsPanel(Panel):
    """Says what binds each phase of the step that the timeline shows, and what would help; closed until somebody opens it."""

    has_own_caption = True

    def build(self) -> ipywidgets.Box:
        self._shown_step: ShownStep | None = None
        self._fold = FoldedTable("Why: what binds each phase")
        self._fold.widget.add_class("l2l-why")
        return ipywidgets.VBox([self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        shown = snapshot.shown
        if shown is not None and shown is not self._shown_step:
            self._shown_step, title = shown, snapshot.shown_words
            self._fold.show(lambda: bounds_table(shown.trace.bound_by(), title))

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return []  # the verdict's still says it


def _find_verdict(step: ShownStep, budget_bytes: int | None) -> tuple[Sequence[Bound], Sentence]:
    found = step.trace.bound_by()
    return found, verdict_of(step.trace, found, budget_bytes, step.in_core_bytes)
