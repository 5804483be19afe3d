"""The card of the chosen layer: what it is, how its weights are spread, what the probe says of it, and edits of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import ipywidgets

from workbench.panels.choices import make_dropdown, offer
from workbench.panels.fold import Fold
from workbench.panels.keys import KeepsKeys
from workbench.panels.panel import Panel, failure_html
from workbench.panels.predictions import Predictions
from workbench.panels.selection import selection_of
from workbench.panels.touch import touched
from workbench.panels.trials import Trials
from workbench.pictures import (
    TRIAL_WORDS,
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
from workbench.session import TRIED, How, LayerFacts, LayerRow, Moment, Session, Snapshot, code_of, edits_of

_NOBODY = "No layer is chosen: choose one in the list, or in the table of layers."
_NONE = ("choose a layer", "")  # not None: with that value a list of ipywidgets shows nothing
_EDITS = {
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

    looks_at = Session

    def build(self) -> ipywidgets.Box:
        self._selection, self._trials = selection_of(self.session), Trials(self.session, self._redraw)
        self._predictions = Predictions(self.session, self._redraw)
        self._predictions.button.on_click(lambda _: self._guarded(self._press_predict))
        self._filling = False  # whether it is the panel that sets the list
        self._facts: LayerFacts | None = None
        self._looked: object = None  # what the weights were last asked for
        self._drawn: object = None
        self._charted: tuple[Any, ...] = (None, None, None)
        self._edits = {}
        self._selection.watch(self._redraw)
        self._facts_html, self._trouble = ipywidgets.HTML(), ipywidgets.HTML()
        self._weights, self._figures, self._chart = ipywidgets.HTML(), ipywidgets.HTML(), touched(ipywidgets.HTML())
        self._fold = Fold("Measurements as a table")
        self._fold.widget.layout.display = "none"
        self._line = ipywidgets.HTML()
        self._line.add_class("l2l-card-pending")
        self._list = make_dropdown("card of", [_NONE], "320px")
        self._list.observe(lambda change: self._choose_listed(change["new"]), "value")
        self._before = self._button(
            "Previous layer", "chevron-left", "Choose the previous layer", lambda: self._move(-1)
        )
        self._after = self._button("Next layer", "chevron-right", "Choose the next layer", lambda: self._move(1))
        self._look = self._button("Look again", "refresh", "Look at the weights as they are now", self._look_again)
        chooser = _row(self._list, self._before, self._after, self._look)
        acts = [self._build_act(words, icon) for words, icon in _EDITS.items()]
        tries = [self._build_try(how) for how in TRIED]
        predicted = [_row(self._predictions.button, self._predictions.line), self._predictions.picture]
        self._all = self._button("All layers", "bar-chart", "Measure both for every layer in turn", self._press_all)
        self._stop = self._button("Stop measuring", "stop", "Stop after the current measurement", self._trials.stop)
        self._progress = ipywidgets.HTML()
        charts = ipywidgets.HBox([self._weights, self._figures])
        charts.add_class("l2l-card-charts")
        side_by_side = ipywidgets.VBox([*acts, *tries])
        side_by_side.add_class("l2l-card-acts")
        parts = [self._facts_html, charts, side_by_side, *predicted]
        self._of_one = ipywidgets.VBox(parts)
        everyone = [_row(self._all, self._stop, self._progress), self._chart, self._fold.widget]
        keys = KeepsKeys(layout={"display": "none"})
        box = ipywidgets.VBox([ipywidgets.HTML(), chooser, self._of_one, *everyone, self._line, self._trouble, keys])
        box.add_class("l2l-card-panel")
        return box

    def _build_act(self, words: str, icon: str) -> ipywidgets.Box:
        button = self._button(words, icon, "Carry it out after the current step", partial(self._press, words))
        self._edits[words] = button, ipywidgets.HTML()
        return _row(*self._edits[words])

    def _build_try(self, how: How) -> ipywidgets.Box:
        words = TRIAL_WORDS[how].capitalize()
        button = self._button(
            words, "balance-scale", "Measure it on the probe; nothing is changed", lambda: self._try(how)
        )
        self._edits[how] = button, ipywidgets.HTML()
        return _row(*self._edits[how])

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, now: Snapshot) -> None:
        row, numbers = self._selection.among(now.layers), number_layers(one.key for one in now.layers)
        title = self.widget.children[0]
        # of a chosen layer the list below says it, and the view fits a screen
        title.value = "" if row else f'<div class="l2l-heading">Card of a layer</div><p>{_NOBODY}</p>'
        title.layout.display = "none" if row else ""
        self._fill([(f"{full_name(one.key, numbers)} {one.name}", one.key) for one in now.layers], row)
        # -1: nothing is chosen; then both buttons are enabled, and choose the first layer
        at = numbers[row.key] if row else -1
        self._before.disabled, self._after.disabled = at == 0 or not now.layers, at == len(now.layers) - 1
        self._of_one.layout.display = "" if row else "none"
        (self.widget.add_class if row else self.widget.remove_class)("l2l-card-open")
        self._look.disabled = row is None
        self._line.value = pending_html(now)
        if row is not None:
            self._ask_facts(row, now)
            self._draw_one(row, now)
        self._draw_all(now)

    def _fill(self, options: Sequence[tuple[str, str]], row: LayerRow | None) -> None:
        self._filling = True
        try:
            offer(self._list, [_NONE, *options])
            if self._list.value != (key := row.key if row else _NONE[1]):
                self._list.value = key
        finally:
            self._filling = False

    def _draw_one(self, row: LayerRow, now: Snapshot) -> None:
        facts, moment = self._facts_of(row), Moment.of(now)
        _set(self._facts_html, facts_html(row, number_layers(one.key for one in now.layers), facts))
        known = row.key, facts, now.statistics  # the statistics are another object after a step or an edit
        if known != self._drawn:
            self._drawn = known
            _set(self._weights, "" if facts is None else draw_histogram(facts))
            _set(self._figures, draw_figures(now.statistics, row.key) if now.steps else "")
        edits = edits_of(row, now.layers)
        for words in _EDITS:
            button, code = self._edits[words]
            # `edits_of` has either Freeze or Unfreeze; they share a button, which keeps its place
            able = next((one for one in edits if one == words or (words, one) == ("Freeze", "Unfreeze")), None)
            button.disabled, button.description = able is None, able or words
            _set(code, "" if able is None else code_line(f"relay.apply({code_of(edits[able])})"))
        for how, make in TRIED.items():
            button, said = self._edits[how]
            button.disabled = row.stack is None or (row.key, how) in self._trials.waiting
            waits = "is being measured, or waits for its turn" if (row.key, how) in self._trials.waiting else ""
            found = trial_html(self._trials.found.get((row.key, how)), waits, moment)
            _set(said, f"{code_line(f'workbench.measure({code_of(make(row.key))})')} {found}")

        self._predictions.draw(row, now)

    def _draw_all(self, now: Snapshot) -> None:
        left, moment = self._trials.left, Moment.of(now)
        self._all.disabled, self._stop.disabled = bool(left) or not _tried(now), not left
        words = f"{left} measurements left" if left else self._trials.stopped
        _set(self._progress, f'<span class="l2l-caption" role="status">{words}</span>')
        known = (self._trials.found, now.layers, moment)
        # by identity: trials and layers are replaced and never changed in place, so this costs nothing at every frame
        if self._charted[0] is not known[0] or self._charted[1] is not known[1] or self._charted[2] != moment:
            self._charted, picture = known, self._picture(now, moment)
            _set(self._chart, "" if picture is None else picture.svg)
            self._fold.widget.layout.display = "none" if picture is None else ""
            if picture is not None:
                self._fold.show(lambda: picture.table)

    def _picture(self, now: Snapshot, moment: Moment) -> Picture | None:
        keys = {row.key for row in now.layers}
        found = [one for one in self._trials.found.values() if one.key in keys]
        numbers = number_layers(row.key for row in now.layers)
        return show_trials(now.layers, found, numbers, moment) if found else None

    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        row, moment = self._selection.among(now.layers), Moment.of(now)
        picture = self._picture(now, moment)
        charts = [] if picture is None else [picture]
        if row is None:
            return [Table("Card of a layer", ("layer",), [], "No layer is chosen."), *charts]
        found = [one for (key, _), one in self._trials.found.items() if key == row.key]
        numbers, facts = number_layers(one.key for one in now.layers), self._facts_of(row)
        return [card_table(row, numbers, facts, found, moment), *self._predictions.still(row.key), *charts]

    # -- asking --------------------------------------------------------------------------------------------------------

    def _facts_of(self, row: LayerRow) -> LayerFacts | None:
        """What is known of this layer; never that of another one."""
        facts = self._facts
        return facts if facts is not None and facts.key == row.key else None

    def _ask_facts(self, row: LayerRow, now: Snapshot) -> None:
        """Have the weights looked at, if they are another layer's or there was an edit since."""
        wanted = row.key, now.branch, len(now.journal)
        # an ended session takes no question, and raises
        if wanted == self._looked or now.ended:
            return
        self._looked = wanted
        self.session.inspect(row.key).add_done_callback(self._take)

    def _take(self, future: Future[LayerFacts | None]) -> None:
        """On the session's thread, without any lock; if it was cancelled, whoever did that may hold the session's."""
        if future.cancelled() or future.exception() is not None:
            return
        self._facts = future.result()
        self._redraw()

    def _redraw(self) -> None:
        self.show(self.session.snapshot())

    # -- pressed -------------------------------------------------------------------------------------------------------

    def _choose_listed(self, key: str) -> None:
        with self._drawing:  # another thread may be filling the list, and have put the old choice back
            if self._filling:
                return
        # without the lock: every panel that watches is drawn, under a lock of its own
        self._selection.choose(None if key == _NONE[1] else key)

    def _move(self, by: int) -> None:
        # as they are now: there may have been an edit since the panel was drawn
        keys = [row.key for row in self.session.snapshot().layers]
        at = keys.index(self._selection.key) + by if self._selection.key in keys else 0
        self._selection.choose(keys[min(max(at, 0), len(keys) - 1)])

    def _look_again(self) -> None:
        self._looked = None

    def _press(self, words: str) -> None:
        now = self.session.snapshot()
        row = self._selection.among(now.layers)
        if row is None:
            return  # it has gone since the panel was drawn
        edits = edits_of(row, now.layers)
        words = "Unfreeze" if words == "Freeze" and row.frozen else words
        self.session.edit(edits[words])

    def _try(self, how: How) -> None:
        if self._selection.key is not None:
            self._trials.ask(self._selection.key, how)

    def _press_predict(self) -> None:
        if self._selection.key is not None:
            self._predictions.ask(self._selection.key)

    def _press_all(self) -> None:
        self._trials.ask_all(_tried(self.session.snapshot()))

    def _button(self, words: str, icon: str, tip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=words, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(lambda _: self._guarded(action))
        return button

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Do what was pressed and show at once what waits; an error is shown below."""
        try:
            action()
            self._trouble.value = ""
        except Exception as error:
            self._trouble.value = failure_html(str(error), traceback.format_exc())
        self._redraw()


def _tried(now: Snapshot) -> Sequence[str]:
    """Layers that can be left out, as those of a stack can."""
    return [row.key for row in now.layers if row.stack is not None]


def _set(html: ipywidgets.HTML, value: str) -> None:
    """Send it only if it is another one: what somebody has selected in it stays selected."""
    if html.value != value:
        html.value = value


def _row(*children: ipywidgets.Widget) -> ipywidgets.Box:
    row = ipywidgets.HBox(children)
    row.add_class("l2l-buttons")
    return row
