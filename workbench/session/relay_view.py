"""The relay as it was when a session last looked at it: layers, journal, branches, and the steps that led there."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core import Relay, Trace
from workbench.session.branch_history import BranchHistories, BranchHistory
from workbench.session.shown_step import ShownStep
from workbench.session.snapshot_rows import changed_layers, count_params, layer_rows
from workbench.session.snapshot_values import LayerRow, StepRow


class RelayView:
    """What of a relay is shown between its steps.

    Invariant: written by the session's thread, between steps and under the session's lock; all of it is of one moment.

    Attributes:
        layers, steps, num_params: of the relay.
        journal, can_undo, can_redo, branch, branches: likewise.
        elsewhere: steps of other branches, see `Snapshot`.
        touched: keys of the layers that the last edit has changed.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._histories = BranchHistories(relay.branch, [branch.name for branch in relay.branches])
        self.touched: frozenset[str] = frozenset()
        self.refresh()

    @property
    def history(self) -> BranchHistory:
        """The past of the present branch."""
        return self._histories.current

    def history_of(self, name: str) -> BranchHistory:
        """Return the past of any branch."""
        return self._histories.history_of(name)

    def parent_of(self, name: str) -> str | None:
        """Return the branch that a branch was forked from; None where that was before the session."""
        return self._histories.parents.get(name)

    def refresh(self) -> bool:
        """Read the relay anew, since a change may have done anything to it; True if it went to a branch that existed before."""
        self.layers, self.num_params = layer_rows(self._relay), count_params(self._relay)
        self._read_relay()
        # Before whatever reads `past`: that is the one of the branch that is present now.
        went = self._histories.sync_branches(self.branch, [branch.name for branch in self.branches])
        self.history.statistics.set_stack(self.layers)
        self.elsewhere = self._histories.other_steps()
        if went:  # what the last edit touched was on the branch that was left
            self.touched = frozenset()
        return went

    def find_changed(self, before: Sequence[LayerRow]) -> None:
        """Find out which layers an edit has changed; `before` are the layers before it."""
        self.touched = changed_layers(before, self.layers)

    def add_step(
        self, row: StepRow, layers: Sequence[LayerRow], trace: Trace, in_core_bytes: int | None = None
    ) -> None:
        """Add a step that is done; `layers` are those after it."""
        self.history.steps.append(row)
        self.history.statistics.append(row.step, layers)
        self.layers = tuple(layers)
        self._read_relay()
        self.history.shown = ShownStep(row.branch, row.step, trace, self.layers, self.journal, in_core_bytes)

    def _read_relay(self) -> None:
        relay = self._relay
        self.steps, self.journal = relay.steps, relay.journal
        self.can_undo, self.can_redo = relay.can_undo, relay.can_redo
        self.branch, self.branches = relay.branch, relay.branches
