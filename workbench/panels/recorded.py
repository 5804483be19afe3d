"""Panels that only a recorded run needs: those that steer have nothing to do there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

import ipywidgets

from workbench.panels.fold import Fold
from workbench.panels.panel import Panel
from workbench.panels.race import race_axis
from workbench.panels.relay import RelayPanel
from workbench.pictures import (
    Picture,
    Table,
    cost_words,
    draw_journal,
    draw_race,
    header_html,
    header_picture,
    inside_pages,
    journal_table,
    race_table,
    row_words,
    settings_table,
    show_race,
)
from workbench.readings import number_layers
from workbench.runs import Recording
from workbench.session import Snapshot

STATE = "recorded"


class FactsPanel(Panel):
    """Shows what was trained and where, and the settings at that moment."""

    def build(self) -> ipywidgets.DOMWidget:
        self._title, self._settings = ipywidgets.HTML(), ipywidgets.HTML()
        return ipywidgets.VBox([self._title, self._settings])

    def draw(self, now: Snapshot) -> None:
        self._title.value = header_html(now, STATE)
        self._settings.value = replace(settings_table(now), title="Settings at that time").to_html()

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [header_picture(now, STATE)]


class MomentsPanel(RelayPanel):
    """Shows the relay picture of a step that is over: nothing is live, so the player stands in mid-backward at first.

    It shows the newest step that was recorded whole, with the layers that there were in it.
    """

    looks_at = Recording

    def build(self) -> ipywidgets.DOMWidget:
        widget = super().build()
        self._live.value = False
        self._live.layout.display = "none"
        return widget

    def draw(self, now: Snapshot) -> None:
        self._now = now
        if now.shown is self._played and self._picture.value:  # the player stays where a person has put it
            return
        self._take(now.shown)
        if (step := self._moments()) is None or not step.count:
            self._picture.value = '<p class="l2l-empty">No step up to here was fully recorded.</p>'
            return
        self._at.value = step.telling()
        # the slider alone would draw nothing where it has stood at this event already
        assert now.shown is not None, "there are moments"
        self._put(step.at(step.telling()), now.shown.layers)


class RacedPanel(Panel):
    """Shows the last race that was over by then."""

    looks_at = Recording

    def build(self) -> ipywidgets.DOMWidget:
        self._axis, self._picture, self._fold = race_axis(), ipywidgets.HTML(), Fold("The race as a table")
        self._axis.observe(lambda _: self.show(self.session.snapshot()), "value")
        axis = ipywidgets.HBox([self._axis])
        axis.add_class("l2l-settings")
        return ipywidgets.VBox([self._picture, axis, self._fold.widget])

    def draw(self, now: Snapshot) -> None:
        race = now.race
        self._axis.disabled = race is None
        if race is None:
            self._picture.value = '<p class="l2l-empty">No race had ended by this moment.</p>'
            # else an open fold would go on showing the race of a later moment
            self._fold.show(lambda: Table("Race", ("branch",), ()))
            return
        self._picture.value = draw_race(race, self._axis.value)
        self._fold.show(lambda: race_table(race))

    def still(self, now: Snapshot) -> Sequence[Picture]:
        return [show_race(now.race, self._axis.value)] if now.race is not None else []


class SeenPanel(Panel):
    """Shows the last look inside by then, all pictures one below the other."""

    looks_at = Recording

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn: object = None
        self._pages = ipywidgets.HTML()
        return ipywidgets.VBox([self._pages])

    def draw(self, now: Snapshot) -> None:
        found = self.session.run.look(self.session.number)
        if found is None:
            self._drawn, self._pages.value = None, '<p class="l2l-empty">Nobody had looked inside by this moment.</p>'
        elif found != self._drawn:  # what a person has unfolded stays so
            self._drawn = found
            seen = found[1].seen
            words = f"{row_words(seen).capitalize()}, after step {seen.step} of {seen.branch}; {cost_words(seen)}."
            pages = "".join(one.to_html() for one in self._shown())
            self._pages.value = f'<div class="l2l-caption">{escape(words)}</div>{pages}'

    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        return self._shown()

    def _shown(self) -> Sequence[Picture | Table]:
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

    def draw(self, now: Snapshot) -> None:
        self._table.value = draw_journal(now.journal, now.changes)

    def still(self, now: Snapshot) -> Sequence[Table]:
        return [journal_table(now.journal, now.changes)] if now.journal else []
