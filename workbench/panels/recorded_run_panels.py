"""Panels of a recorded run, without controls of the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import ipywidgets

from workbench.panels.controls import make_box
from workbench.panels.folded_table import FoldedTable
from workbench.panels.panel import Panel
from workbench.panels.race_panel import make_axis_buttons
from workbench.panels.relay_panel import RelayPanel
from workbench.pictures import (
    Picture,
    Table,
    describe_cost,
    describe_rows,
    draw_journal,
    draw_race,
    header_html,
    header_picture,
    inside_pages,
    journal_table,
    race_table,
    settings_table,
    show_race,
)
from workbench.readings import number_layers
from workbench.runs import RunCursor
from workbench.session import Snapshot

RECORDED_STATE = "recorded"


class FactsPanel(Panel):
    """Model, device and settings at the selected moment."""

    def build(self) -> ipywidgets.DOMWidget:
        self._title, self._settings = ipywidgets.HTML(), ipywidgets.HTML()
        return ipywidgets.VBox([self._title, self._settings])

    def draw(self, snapshot: Snapshot) -> None:
        self._title.value = header_html(snapshot, RECORDED_STATE)
        self._settings.value = replace(settings_table(snapshot), title="Settings at that time").to_html()

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [header_picture(snapshot, RECORDED_STATE)]


class RecordedRelayPanel(RelayPanel):
    """The relay picture of the newest completely recorded step, with the layers of that step.

    There is no live mode; the player starts at the busiest event, in the middle of backward.
    """

    source_type = RunCursor
    session: RunCursor

    def build(self) -> ipywidgets.DOMWidget:
        widget = super().build()
        self._live.value = False
        self._live.layout.display = "none"
        return widget

    def draw(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if snapshot.shown is self._played_step and self._picture.value:  # keep the user's position
            return
        self._load_step(snapshot.shown)
        if (timeline := self._load_timeline()) is None or not timeline.count:
            self._picture.value = '<p class="l2l-empty">No step up to here was fully recorded.</p>'
            return
        self._slider.value = timeline.busiest_event()
        # draw here too: a slider that was at this event does not call its observers
        assert snapshot.shown is not None, "it has a timeline"
        self._draw_state(timeline.at_event(timeline.busiest_event()), snapshot.shown.layers)


class RecordedRacePanel(Panel):
    """The last race that had ended by the selected moment."""

    source_type = RunCursor
    session: RunCursor

    def build(self) -> ipywidgets.DOMWidget:
        self._axis, self._picture = make_axis_buttons(), ipywidgets.HTML()
        self._fold = FoldedTable("The race as a table")
        self._axis.observe(lambda _: self._redraw(), "value")
        axis = make_box(ipywidgets.HBox, "l2l-settings", self._axis)
        return ipywidgets.VBox([self._picture, axis, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        race = snapshot.race
        self._axis.disabled = race is None
        if race is None:
            self._picture.value = '<p class="l2l-empty">No race had ended by this moment.</p>'
            # an open fold would still show the race of a later moment
            self._fold.show(lambda: Table("Race", ("branch",), ()))
            return
        self._picture.value = draw_race(race, self._axis.value)
        self._fold.show(lambda: race_table(race))

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [show_race(snapshot.race, self._axis.value)] if snapshot.race is not None else []


class RecordedInsidePanel(Panel):
    """All pictures of the last look inside before the selected moment."""

    source_type = RunCursor
    session: RunCursor

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: object = None
        self._pages = ipywidgets.HTML()
        return ipywidgets.VBox([self._pages])

    def draw(self, snapshot: Snapshot) -> None:
        found = self.session.run.look(self.session.number)
        if found is None:
            self._drawn_inputs = None
            self._pages.value = '<p class="l2l-empty">No look inside was recorded up to this moment.</p>'
        elif found != self._drawn_inputs:  # only then: opened parts stay open
            self._drawn_inputs = found
            inside = found[1].inside
            rows = describe_rows(inside).capitalize()
            words = f"{rows}, after step {inside.step} of {inside.branch}; {describe_cost(inside)}."
            pages = "".join(one.to_html() for one in self._inside_pages())
            self._pages.value = f'<div class="l2l-caption">{escape(words)}</div>{pages}'

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        return self._inside_pages()

    def _inside_pages(self) -> Sequence[Picture | Table]:
        found = self.session.run.look(self.session.number)
        if found is None:
            return []
        number, look = found
        numbers = number_layers(row.key for row in self.session.run.snapshot(number).layers)
        return inside_pages(look.inside, numbers, look.decode)


class JournalPanel(Panel):
    """Journal of the edits up to the selected moment."""

    def build(self) -> ipywidgets.DOMWidget:
        self._table = ipywidgets.HTML()
        return ipywidgets.VBox([self._table])

    def draw(self, snapshot: Snapshot) -> None:
        self._table.value = draw_journal(snapshot.journal, snapshot.changes)

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return [journal_table(snapshot.journal, snapshot.changes)] if snapshot.journal else []
