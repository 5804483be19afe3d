"""Cached view of a relay between its steps: layers, journal, branches, and their histories."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core import Relay, Trace
from workbench.session.branch_history import BranchHistories
from workbench.session.snapshot_rows import changed_layers, count_params, layer_rows
from workbench.session.snapshot_values import LayerRow, ShownStep, StepFlop, StepRow


class RelayView:
    """Cached, consistent state of a relay between its steps.

    Invariant: written by the session's thread, between steps and under the session's lock.

    Attributes:
        layers, steps, num_params, journal, can_undo, can_redo, branch, branches: the relay's.
        elsewhere: steps of other branches, see `Snapshot`.
        histories: histories of the branches.
        touched: keys of the layers that the last edit changed.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.histories = BranchHistories(relay.branch, [branch.name for branch in relay.branches])
        self.touched: frozenset[str] = frozenset()
        self.refresh()

    def refresh(self) -> bool:
        """Read the relay again; return True if another branch that already existed became active."""
        self.layers, self.num_params = layer_rows(self._relay), count_params(self._relay)
        self._read_relay()
        # Before the current history is read, which depends on the active branch.
        switched = self.histories.sync_branches(self.branch, [branch.name for branch in self.branches])
        self.histories.current.statistics.set_stack(self.layers)
        self.elsewhere = self.histories.other_steps()
        if switched:  # the last edit was on the previous branch
            self.touched = frozenset()
        return switched

    def find_changed(self, before: Sequence[LayerRow]) -> None:
        """Set `touched` by comparing the layers with those before an edit."""
        self.touched = changed_layers(before, self.layers)

    def add_step(
        self,
        row: StepRow,
        layers: Sequence[LayerRow],
        trace: Trace,
        in_core_bytes: int | None = None,
        flop: StepFlop | None = None,
    ) -> None:
        """Add a finished step; `layers` are the layers after it."""
        history = self.histories.current
        history.steps.append(row)
        history.statistics.append(row.step, layers)
        self.layers = tuple(layers)
        self._read_relay()
        history.shown = ShownStep(row.branch, row.step, trace, self.layers, self.journal, in_core_bytes, flop)

    def _read_relay(self) -> None:
        relay = self._relay
        self.steps, self.journal = relay.steps, relay.journal
        self.can_undo, self.can_redo = relay.can_undo, relay.can_redo
        self.branch, self.branches = relay.branch, relay.branches
