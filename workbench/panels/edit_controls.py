"""Controls of the view Edits beside its form: branches, queue and probe."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets

from workbench.panels.controls import (
    control_layout,
    make_box,
    make_checkbox,
    make_dropdown,
    make_list,
    make_row,
    set_options,
)
from workbench.pictures import branches_table, describe_probe, pending_html
from workbench.session import Session, Snapshot


class BranchControls:
    """A table of the branches, and controls for `Session.fork`, `switch` and `discard`.

    Args:
        session: the session that is controlled.
        make_button: returns a button for a label, an icon, a tooltip and an action.
    """

    def __init__(self, session: Session, make_button: Callable[..., ipywidgets.Button]) -> None:
        self._session = session
        self.table = ipywidgets.HTML()
        self.name = ipywidgets.Text(description="new branch", placeholder="name", **control_layout("240px"))
        tip = "Keep this state as it is and continue in a new branch: relay.fork(name)"
        fork = make_button("Fork", "code-fork", tip, self._fork)
        self.other = make_dropdown("branch", [], "240px")
        tip = "Continue with the selected branch: relay.switch(name)"
        self._branch_buttons = (
            make_button("Switch", "exchange", tip, self._switch),
            make_button("Discard", "trash", "Delete the selected branch: relay.discard(name)", self._discard),
        )
        rows = make_row(self.name, fork), make_row(self.other, *self._branch_buttons)
        self.widget = make_box(
            ipywidgets.HBox, "l2l-branches", make_box(ipywidgets.VBox, "l2l-fork", *rows), self.table
        )

    def draw(self, snapshot: Snapshot) -> None:
        """Show the branches."""
        set_options(self.other, [(branch.name, branch.name) for branch in snapshot.branches if not branch.active])
        for button in self._branch_buttons:
            button.disabled = not self.other.options
        self.table.value = branches_table(snapshot.branches).to_html(folded=False)

    def _fork(self) -> None:
        self._session.fork(self.name.value.strip())  # raises after the end of the session: the name stays
        self.name.value = ""

    def _switch(self) -> None:
        self._session.switch(self.other.value)

    def _discard(self) -> None:
        self._session.discard(self.other.value)


class QueueControls:
    """A list of the queued commands, from which they can be removed.

    Args:
        session: the session with the queue.
        make_button: returns a button for a label, an icon, a tooltip and an action.

    Attributes:
        commands, remove: the list, and the button that removes the selected command.
        line: the newest command and the command that it waits for.
    """

    def __init__(self, session: Session, make_button: Callable[..., ipywidgets.Button]) -> None:
        self._session = session
        self.commands = make_list(5, "waiting commands")
        self.remove = make_button("Remove", "times", "Remove the selected command from the queue", self._remove)
        self.line = ipywidgets.HTML()
        self.line.add_class("l2l-pending")

    def draw(self, snapshot: Snapshot) -> None:
        """Show the queue."""
        newest = snapshot.tickets[-1:]
        grown = newest and newest[0] not in [ticket for _, ticket in self.commands.options]
        set_options(self.commands, zip(snapshot.queued, snapshot.tickets, strict=True))
        if grown:  # so that Remove cancels the newest command
            self.commands.value = newest[0]
        self.remove.disabled = not snapshot.queued
        self.line.value = pending_html(snapshot)

    def _remove(self) -> None:
        if self.commands.value is not None:
            self._session.cancel(self.commands.value)


class ProbeControls:
    """A checkbox that turns the probe on and off, and a description of the probe with its cost.

    Args:
        session: the session with the probe.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        tip = "Measure the loss of the same few batches before and after every edit"
        self._switch = make_checkbox("judge edits on the probe", tip, session.probe_on)
        self._switch.observe(self._set_probe, "value")
        self._text = ipywidgets.HTML()
        self.widget = make_row(self._switch, self._text)

    def draw(self, snapshot: Snapshot) -> None:
        """Show the state of the probe, which may have been switched elsewhere."""
        assert snapshot.probe is not None, "the snapshot is that of a session"
        self._switch.value = snapshot.probe.is_on
        self._text.value = f'<span class="l2l-caption">{escape(describe_probe(snapshot.probe))}</span>'

    def _set_probe(self, change: Any) -> None:
        if self._session.probe_on != change["new"]:  # equal if `draw` has set the switch
            self._session.probe_on = change["new"]
