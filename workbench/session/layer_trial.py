"""What the probe says of a model with a layer left out, or twice in it. The model itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from l2l_core import Drop, Duplicate, Edit
from workbench.session.probe_verdict import NOT_MEASURED, LossChange, describe_change
from workbench.session.snapshot import Snapshot

TrialKind = Literal["without", "twice"]

TRIAL_EDITS: Mapping[TrialKind, Callable[[str], Edit]] = {"without": Drop, "twice": Duplicate}  # by key of the layer


class StateVersion(NamedTuple):
    """When something was measured, as far as that can be told: another step or change makes another moment."""

    branch: str
    step: int
    changes: int  # recorded ones
    entries: int  # of the journal

    @classmethod
    def of(cls, snapshot: Snapshot) -> StateVersion:
        """Return the moment of a snapshot."""
        return cls(snapshot.branch, snapshot.step, len(snapshot.changes), len(snapshot.journal))


@dataclass(frozen=True)
class LayerTrial:
    """One layer, tried out.

    Attributes:
        key: of the layer.
        how: what was tried.
        judged: the losses of the probe as they are, and with it; None if they could not be measured.
        why_not: then.
        moment: at which the losses were measured.
    """

    key: str
    kind: TrialKind
    loss_change: LossChange | None
    reason: str
    version: StateVersion

    @property
    def summary(self) -> str:
        """The change and its spread, with the verdict's mark; or why there is none."""
        if self.loss_change is None:
            return f"{NOT_MEASURED}: {self.reason}"
        return f"{describe_change(self.loss_change)}, {self.loss_change.verdict}"
