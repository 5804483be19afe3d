"""How the step went: one line under the buttons, and why, phase by phase, behind a fold below the timeline."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ipywidgets

from l2l_core.analysis import Bound
from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.pictures import Said, Table, bounds_table, plain, verdict_html, verdict_of
from workbench.session import ShownStep, Snapshot

PACE_S = 1.0


class VerdictPanel(Panel):
    """Says what binds the last step, how much of its copying is hidden, and whether it fits."""

    says_whose = True

    def build(self) -> ipywidgets.Box:
        self._told: ShownStep | None = None
        self._named = ""
        self._next_s = 0.0
        self._line = ipywidgets.HTML()
        return ipywidgets.VBox([self._line])

    def draw(self, now: Snapshot) -> None:
        shown = now.shown
        if shown is None:
            words = "No step yet: press Run, or Step." if not now.steps else f"{now.shown_words.capitalize()}."
            self._told, self._line.value = None, verdict_html("", [words])
            return
        # nobody reads what changes all the time, and `bound_by` takes milliseconds; but a switch of branches shows at once
        in_a_hurry = now.state == "running" and time.monotonic() < self._next_s
        told = self._told is not None and self._told.branch == shown.branch and in_a_hurry
        if told or (self._told is shown and self._named == now.shown_words):
            return
        self._told, self._named, self._next_s = shown, now.shown_words, time.monotonic() + PACE_S
        self._line.value = verdict_html(self._named, _verdict(shown, now.budget_bytes)[1])

    def still(self, now: Snapshot) -> Sequence[Table]:
        if now.shown is None:
            return []
        found, said = _verdict(now.shown, now.budget_bytes)
        words = now.shown_words
        return [bounds_table(found, f"{words[:1].upper()}{words[1:]}: {plain(said)}")]


class WhyPanel(Panel):
    """Says what binds each phase of the step that the timeline shows, and what would help; closed until somebody opens it."""

    says_whose = True

    def build(self) -> ipywidgets.Box:
        self._told: ShownStep | None = None
        self._fold = Fold("Why: what binds each phase")
        self._fold.widget.add_class("l2l-why")
        return ipywidgets.VBox([self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        shown = now.shown
        if shown is not None and shown is not self._told:
            self._told, title = shown, now.shown_words
            self._fold.show(lambda: bounds_table(shown.trace.bound_by(), title))

    def still(self, now: Snapshot) -> Sequence[Table]:
        return []  # the verdict's still says it


def _verdict(shown: ShownStep, budget_bytes: int | None) -> tuple[Sequence[Bound], Said]:
    found = shown.trace.bound_by()
    return found, verdict_of(shown.trace, found, budget_bytes, shown.in_core_bytes)
