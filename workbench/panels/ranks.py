"""Ranks beside one another: each with its relay picture, what it waits for, and what went wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import ipywidgets

from l2l_core import Traces
from workbench.launch import Conductor, Remote
from workbench.panels.fold import Fold
from workbench.panels.panel import Panel, failure_html
from workbench.panels.relay import RelayPanel
from workbench.pictures import Picture, Table, show_stragglers, show_timeline, straggler_words
from workbench.session import Snapshot


class RanksPanel(Panel):
    """Shows every rank's relay picture, live, side by side; each has a player of its own for its last step."""

    looks_at = Conductor
    says_whose = True  # each rank's picture does

    def build(self) -> ipywidgets.DOMWidget:
        self._columns = [_Column(one) for one in self.session.ranks]
        row = ipywidgets.HBox([column.widget for column in self._columns])
        row.add_class("l2l-ranks")
        return ipywidgets.VBox([row])

    def draw(self, now: Snapshot) -> None:
        for column in self._columns:
            column.draw()

    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        return [picture for column in self._columns for picture in column.still()]


class _Column:
    """One rank: a caption, its trouble if it has any, and its picture."""

    def __init__(self, remote: Remote) -> None:
        self._remote, self._panel = remote, RelayPanel(remote)
        self._caption, self._trouble = ipywidgets.HTML(), ipywidgets.HTML(layout={"display": "none"})
        self.widget = ipywidgets.VBox([self._caption, self._trouble, self._panel.widget])
        self.widget.add_class("l2l-rank")

    def draw(self) -> None:
        now = self._remote.snapshot()
        waits = f" · {_waits(now)}" if now.last is not None else ""
        self._caption.value = f'<div class="l2l-heading">Worker {self._remote.rank}{escape(waits)}</div>'
        self._draw_trouble(now)
        self._panel.show(now)

    def still(self) -> Sequence[Picture | Table]:
        return self._panel.page(self._remote.snapshot())

    def _draw_trouble(self, now: Snapshot) -> None:
        broken, failure = self._remote.broken, now.failure
        if self._remote.ended or broken is not None:
            message = self._remote.ended or "it can be shown no more"
            words = f"Worker {self._remote.rank}: {message}", broken.traceback if broken is not None else ""
        elif failure is not None:
            words = f"Worker {self._remote.rank}: {failure.error}: {failure.message}", failure.traceback
        else:
            words = "", ""
        self._trouble.value = failure_html(*words) if words[0] else ""
        self._trouble.layout.display = "" if words[0] else "none"


def _waits(now: Snapshot) -> str:
    """For whom the rank has waited in its last step."""
    assert now.last is not None, "no step yet"
    waits = now.last.waits()
    return straggler_words(waits, "it") if waits else "has waited for nobody"


class StragglersPanel(Panel):
    """Shows who waited for whom in the last step that all ranks have finished, and below it every rank's lanes."""

    looks_at = Conductor

    def build(self) -> ipywidgets.DOMWidget:
        self._drawn: object = None
        self._picture, self._fold, self._lanes = (
            ipywidgets.HTML(),
            Fold("Who waits for whom, as a table"),
            ipywidgets.HTML(),
        )
        return ipywidgets.VBox([self._picture, self._fold.widget, self._lanes])

    def draw(self, now: Snapshot) -> None:
        traces = traces_of(self.session)
        if traces is None:
            self._picture.value = '<p class="l2l-empty">What workers waited for appears with the first step.</p>'
        elif traces[0] is not self._drawn:
            self._drawn, shown = traces[0], show_stragglers(traces)
            self._picture.value = shown.svg
            self._fold.show(lambda: shown.table)
            heads = [f'<div class="l2l-heading">Worker {trace.worker.rank}</div>' for trace in traces]
            self._lanes.value = "".join(a + show_timeline(b).svg for a, b in zip(heads, traces, strict=True))

    def still(self, now: Snapshot) -> Sequence[Picture | Table]:
        traces = traces_of(self.session)
        return [show_stragglers(traces), *map(show_timeline, traces)] if traces is not None else []

    def whose(self, now: Snapshot) -> str:
        return now.shown_words


def traces_of(conductor: Conductor) -> Traces | None:
    """Put the traces of the last step together; None before the first, and while some rank is a step ahead."""
    found = [now.last for now in (one.snapshot() for one in conductor.ranks)]
    traces = [trace for trace in found if trace is not None]
    return Traces(traces) if len(traces) == len(found) and len({trace.step for trace in traces}) == 1 else None
