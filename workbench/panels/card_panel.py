"""The card of the chosen layer: what it is, how its weights are spread, what the probe says of it, and edits of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ipywidgets

from workbench.panels.choices import make_dropdown, set_options
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
_NO_LAYER_OPTION = ("choose a layer", "")  # not None: with that value a list of ipywidgets shows nothing
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
    """Shows one layer, chosen by list or by pointer; all of it is asked of the session, so training goes on meanwhile.

    Weights are looked at when the layer is chosen, after edits, and on demand, never at every step. All controls are native
    ones: Tab reaches them, arrow keys choose in the list, Space and Enter press.
    """

    source_type = Session

    def build(self) -> ipywidgets.Box:
        self._selection, self._trials = shared_selection(self.session), TrialRunner(self.session, self._redraw)
        self._predictions = Predictions(self.session, self._redraw)
        self._predictions.button.on_click(lambda _: self._guarded(self._run_prediction))
        self._filling = False  # whether it is the panel that sets the list
        self._facts: LayerFacts | None = None
        self._facts_request: object = None  # what the weights were last asked for
        self._drawn_inputs: object = None
        self._chart_inputs: tuple[Any, ...] = (None, None, None)
        self._edits = {}
        self._selection.observe(self._redraw)
        self._facts_html, self._error_html = ipywidgets.HTML(), ipywidgets.HTML()
        self._weights, self._figures, self._chart = (
            ipywidgets.HTML(),
            ipywidgets.HTML(),
            make_pickable(ipywidgets.HTML()),
        )
        self._fold = FoldedTable("Measurements as a table")
        self._fold.widget.layout.display = "none"
        self._line = ipywidgets.HTML()
        self._line.add_class("l2l-card-pending")
        self._list = make_dropdown("card of", [_NO_LAYER_OPTION], "320px")
        self._list.observe(lambda change: self._choose_from_list(change["new"]), "value")
        self._previous_button = self._button(
            "Previous layer", "chevron-left", "Choose the previous layer", lambda: self._choose_neighbour(-1)
        )
        self._next_button = self._button(
            "Next layer", "chevron-right", "Choose the next layer", lambda: self._choose_neighbour(1)
        )
        self._reread_button = self._button(
            "Look again", "refresh", "Look at the weights as they are now", self._reread_facts
        )
        chooser = _row(self._list, self._previous_button, self._next_button, self._reread_button)
        acts = [self._build_edit_row(words, icon) for words, icon in _EDIT_ICONS.items()]
        tries = [self._build_trial_row(how) for how in TRIAL_EDITS]
        predicted = [_row(self._predictions.button, self._predictions.line), self._predictions.picture]
        self._all_button = self._button(
            "All layers", "bar-chart", "Measure both for every layer in turn", self._run_all_trials
        )
        self._stop_button = self._button(
            "Stop measuring", "stop", "Stop after the current measurement", self._trials.stop
        )
        self._progress = ipywidgets.HTML()
        charts = ipywidgets.HBox([self._weights, self._figures])
        charts.add_class("l2l-card-charts")
        side_by_side = ipywidgets.VBox([*acts, *tries])
        side_by_side.add_class("l2l-card-acts")
        parts = [self._facts_html, charts, side_by_side, *predicted]
        self._layer_box = ipywidgets.VBox(parts)
        everyone = [_row(self._all_button, self._stop_button, self._progress), self._chart, self._fold.widget]
        keys = KeyCapture(layout={"display": "none"})
        box = ipywidgets.VBox(
            [ipywidgets.HTML(), chooser, self._layer_box, *everyone, self._line, self._error_html, keys]
        )
        box.add_class("l2l-card-panel")
        return box

    def _build_edit_row(self, label: str, icon: str) -> ipywidgets.Box:
        button = self._button(label, icon, "Carry it out after the current step", partial(self._apply_edit, label))
        self._edits[label] = button, ipywidgets.HTML()
        return _row(*self._edits[label])

    def _build_trial_row(self, kind: TrialKind) -> ipywidgets.Box:
        words = TRIAL_LABELS[kind].capitalize()
        button = self._button(
            words, "balance-scale", "Measure it on the probe; nothing is changed", lambda: self._run_trial(kind)
        )
        self._edits[kind] = button, ipywidgets.HTML()
        return _row(*self._edits[kind])

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, snapshot: Snapshot) -> None:
        row, numbers = self._selection.find_in(snapshot.layers), number_layers(one.key for one in snapshot.layers)
        title = self.widget.children[0]
        # of a chosen layer the list below says it, and the view fits a screen
        title.value = "" if row else f'<div class="l2l-heading">Card of a layer</div><p>{_NO_LAYER_TEXT}</p>'
        title.layout.display = "none" if row else ""
        self._fill_list([(f"{full_name(one.key, numbers)} {one.name}", one.key) for one in snapshot.layers], row)
        # -1: nothing is chosen; then both buttons are enabled, and choose the first layer
        at = numbers[row.key] if row else -1
        self._previous_button.disabled, self._next_button.disabled = (
            at == 0 or not snapshot.layers,
            at == len(snapshot.layers) - 1,
        )
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
            if self._list.value != (key := row.key if row else _NO_LAYER_OPTION[1]):
                self._list.value = key
        finally:
            self._filling = False

    def _draw_layer(self, row: LayerRow, snapshot: Snapshot) -> None:
        facts, moment = self._facts_of(row), StateVersion.of(snapshot)
        _set_if_changed(self._facts_html, facts_html(row, number_layers(one.key for one in snapshot.layers), facts))
        known = row.key, facts, snapshot.statistics  # the statistics are another object after a step or an edit
        if known != self._drawn_inputs:
            self._drawn_inputs = known
            _set_if_changed(self._weights, "" if facts is None else draw_histogram(facts))
            _set_if_changed(self._figures, draw_figures(snapshot.statistics, row.key) if snapshot.steps else "")
        edits = edits_for_layer(row, snapshot.layers)
        for words in _EDIT_ICONS:
            button, code = self._edits[words]
            # `edits_of` has either Freeze or Unfreeze; they share a button, which keeps its place
            able = next((one for one in edits if one == words or (words, one) == ("Freeze", "Unfreeze")), None)
            button.disabled, button.description = able is None, able or words
            _set_if_changed(code, "" if able is None else code_line(f"relay.apply({edit_code(edits[able])})"))
        for how, make in TRIAL_EDITS.items():
            button, said = self._edits[how]
            button.disabled = row.stack is None or (row.key, how) in self._trials.waiting
            waits = "is being measured, or waits for its turn" if (row.key, how) in self._trials.waiting else ""
            found = trial_html(self._trials.found.get((row.key, how)), waits, moment)
            _set_if_changed(said, f"{code_line(f'workbench.measure({edit_code(make(row.key))})')} {found}")

        self._predictions.draw(row, snapshot)

    def _draw_trials(self, snapshot: Snapshot) -> None:
        left, moment = self._trials.remaining, StateVersion.of(snapshot)
        self._all_button.disabled, self._stop_button.disabled = bool(left) or not _trial_keys(snapshot), not left
        words = f"{left} measurements left" if left else self._trials.stop_reason
        _set_if_changed(self._progress, f'<span class="l2l-caption" role="status">{words}</span>')
        known = (self._trials.found, snapshot.layers, moment)
        # by identity: trials and layers are replaced and never changed in place, so this costs nothing at every frame
        if (
            self._chart_inputs[0] is not known[0]
            or self._chart_inputs[1] is not known[1]
            or self._chart_inputs[2] != moment
        ):
            self._chart_inputs, picture = known, self._trials_picture(snapshot, moment)
            _set_if_changed(self._chart, "" if picture is None else picture.svg)
            self._fold.widget.layout.display = "none" if picture is None else ""
            if picture is not None:
                self._fold.show(lambda: picture.table)

    def _trials_picture(self, snapshot: Snapshot, version: StateVersion) -> Picture | None:
        keys = {row.key for row in snapshot.layers}
        found = [one for one in self._trials.found.values() if one.key in keys]
        numbers = number_layers(row.key for row in snapshot.layers)
        return show_trials(snapshot.layers, found, numbers, version) if found else None

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        row, moment = self._selection.find_in(snapshot.layers), StateVersion.of(snapshot)
        picture = self._trials_picture(snapshot, moment)
        charts = [] if picture is None else [picture]
        if row is None:
            return [Table("Card of a layer", ("layer",), [], "No layer is chosen."), *charts]
        found = [one for (key, _), one in self._trials.found.items() if key == row.key]
        numbers, facts = number_layers(one.key for one in snapshot.layers), self._facts_of(row)
        return [card_table(row, numbers, facts, found, moment), *self._predictions.still(row.key), *charts]

    # -- asking --------------------------------------------------------------------------------------------------------

    def _facts_of(self, row: LayerRow) -> LayerFacts | None:
        """What is known of this layer; never that of another one."""
        facts = self._facts
        return facts if facts is not None and facts.key == row.key else None

    def _request_facts(self, row: LayerRow, snapshot: Snapshot) -> None:
        """Have the weights looked at, if they are another layer's or there was an edit since."""
        wanted = row.key, snapshot.branch, len(snapshot.journal)
        # an ended session takes no question, and raises
        if wanted == self._facts_request or snapshot.ended:
            return
        self._facts_request = wanted
        self.session.inspect(row.key).add_done_callback(self._on_facts)

    def _on_facts(self, future: Future[LayerFacts | None]) -> None:
        """On the session's thread, without any lock; if it was cancelled, whoever did that may hold the session's."""
        if future.cancelled() or future.exception() is not None:
            return
        self._facts = future.result()
        self._redraw()

    def _redraw(self) -> None:
        self.show(self.session.snapshot())

    # -- pressed -------------------------------------------------------------------------------------------------------

    def _choose_from_list(self, key: str) -> None:
        with self._drawing:  # another thread may be filling the list, and have put the old choice back
            if self._filling:
                return
        # without the lock: every panel that watches is drawn, under a lock of its own
        self._selection.choose(None if key == _NO_LAYER_OPTION[1] else key)

    def _choose_neighbour(self, by: int) -> None:
        # as they are now: there may have been an edit since the panel was drawn
        keys = [row.key for row in self.session.snapshot().layers]
        at = keys.index(self._selection.key) + by if self._selection.key in keys else 0
        self._selection.choose(keys[min(max(at, 0), len(keys) - 1)])

    def _reread_facts(self) -> None:
        self._facts_request = None

    def _apply_edit(self, words: str) -> None:
        snapshot = self.session.snapshot()
        row = self._selection.find_in(snapshot.layers)
        if row is None:
            return  # it has gone since the panel was drawn
        edits = edits_for_layer(row, snapshot.layers)
        words = "Unfreeze" if words == "Freeze" and row.frozen else words
        self.session.edit(edits[words])

    def _run_trial(self, kind: TrialKind) -> None:
        if self._selection.key is not None:
            self._trials.request(self._selection.key, kind)

    def _run_prediction(self) -> None:
        if self._selection.key is not None:
            self._predictions.request(self._selection.key)

    def _run_all_trials(self) -> None:
        self._trials.request_all(_trial_keys(self.session.snapshot()))

    def _button(self, label: str, icon: str, tip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=label, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(lambda _: self._guarded(action))
        return button

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Do what was pressed and show at once what waits; an error is shown below."""
        try:
            action()
            self._error_html.value = ""
        except Exception as error:
            self._error_html.value = failure_html(str(error), traceback.format_exc())
        self._redraw()


def _trial_keys(snapshot: Snapshot) -> Sequence[str]:
    """Layers that can be left out, as those of a stack can."""
    return [row.key for row in snapshot.layers if row.stack is not None]


def _set_if_changed(html: ipywidgets.HTML, value: str) -> None:
    """Send it only if it is another one: what somebody has selected in it stays selected."""
    if html.value != value:
        html.value = value


def _row(*children: ipywidgets.Widget) -> ipywidgets.Box:
    row = ipywidgets.HBox(children)
    row.add_class("l2l-buttons")
    return row
