"""Chart of the loss over the steps of a session, of held-out data, and of other values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

from workbench.panels.controls import make_box, make_checkbox, make_dropdown, set_options
from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import Panel
from workbench.pictures import METRIC, LossView, Picture, axis_options, draw_loss, held_out_points, loss_table
from workbench.session import LOSS, Snapshot

_NO_HELD_OUT = (
    '<div class="l2l-caption">No held-out curve yet: <code>evaluate(loader, every=100)</code> of this workbench measures one; '
    "training is not changed by it.</div>"
)


class LossPanel(Panel):
    """The loss of steps and of held-out data, metrics and learning rate, over steps, tokens, seconds or compute."""

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: tuple[Any, ...] = ()
        self._picture, self._fold = ipywidgets.HTML(), FoldedTable("Losses as a table")
        self._shown = make_dropdown("show", [("loss", LOSS)], "220px")
        self._axis = make_dropdown("over", axis_options(()), "150px")
        self._log: Any = make_checkbox("log scale", "Logarithmic scale of the values, if all are positive")
        for control in (self._shown, self._axis, self._log):
            control.observe(lambda _: self._redraw(), "value")
        controls = make_box(ipywidgets.HBox, "l2l-settings", self._shown, self._axis, self._log)
        self._hint = ipywidgets.HTML()
        return ipywidgets.VBox([self._picture, controls, self._hint, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        set_options(self._shown, _value_options(snapshot))
        set_options(self._axis, axis_options(snapshot.steps))
        # compare changes, not their number: a setting replaces an earlier one made before the same step
        drawn = len(snapshot.steps), len(snapshot.held_out), snapshot.changes, snapshot.elsewhere, snapshot.branch
        inputs = *drawn, self._view
        if inputs == self._drawn_inputs:
            return
        self._drawn_inputs = inputs
        self._hint.value = "" if snapshot.held_out or not snapshot.steps or snapshot.ended else _NO_HELD_OUT
        if not snapshot.steps:
            self._picture.value = '<p class="l2l-empty">The loss appears with the first step.</p>'
            return
        self._picture.value = _draw(snapshot, self._view)
        self._fold.show(lambda: loss_table(snapshot.steps, snapshot.changes, snapshot.held_out))

    @property
    def _view(self) -> LossView:
        return LossView(self._shown.value, self._axis.value, self._log.value)

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        table = loss_table(snapshot.steps, snapshot.changes, snapshot.held_out)
        return [Picture(_draw(snapshot, self._view), table)] if snapshot.steps else []


def _value_options(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return the values that can be drawn, with their labels."""
    metrics = dict.fromkeys(name for row in snapshot.held_out for name in row.values if name != LOSS)
    options = [("loss", LOSS), *((f"held-out {name}", f"{METRIC}{name}") for name in metrics)]
    if not snapshot.steps:
        return options
    last = snapshot.steps[-1]
    return [*options, *([("learning rate", "lr")] if last.lr is not None else []), (f"{last.unit} per second", "speed")]


def _draw(snapshot: Snapshot, view: LossView) -> str:
    return draw_loss(
        snapshot.steps,
        snapshot.changes,
        held_out=held_out_points(snapshot.held_out, view.metric),
        branch=snapshot.branch,
        others=snapshot.elsewhere,
        view=view,
    )
