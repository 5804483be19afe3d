"""Panels that only a recorded run needs: those that steer have nothing to do there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import ipywidgets

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
    """Shows what was trained and where, and the settings at that moment."""

    def build(self) -> ipywidgets.DOMWidget:
        self._title, self._settings = ipywidgets.HTML(), ipywidgets.HTML()
        return ipywidgets.VBox([self._title, self._settings])

    def draw(self, snapshot: Snapshot) -> None:
        self._title.value = header_html(snapshot, RECORDED_STATE)
        self._settings.value = replace(settings_table(snapshot), title="Settings at that time").to_html()

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [header_picture(snapshot, RECORDED_STATE)]


class RecordedRelayPanel(RelayPanel):
    """Shows the relay picture of a step that is over: nothing is live, so the player stands in mid-backward at first.

    It shows the newest step that was recorded whole, with the layers that there were in it.
    """

    source_type = RunCursor

    def build(self) -> ipywidgets.DOMWidget:
        widget = super().build()
        self._live.value = False
        self._live.layout.display = "none"
        return widget

    def draw(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if snapshot.shown is self._played_step and self._picture.value:  # the player stays where a person has put it
            return
        self._load_step(snapshot.shown)
        if (step := self._load_timeline()) is None or not step.count:
            self._picture.value = '<p class="l2l-empty">No step up to here was fully recorded.</p>'
            return
        self._slider.value = step.busiest_event()
        # the slider alone would draw nothing where it has stood at this event already
        assert snapshot.shown is not None, "there are moments"
        self._draw_state(step.at_event(step.busiest_event()), snapshot.shown.layers)


class RecordedRacePanel(Panel):
    """Shows the last race that was over by then."""

    source_type = RunCursor

    def build(self) -> ipywidgets.DOMWidget:
        self._axis, self._picture, self._fold = (
            make_axis_buttons(),
            ipywidgets.HTML(),
            FoldedTable("The race as a table"),
        )
        self._axis.observe(lambda _: self.show(self.session.snapshot()), "value")
        axis = ipywidgets.HBox([self._axis])
        axis.add_class("l2l-settings")
        return ipywidgets.VBox([self._picture, axis, self._fold.widget])

    def draw(self, snapshot: Snapshot) -> None:
        race = snapshot.race
        self._axis.disabled = race is None
        if race is None:
            self._picture.value = '<p class="l2l-empty">No race had ended by this moment.</p>'
            # else an open fold would go on showing the race of a later moment
            self._fold.show(lambda: Table("Race", ("branch",), ()))
            return
        self._picture.value = draw_race(race, self._axis.value)
        self._fold.show(lambda: race_table(race))

    def still(self, snapshot: Snapshot) -> Sequence[Picture]:
        return [show_race(snapshot.race, self._axis.value)] if snapshot.race is not None else []


class RecordedInsidePanel(Panel):
    """Shows the last look inside by then, all pictures one below the other."""

    source_type = RunCursor

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn_inputs: object = None
        self._pages = ipywidgets.HTML()
        return ipywidgets.VBox([self._pages])

    def draw(self, snapshot: Snapshot) -> None:
        found = self.session.run.look(self.session.number)
        if found is None:
            self._drawn_inputs, self._pages.value = (
                None,
                '<p class="l2l-empty">Nobody had looked inside by this moment.</p>',
            )
        elif found != self._drawn_inputs:  # what a person has unfolded stays so
            self._drawn_inputs = found
            seen = found[1].seen
            words = (
                f"{describe_rows(seen).capitalize()}, after step {seen.step} of {seen.branch}; {describe_cost(seen)}."
            )
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
        return inside_pages(look.seen, numbers, look.decode)


class JournalPanel(Panel):
    """Shows what was edited so far."""

    def build(self) -> ipywidgets.DOMWidget:
        self._table = ipywidgets.HTML()
        return ipywidgets.VBox([self._table])

    def draw(self, snapshot: Snapshot) -> None:
        self._table.value = draw_journal(snapshot.journal, snapshot.changes)

    def still(self, snapshot: Snapshot) -> Sequence[Table]:
        return [journal_table(snapshot.journal, snapshot.changes)] if snapshot.journal else []
