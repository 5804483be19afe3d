"""Card of the selected layer: facts, weights, trials on the probe, and edits."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ipywidgets

from workbench.panels.controls import make_box, make_button, make_dropdown, make_row, set_options
from workbench.panels.folded_table import FoldedTable
from workbench.panels.key_capture import KeyCapture
from workbench.panels.layer_picker import make_pickable
from workbench.panels.panel import Panel, failure_html
from workbench.panels.predictions import Predictions
from workbench.panels.selection import shared_selection
from workbench.panels.trial_runner import TrialRunner
from workbench.pictures import (
    TRIAL_LABELS,
    Picture,
    Table,
    card_table,
    code_line,
    draw_figures,
    draw_histogram,
    facts_html,
    pending_html,
    show_trials,
    trial_html,
)
from workbench.readings import full_name, number_layers
from workbench.session import (
    TRIAL_EDITS,
    LayerFacts,
    LayerRow,
    Session,
    Snapshot,
    StateVersion,
    TrialKind,
    edit_code,
    edits_for_layer,
)

_NO_LAYER_TEXT = "No layer is chosen: choose one in the list, or in the table of layers."
_NO_LAYER_OPTION = ("choose a layer", "")  # not None: a dropdown of ipywidgets is blank with that value
_EDIT_ICONS = {
    "Drop": "trash",
    "Duplicate": "clone",
    "Freeze": "snowflake-o",
    "Insert before": "plus",
    "Insert after": "plus",
    "Move earlier": "arrow-up",
    "Move later": "arrow-down",
}


class CardPanel(Panel):
    """One layer, selected in a list or by pointer. Measurements run on the session's thread, between steps.

    Weights are read when the layer is selected, after edits and on demand, not at every step.
    """

    source_type = Session
    session: Session

    def build(self) -> ipywidgets.Box:
        self._selection, self._trials = shared_selection(self.session), TrialRunner(self.session, self._redraw)
        self._predictions = Predictions(self.session, self._redraw)
        self._predictions.button.on_click(lambda _: self._guarded(self._run_prediction))
        self._filling = False  # the panel sets the list
        self._facts: LayerFacts | None = None
        self._facts_request: object = None  # the state for which the facts were requested
        self._drawn_inputs: object = None
        self._chart_inputs: tuple[Any, ...] = (None, None, None)
        self._edits: dict[str, tuple[ipywidgets.Button, ipywidgets.HTML]] = {}
        self._selection.observe(self._redraw)
        self._facts_html, self._error_html = ipywidgets.HTML(), ipywidgets.HTML()
        self._weights, self._figures = ipywidgets.HTML(), ipywidgets.HTML()
        self._chart = make_pickable(ipywidgets.HTML())
        self._fold = FoldedTable("Measurements as a table")
        self._fold.widget.layout.display = "none"
        self._line = ipywidgets.HTML()
        self._line.add_class("l2l-card-pending")
        self._list = make_dropdown("card of", [_NO_LAYER_OPTION], "320px")
        self._list.observe(lambda change: self._choose_from_list(change["new"]), "value")
        to_previous, to_next = partial(self._choose_neighbour, -1), partial(self._choose_neighbour, 1)
        self._previous_button = self._button("Previous layer", "chevron-left", "Choose the previous layer", to_previous)
        self._next_button = self._button("Next layer", "chevron-right", "Choose the next layer", to_next)
        self._reread_button = self._button("Read again", "refresh", "Read the current weights", self._reread_facts)
        chooser = make_row(self._list, self._previous_button, self._next_button, self._reread_button)
        for label, icon in _EDIT_ICONS.items():
            button = self._button(label, icon, "Apply after the current step", partial(self._apply_edit, label))
            self._edits[label] = button, ipywidgets.HTML()
        for kind in TRIAL_EDITS:
            label, tip = TRIAL_LABELS[kind].capitalize(), "Measure it on the probe; nothing is changed"
            button = self._button(label, "balance-scale", tip, partial(self._run_trial, kind))
            self._edits[kind] = button, ipywidgets.HTML()
        predictions = make_row(self._predictions.button, self._predictions.line), self._predictions.picture
        self._all_button = self._button(
            "Measure all layers", "bar-chart", "Measure both for every layer", self._run_all_trials
        )
        self._stop_button = self._button("Stop measuring", "stop", "Stop after this measurement", self._trials.stop)
        self._progress = ipywidgets.HTML()
        charts = make_box(ipywidgets.HBox, "l2l-card-charts", self._weights, self._figures)
        actions = make_box(ipywidgets.VBox, "l2l-card-acts", *(make_row(*pair) for pair in self._edits.values()))
        self._layer_box = ipywidgets.VBox([self._facts_html, charts, actions, *predictions])
        sweep = make_row(self._all_button, self._stop_button, self._progress), self._chart, self._fold.widget
        self._title, keys = ipywidgets.HTML(), KeyCapture(layout={"display": "none"})
        parts = self._title, chooser, self._layer_box, *sweep, self._line, self._error_html, keys
        return make_box(ipywidgets.VBox, "l2l-card-panel", *parts)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, snapshot: Snapshot) -> None:
        row, numbers = self._selection.find_in(snapshot.layers), number_layers(one.key for one in snapshot.layers)
        # without a title when the list shows a layer, so that the view fits a screen
        self._title.value = "" if row else f'<div class="l2l-heading">Card of a layer</div><p>{_NO_LAYER_TEXT}</p>'
        self._title.layout.display = "none" if row else ""
        self._fill_list([(f"{full_name(one.key, numbers)} {one.name}", one.key) for one in snapshot.layers], row)
        # without a selection (-1), both buttons select the first layer
        index = numbers[row.key] if row else -1
        self._previous_button.disabled = index == 0 or not snapshot.layers
        self._next_button.disabled = index == len(snapshot.layers) - 1
        self._layer_box.layout.display = "" if row else "none"
        (self.widget.add_class if row else self.widget.remove_class)("l2l-card-open")
        self._reread_button.disabled = row is None
        self._line.value = pending_html(snapshot)
        if row is not None:
            self._request_facts(row, snapshot)
            self._draw_layer(row, snapshot)
        self._draw_trials(snapshot)

    def _fill_list(self, options: Sequence[tuple[str, str]], row: LayerRow | None) -> None:
        self._filling = True
        try:
            set_options(self._list, [_NO_LAYER_OPTION, *options])
            self._list.value = row.key if row else _NO_LAYER_OPTION[1]
        finally:
            self._filling = False

    def _draw_layer(self, row: LayerRow, snapshot: Snapshot) -> None:
        facts, version = self._facts_of(row), StateVersion.of(snapshot)
        self._facts_html.value = facts_html(row, number_layers(one.key for one in snapshot.layers), facts)
        inputs = row.key, facts, snapshot.statistics  # a step or an edit replaces the statistics
        if inputs != self._drawn_inputs:
            self._drawn_inputs = inputs
            self._weights.value = "" if facts is None else draw_histogram(facts)
            self._figures.value = draw_figures(snapshot.statistics, row.key) if snapshot.steps else ""
        edits = edits_for_layer(row, snapshot.layers)
        for label in _EDIT_ICONS:
            button, code = self._edits[label]
            # `edits` has either Freeze or Unfreeze, which share a button
            name = "Unfreeze" if label == "Freeze" and "Unfreeze" in edits else label
            button.disabled, button.description = name not in edits, name
            code.value = code_line(f"relay.apply({edit_code(edits[name])})") if name in edits else ""
        for kind, make in TRIAL_EDITS.items():
            button, text = self._edits[kind]
            waits = (row.key, kind) in self._trials.waiting
            button.disabled = row.stack is None or waits
            status = "is being measured, or waits in the queue" if waits else ""
            result = trial_html(self._trials.found.get((row.key, kind)), status, version)
            text.value = f"{code_line(f'workbench.measure({edit_code(make(row.key))})')} {result}"
        self._predictions.draw(row, snapshot)

    def _draw_trials(self, snapshot: Snapshot) -> None:
        left, version = self._trials.remaining, StateVersion.of(snapshot)
        self._all_button.disabled, self._stop_button.disabled = bool(left) or not _trial_keys(snapshot), not left
        status = f"{left} measurements left" if left else self._trials.stop_reason
        self._progress.value = f'<span class="l2l-caption" role="status">{status}</span>'
        trials, layers, drawn_version = self._chart_inputs
        # cheap in every frame: trials and layers are replaced, never changed in place
        if trials is not self._trials.found or layers is not snapshot.layers or drawn_version != version:
            self._chart_inputs = self._trials.found, snapshot.layers, version
            picture = self._trials_picture(snapshot, version)
            self._chart.value = "" if picture is None else picture.svg
            self._fold.widget.layout.display = "none" if picture is None else ""
            if picture is not None:
                self._fold.show(lambda: picture.table)

    def _trials_picture(self, snapshot: Snapshot, version: StateVersion) -> Picture | None:
        keys = {row.key for row in snapshot.layers}
        found = [one for one in self._trials.found.values() if one.key in keys]
        numbers = number_layers(row.key for row in snapshot.layers)
        return show_trials(snapshot.layers, found, numbers, version) if found else None

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        row, version = self._selection.find_in(snapshot.layers), StateVersion.of(snapshot)
        picture = self._trials_picture(snapshot, version)
        charts = [] if picture is None else [picture]
        if row is None:
            return [Table("Card of a layer", ("layer",), [], "No layer is chosen."), *charts]
        found = [one for (key, _), one in self._trials.found.items() if key == row.key]
        numbers, facts = number_layers(one.key for one in snapshot.layers), self._facts_of(row)
        return [card_table(row, numbers, facts, found, version), *self._predictions.still(row.key), *charts]

    # -- facts ---------------------------------------------------------------------------------------------------------

    def _facts_of(self, row: LayerRow) -> LayerFacts | None:
        """Return the facts if they are those of this layer."""
        facts = self._facts
        return facts if facts is not None and facts.key == row.key else None

    def _request_facts(self, row: LayerRow, snapshot: Snapshot) -> None:
        """Request the facts of the layer unless they were requested since the last edit."""
        request = row.key, snapshot.branch, len(snapshot.journal)
        if request == self._facts_request or snapshot.ended:  # an ended session refuses requests
            return
        self._facts_request = request
        self.session.inspect(row.key).add_done_callback(self._on_facts)

    def _on_facts(self, future: Future[LayerFacts | None]) -> None:
        """Show a result; called on the session's thread without locks, or by the thread that cancelled the request."""
        if future.cancelled() or future.exception() is not None:
            return  # the thread that cancelled it may hold the session's lock
        self._facts = future.result()
        self._redraw()

    # -- buttons -------------------------------------------------------------------------------------------------------

    def _choose_from_list(self, key: str) -> None:
        with self._drawing:  # another thread may be filling the list
            if self._filling:
                return
        # without the lock: observers draw other panels, which take their locks
        self._selection.choose(None if key == _NO_LAYER_OPTION[1] else key)

    def _choose_neighbour(self, by: int) -> None:
        keys = [row.key for row in self.session.snapshot().layers]
        index = keys.index(self._selection.key) + by if self._selection.key in keys else 0
        self._selection.choose(keys[min(max(index, 0), len(keys) - 1)])

    def _reread_facts(self) -> None:
        self._facts_request = None

    def _apply_edit(self, label: str) -> None:
        snapshot = self.session.snapshot()
        row = self._selection.find_in(snapshot.layers)
        if row is not None:  # None: the layer was removed since the panel was drawn
            edits = edits_for_layer(row, snapshot.layers)
            self.session.edit(edits["Unfreeze" if label == "Freeze" and row.frozen else label])

    def _run_trial(self, kind: TrialKind) -> None:
        if self._selection.key is not None:
            self._trials.request(self._selection.key, kind)

    def _run_prediction(self) -> None:
        if self._selection.key is not None:
            self._predictions.request(self._selection.key)

    def _run_all_trials(self) -> None:
        self._trials.request_all(_trial_keys(self.session.snapshot()))

    def _button(self, label: str, icon: str, tooltip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = make_button(label, icon, tooltip)
        button.on_click(lambda _: self._guarded(action))
        return button

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Run the action of a button and redraw; an exception is shown below."""
        try:
            action()
            self._error_html.value = ""
        except Exception as error:
            self._error_html.value = failure_html(str(error), traceback.format_exc())
        self._redraw()


def _trial_keys(snapshot: Snapshot) -> Sequence[str]:
    """Return the keys of the layers that can be left out, which are those in a stack."""
    return [row.key for row in snapshot.layers if row.stack is not None]
