"""A finished step as it is shown: whose it is travels with what is seen of it, so that nothing is taken for another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core import Trace
from l2l_core.edits import JournalEntry
from workbench.session.journal_state import journal_state_of
from workbench.session.snapshot_values import LayerRow


@dataclass(frozen=True, slots=True, eq=False)
class ShownStep:
    """A finished step, with what it ran on.

    Attributes:
        branch: on which it was made.
        number: of the step on that branch, from 1.
        trace: what happened in it.
        layers: the stack after it, in order.
        journal: what had been edited by then.
        in_core_bytes: device bytes that in-core training of its batch would need, an estimate; None if it cannot be told.
    """

    branch: str
    number: int
    trace: Trace
    layers: Sequence[LayerRow]
    journal: Sequence[JournalEntry] = ()
    in_core_bytes: int | None = None

    def is_before_edit(self, layers: Sequence[LayerRow], journal: Sequence[JournalEntry]) -> bool:
        """Say whether the stack was edited since, and not edited back; `layers` and `journal` are the present ones."""
        if [_layer_identity(row) for row in self.layers] != [_layer_identity(row) for row in layers]:
            return True
        return self.journal != journal and journal_state_of(self.journal).in_force != journal_state_of(journal).in_force


def _layer_identity(row: LayerRow) -> tuple[Any, ...]:
    """What of a layer a step does not change."""
    return row.key, row.num_params, row.num_trained, row.frozen
