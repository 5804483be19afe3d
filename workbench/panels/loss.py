"""The loss over the steps of a session."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.pictures import Picture, draw_loss, loss_table
from workbench.session import Change, Snapshot


class LossPanel(Panel):
    """Shows the loss of every step, with the changes that were made in between, and other branches beside it."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn: tuple[int, Sequence[Change], object, str] = (-1, (), None, "")
        self._picture, self._fold = ipywidgets.HTML(), Fold("Losses as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        # the changes themselves, not their number: settings before the same step take the place of one another
        known = len(now.steps), now.changes, now.elsewhere, now.branch
        if known == self._drawn:
            return
        self._drawn = known
        if not now.steps:
            self._picture.value = '<p class="l2l-empty">The loss appears with the first step.</p>'
            return
        self._picture.value = _draw(now)
        self._fold.show(lambda: loss_table(now.steps, now.changes))

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [Picture(_draw(now), loss_table(now.steps, now.changes))] if now.steps else []


def _draw(now: Snapshot) -> str:
    return draw_loss(now.steps, now.changes, branch=now.branch, others=now.elsewhere)
