"""The verdict on the last steps in one line, and the bound of each phase of the last one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import ipywidgets

from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import Panel
from workbench.pictures import (
    Cost,
    Table,
    bounds_table,
    costs_of,
    largest_cost,
    plain_text,
    verdict_html,
    verdict_of,
)
from workbench.session import ShownStep, Snapshot

MIN_INTERVAL_S = 1.0
WINDOW = 10  # steps whose mean costs are compared
MARGIN = 0.05  # of a step, by which another cost must be larger to be named instead


class MeanCost:
    """The largest mean cost of the last steps with the same settings.

    Single steps vary, and two costs may be about equal, so the verdict would change with every step: another cost is named
    only if its mean over ten steps is larger by 5 % of a step.
    """

    def __init__(self) -> None:
        self._alike: object = None  # what the steps have in common
        self._steps: deque[Sequence[Cost]] = deque(maxlen=WINDOW)
        self._named: Cost | None = None

    def add(self, step: ShownStep, costs: Sequence[Cost]) -> Cost:
        """Add the costs of a step; return the cost to name, with its mean share."""
        alike = step.branch, len(step.layers), sorted(map(repr, step.trace.settings.items()))
        if alike != self._alike:
            self._alike, self._named = alike, None
            self._steps.clear()
        self._steps.append(costs)
        means = self._means()
        found, named = largest_cost(means), self._named
        if named is not None:
            now = next((mean.share for mean in means if mean.lane == named.lane), 0.0)
            least = now + MARGIN if now > MARGIN / 2 else 0.0
            found = named._replace(share=now) if found.lane == named.lane or found.share < least else found
        self._named = found
        return found

    def _means(self) -> Sequence[Cost]:
        newest = {cost.lane: cost for costs in self._steps for cost in costs}
        shares = {
            lane: sum(cost.share for costs in self._steps for cost in costs if cost.lane == lane) for lane in newest
        }
        return [newest[lane]._replace(share=share / len(self._steps)) for lane, share in shares.items()]


class VerdictPanel(Panel):
    """Memory and hidden copies of the last step, and the largest cost of the last ten steps."""

    has_own_caption = True

    def build(self) -> ipywidgets.Box:
        self._shown_step: ShownStep | None = None
        self._shown_label = ""
        self._next_s = 0.0
        self._line, self._mean_cost = ipywidgets.HTML(), MeanCost()
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
        cost = self._mean_cost.add(shown, costs_of(shown.trace, shown.trace.bound_by()))
        verdict = verdict_of(shown.trace, cost, snapshot.budget_bytes, shown.in_core_bytes)
        self._line.value = verdict_html(self._shown_label, verdict)

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        if snapshot.shown is None:
            return []
        shown, label = snapshot.shown, snapshot.shown_words
        bounds = shown.trace.bound_by()
        cost = largest_cost(costs_of(shown.trace, bounds))
        verdict = verdict_of(shown.trace, cost, snapshot.budget_bytes, shown.in_core_bytes)
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
