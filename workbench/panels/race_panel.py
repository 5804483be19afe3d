"""A race of branches: which, how long, its buttons, and the picture."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from workbench.panels.choices import control_layout, set_options
from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import Panel, failure_html
from workbench.pictures import AXES, Picture, Table, draw_race, race_table, show_race
from workbench.session import Race, Session, Snapshot

_EMPTY = '<p class="l2l-empty">Branches race on the same batches. {}</p>'
_FORK = "Make a second branch first, with Fork in the view edits."
_CHOOSE = "Choose two or more, then press Start race."


class RacePanel(Panel):
    """Lets branches train in turn on the same batches, and shows them over steps, compute or seconds.

    All controls are native ones: Tab reaches them; in the list of branches arrow keys choose, with Shift several.
    """

    source_type = Session

    def build(self) -> ipywidgets.DOMWidget:
        self._snapshot: Snapshot | None = None
        self._drawn_inputs: tuple[object, ...] = ()
        self._names = ipywidgets.SelectMultiple(options=[], description="branches", rows=4, **control_layout("300px"))
        self._first = ipywidgets.Dropdown(options=[], description="compared with", **control_layout("240px"))
        self._names.observe(lambda _: self._on_choice(), "value")
        self._steps = ipywidgets.BoundedIntText(
            value=200, min=1, max=1_000_000, description="steps", **control_layout("130px")
        )
        self._race = self._button(
            "Start race", "flag-checkered", "Train the chosen branches on the same batches", self._start_race
        )
        self._race.button_style = "primary"
        self._pause = self._button("Pause race", "pause", "Pause after the current step", self._pause_or_resume)
        self._stop = self._button("Stop race", "stop", "End the race after the current step", self.session.stop)
        self._axis = make_axis_buttons()
        self._axis.observe(lambda _: self._redraw(), "value")
        self._error_html = ipywidgets.HTML(layout={"display": "none"})
        self._picture, self._fold = ipywidgets.HTML(), FoldedTable("The race as a table")
        asked = ipywidgets.HBox([self._first, self._steps, self._race, self._pause, self._stop])
        asked.add_class("l2l-buttons")
        axis = ipywidgets.HBox([self._axis])
        axis.add_class("l2l-settings")
        form = ipywidgets.HBox([self._names, ipywidgets.VBox([asked, axis])])
        form.add_class("l2l-form")
        return ipywidgets.VBox([self._picture, form, self._error_html, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._update_branches([branch.name for branch in snapshot.branches])
        race = snapshot.race
        runs = race is not None and not race.is_over
        self._race.disabled = runs or len(self._names.value) < 2
        self._pause.disabled = self._stop.disabled = not runs
        paused = race is not None and race.is_paused
        self._pause.description, self._pause.icon = ("Go on", "play") if paused else ("Pause race", "pause")
        # of a race that is run the lengths are compared: to compare every step of every branch would take long
        known = (
            race if race is None or race.is_over else _progress_key(race),
            self._axis.value,
            len(snapshot.branches) > 1,
        )
        if known == self._drawn_inputs:
            return
        self._drawn_inputs = known
        if race is None:
            self._picture.value = _EMPTY.format(_CHOOSE if len(snapshot.branches) > 1 else _FORK)
            return
        self._picture.value = draw_race(race, self._axis.value)
        self._fold.show(lambda: race_table(race))

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        if snapshot.race is not None:
            return [show_race(snapshot.race, self._axis.value)]
        return [Table("Race", ("branch",), [(branch.name,) for branch in snapshot.branches], "No race has been run.")]

    def _update_branches(self, names: Sequence[str]) -> None:
        """New branches are chosen, so that two of them race at once."""
        old = self._names.options
        if tuple(old) != tuple(names):
            chosen = [name for name in names if name in self._names.value or name not in old]
            with self._names.hold_sync():  # one message, so that the page never shows a list with nothing chosen
                self._names.options = names
                self._names.value = chosen
            self._on_choice()

    def _on_choice(self) -> None:
        set_options(self._first, [(name, name) for name in self._names.value])
        runs = self._snapshot is not None and self._snapshot.race is not None and not self._snapshot.race.is_over
        self._race.disabled = runs or len(self._names.value) < 2

    def _start_race(self) -> None:
        # the first name is the one that the others are compared with
        first = self._first.value
        self.session.race(first, *(name for name in self._names.value if name != first), steps=self._steps.value)

    def _pause_or_resume(self) -> None:
        race = self.session.snapshot().race
        if race is not None and race.is_paused:
            self.session.run()
        else:
            self.session.pause()

    def _redraw(self) -> None:
        if self._snapshot is not None:
            self.show(self._snapshot)

    def _button(self, label: str, icon: str, tip: str, action: Callable[[], Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=label, icon=icon, tooltip=tip, layout={"width": "auto"})
        button.on_click(lambda _: self._run_action(action))
        return button

    def _run_action(self, action: Callable[[], Any]) -> None:
        with self._drawing:
            try:
                action()
                self._error_html.layout.display = "none"
            except Exception as error:
                self._error_html.value = failure_html(str(error), traceback.format_exc())
                self._error_html.layout.display = ""


def make_axis_buttons() -> ipywidgets.ToggleButtons:
    """Make the buttons that say over what a race is drawn."""
    return ipywidgets.ToggleButtons(
        options=[(words, name) for name, words in AXES.items()],
        description="over",
        style={"description_width": "40px", "button_width": "auto"},
    )


def _progress_key(race: Race) -> tuple[object, ...]:
    """What grows while it is run."""
    return race.asked, *((one.name, len(one.steps), len(one.measured), one.left) for one in race.racers)
