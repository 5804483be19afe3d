"""Branches: a table of them, and controls to fork, switch and discard."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from workbench.panels.choices import control_layout, make_dropdown, set_options
from workbench.pictures import branches_table
from workbench.session import Session, Snapshot


class BranchControls:
    """Offers by hand what `Session.fork`, `switch` and `discard` do.

    Args:
        session: is steered.
        button: makes one from its words, icon, tip and action.
    """

    def __init__(self, session: Session, button: Callable[..., ipywidgets.Button]) -> None:
        self._session = session
        self.table = ipywidgets.HTML()
        self.name = ipywidgets.Text(description="new branch", placeholder="name", **control_layout("240px"))
        fork = button(
            "Fork", "code-fork", "Leave this state as it is, and go on in a new branch: relay.fork(name)", self._fork
        )
        self.other = make_dropdown("branch", [], "240px")
        self._branch_buttons = (
            button(
                "Switch", "exchange", "Go on with the chosen branch as it was left: relay.switch(name)", self._switch
            ),
            button("Discard", "trash", "Delete the chosen branch: relay.discard(name)", self._discard),
        )
        rows = [ipywidgets.HBox([self.name, fork]), ipywidgets.HBox([self.other, *self._branch_buttons])]
        for row in rows:
            row.add_class("l2l-buttons")
        controls = ipywidgets.VBox(rows)
        controls.add_class("l2l-fork")
        self.widget = ipywidgets.HBox([controls, self.table])
        self.widget.add_class("l2l-branches")

    def draw(self, snapshot: Snapshot) -> None:
        """Show the branches that there are."""
        set_options(self.other, [(branch.name, branch.name) for branch in snapshot.branches if not branch.active])
        for button in self._branch_buttons:
            button.disabled = not self.other.options
        self.table.value = branches_table(snapshot.branches).to_html(folded=False)

    def _fork(self) -> None:
        # if the session has ended this raises, and the name stays to be read
        self._session.fork(self.name.value.strip())
        self.name.value = ""

    def _switch(self) -> None:
        self._session.switch(self.other.value)

    def _discard(self) -> None:
        self._session.discard(self.other.value)
