"""What waits for its turn: a list to take commands out of, and a line that says what the newest one waits for."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from workbench.panels.choices import make_list, set_options
from workbench.pictures import pending_html
from workbench.session import Session, Snapshot


class QueueControls:
    """Shows the commands that wait, whoever gave them. What is pressed shows at once, not when the page is next drawn.

    Args:
        session: whose queue it is.
        button: makes one from its words, icon, tip and action.

    Attributes:
        commands, remove: the list, and what takes the chosen command out.
        line: what the newest one waits for.
    """

    def __init__(self, session: Session, button: Callable[..., ipywidgets.Button]) -> None:
        self._session = session
        self.commands = make_list(5)
        self.remove = button("Remove", "times", "Remove the chosen command from the queue", self._remove)
        self.line = ipywidgets.HTML()
        self.line.add_class("l2l-pending")

    def draw(self, snapshot: Snapshot) -> None:
        """Show what waits now."""
        newest = snapshot.tickets[-1:]
        grown = newest and newest[0] not in [ticket for _, ticket in self.commands.options]
        set_options(self.commands, zip(snapshot.queued, snapshot.tickets, strict=True))
        if grown:  # so that Remove takes back what was pressed last
            self.commands.value = newest[0]
        self.remove.disabled = not snapshot.queued
        self.line.value = pending_html(snapshot)

    def _remove(self) -> None:
        if self.commands.value is not None:
            self._session.cancel(self.commands.value)
