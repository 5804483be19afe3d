"""Controls and picture of a race between branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets

from l2l_core import Edit
from workbench.panels.controls import control_layout, make_box, make_dropdown, make_row, set_options
from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import ControlPanel
from workbench.pictures import AXES, Picture, Table, draw_race, race_table, show_race
from workbench.session import Race, Session, Snapshot, race_variants

_EMPTY = '<p class="l2l-empty">In a race, branches train on the same batches. {}</p>'
_FORK = "Make a second branch first: choose a change and press Fork and race, or press Fork in the view Edits."
_CHOOSE = "Choose two or more, then press Start race."


class RacePanel(ControlPanel):
    """Trains branches in turn on the same batches and plots their losses over steps, compute or seconds."""

    source_type = Session
    session: Session

    def build(self) -> ipywidgets.DOMWidget:
        self._snapshot: Snapshot | None = None
        self._drawn_inputs: tuple[object, ...] = ()
        self._variants: Mapping[str, Sequence[Edit]] = {}
        self._names = ipywidgets.SelectMultiple(options=[], description="branches", rows=4, **control_layout("300px"))
        self._first = make_dropdown("compared with", [], "240px")
        self._names.observe(lambda _: self._on_choice(), "value")
        layout = control_layout("130px")
        self._steps = ipywidgets.BoundedIntText(value=200, min=1, max=1_000_000, description="steps", **layout)
        tip = "Train the selected branches on the same batches"
        self._race = self._button("Start race", "flag-checkered", tip, self._start_race)
        self._race.button_style = "primary"
        self._pause = self._button("Pause race", "pause", "Pause after the current step", self._pause_or_resume)
        self._stop = self._button("Stop race", "stop", "End the race after the current step", self.session.stop)
        self._axis = make_axis_buttons()
        self._axis.observe(lambda _: self._redraw(), "value")
        self._error_html = ipywidgets.HTML(layout={"display": "none"})
        self._picture, self._fold = ipywidgets.HTML(), FoldedTable("The race as a table")
        buttons = make_row(self._first, self._steps, self._race, self._pause, self._stop)
        self._variant = make_dropdown("race this model against a copy: ", [], "520px")
        tip = "Fork a branch, edit it, and train both on the same batches"
        self._race_variant = self._button("Fork and race", "code-branch", tip, self._start_variant)
        variant = make_row(self._variant, self._race_variant)
        axis = make_box(ipywidgets.HBox, "l2l-settings", self._axis)
        form = make_box(ipywidgets.HBox, "l2l-form", self._names, ipywidgets.VBox([variant, buttons, axis]))
        return ipywidgets.VBox([self._picture, form, self._error_html, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._update_branches([branch.name for branch in snapshot.branches])
        self._variants = race_variants(snapshot.layers)
        set_options(self._variant, [(label, label) for label in self._variants])
        self._enable_start()
        race = snapshot.race
        self._pause.disabled = self._stop.disabled = race is None or race.is_over
        paused = race is not None and race.is_paused
        self._pause.description, self._pause.icon = ("Continue race", "play") if paused else ("Pause race", "pause")
        # during a race only the lengths are compared: comparing every step of every branch would be slow
        progress = race if race is None or race.is_over else _progress_key(race)
        inputs = progress, self._axis.value, len(snapshot.branches) > 1
        if inputs == self._drawn_inputs:
            return
        self._drawn_inputs = inputs
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
        """Update the list of branches; new branches are selected."""
        old = self._names.options
        if tuple(old) != tuple(names):
            chosen = [name for name in names if name in self._names.value or name not in old]
            with self._names.hold_sync():  # one message, so that the page never shows an empty selection
                self._names.options = names
                self._names.value = chosen
            self._on_choice()

    def _on_choice(self) -> None:
        set_options(self._first, [(name, name) for name in self._names.value])
        self._enable_start()

    def _enable_start(self) -> None:
        race = self._snapshot.race if self._snapshot is not None else None
        is_racing = race is not None and not race.is_over
        self._race.disabled = is_racing or len(self._names.value) < 2
        self._race_variant.disabled = is_racing or not self._variants

    def _start_variant(self) -> None:
        self.session.race_variant(*self._variants[self._variant.value], steps=self._steps.value)

    def _start_race(self) -> None:
        first = self._first.value  # the others are compared with the first branch
        self.session.race(first, *(name for name in self._names.value if name != first), steps=self._steps.value)

    def _pause_or_resume(self) -> None:
        race = self.session.snapshot().race
        if race is not None and race.is_paused:
            self.session.run()
        else:
            self.session.pause()


def make_axis_buttons() -> Any:
    """Return toggle buttons for the horizontal axis of a race; their value is an `Axis`."""
    return ipywidgets.ToggleButtons(
        options=[(label, name) for name, label in AXES.items()],
        description="over",
        style={"description_width": "40px", "button_width": "auto"},
    )


def _progress_key(race: Race) -> tuple[object, ...]:
    """Return numbers that change when the race proceeds."""
    return race.asked, *((one.name, len(one.steps), len(one.measured), one.left) for one in race.racers)
