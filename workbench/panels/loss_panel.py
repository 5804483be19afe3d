"""Chart of the loss over the steps of a session."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets

from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import Panel
from workbench.pictures import Picture, draw_loss, loss_table
from workbench.session import Change, Snapshot


class LossPanel(Panel):
    """The loss of every step, the changes between steps, and the losses of other branches."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: tuple[int, Sequence[Change], object, str] = (-1, (), None, "")
        self._picture, self._fold = ipywidgets.HTML(), FoldedTable("Losses as a table")
        return ipywidgets.VBox([self._picture, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        # compare changes, not their number: a setting replaces an earlier one made before the same step
        inputs = len(snapshot.steps), snapshot.changes, snapshot.elsewhere, snapshot.branch
        if inputs == self._drawn_inputs:
            return
        self._drawn_inputs = inputs
        if not snapshot.steps:
            self._picture.value = '<p class="l2l-empty">The loss appears with the first step.</p>'
            return
        self._picture.value = _draw(snapshot)
        self._fold.show(lambda: loss_table(snapshot.steps, snapshot.changes))

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [Picture(_draw(snapshot), loss_table(snapshot.steps, snapshot.changes))] if snapshot.steps else []


def _draw(snapshot: Snapshot) -> str:
    return draw_loss(snapshot.steps, snapshot.changes, branch=snapshot.branch, others=snapshot.elsewhere)
