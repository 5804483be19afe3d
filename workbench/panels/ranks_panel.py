"""Relay pictures of all ranks side by side, with their waits and failures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

import ipywidgets

from workbench.panels.controls import make_box
from workbench.panels.panel import Panel, failure_html
from workbench.panels.relay_panel import RelayPanel
from workbench.pictures import Picture, Table, format_seconds
from workbench.ranks import RankController, RemoteRank
from workbench.session import Snapshot


class RanksPanel(Panel):
    """Live relay picture of every rank, each with a player for its last step."""

    source_type = RankController
    session: RankController
    has_own_caption = True  # in each rank's picture

    def build(self) -> ipywidgets.DOMWidget:
        self._columns = [_RankColumn(one) for one in self.session.ranks]
        row = make_box(ipywidgets.HBox, "l2l-ranks", *(column.widget for column in self._columns))
        return ipywidgets.VBox([row])

    def draw(self, snapshot: Snapshot) -> None:
        for column in self._columns:
            column.draw()

    def still(self, snapshot: Snapshot) -> Sequence[Picture | Table]:
        return [picture for column in self._columns for picture in column.still()]


class _RankColumn:
    """Caption, failure and relay picture of one rank."""

    def __init__(self, remote: RemoteRank) -> None:
        self._remote, self._panel = remote, RelayPanel(remote)
        self._caption, self._error_html = ipywidgets.HTML(), ipywidgets.HTML(layout={"display": "none"})
        parts = self._caption, self._error_html, self._panel.widget
        self.widget = make_box(ipywidgets.VBox, "l2l-rank", *parts)

    def draw(self) -> None:
        snapshot = self._remote.snapshot()
        waits = f" · {_describe_waits(snapshot)}" if snapshot.last is not None else ""
        self._caption.value = f'<div class="l2l-heading">Worker {self._remote.rank}{escape(waits)}</div>'
        self._draw_error(snapshot)
        self._panel.show(snapshot)

    def still(self) -> Sequence[Picture | Table]:
        return self._panel.still_or_error(self._remote.snapshot())

    def _draw_error(self, snapshot: Snapshot) -> None:
        broken, failure = self._remote.failure, snapshot.failure
        if self._remote.ended or broken is not None:
            message = self._remote.ended or "its state can no longer be shown"
            words = f"Worker {self._remote.rank}: {message}", broken.traceback if broken is not None else ""
        elif failure is not None:
            words = f"Worker {self._remote.rank}: {failure.error}: {failure.message}", failure.traceback
        else:
            words = "", ""
        self._error_html.value = failure_html(*words) if words[0] else ""
        self._error_html.layout.display = "" if words[0] else "none"


def _describe_waits(snapshot: Snapshot) -> str:
    """Return the rank for which compute waited longest in the last step, and the seconds."""
    assert snapshot.last is not None, "the caller checks"
    lost_s: dict[int, float] = defaultdict(float)
    for wait in snapshot.last.waits():
        lost_s[wait.last] += wait.exposed_s
    most = max(lost_s, key=lambda rank: lost_s[rank], default=None)
    return "no waits" if most is None else f"waited {format_seconds(lost_s[most])} for worker {most}"
