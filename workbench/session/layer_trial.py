"""Trials of a layer without a change of the model: losses of the probe without it or with two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from l2l_core import Drop, Duplicate, Edit
from workbench.session.probe_verdict import NOT_MEASURED, LossChange, describe_change
from workbench.session.snapshot import Snapshot

TrialKind = Literal["without", "twice"]

TRIAL_EDITS: Mapping[TrialKind, Callable[[str], Edit]] = {
    "without": Drop,
    "twice": Duplicate,
}  # trial -> edit of a layer key


class StateVersion(NamedTuple):
    """Version of the session's state, which differs after another step, change or edit."""

    branch: str
    step: int
    changes: int  # number of recorded changes
    entries: int  # number of journal entries

    @classmethod
    def of(cls, snapshot: Snapshot) -> StateVersion:
        """Return the version of a snapshot."""
        return cls(snapshot.branch, snapshot.step, len(snapshot.changes), len(snapshot.journal))


@dataclass(frozen=True)
class LayerTrial:
    """Result of a trial of one layer.

    Attributes:
        key: key of the layer.
        kind: kind of the trial.
        loss_change: losses of the probe without and with the trial's edit; None if they could not be measured.
        reason: reason why `loss_change` is None.
        version: state in which the losses were measured.
    """

    key: str
    kind: TrialKind
    loss_change: LossChange | None
    reason: str
    version: StateVersion

    @property
    def summary(self) -> str:
        """The change, its spread and the verdict as text; or the reason why there is none."""
        if self.loss_change is None:
            return f"{NOT_MEASURED}: {self.reason}"
        return f"{describe_change(self.loss_change)}, {self.loss_change.verdict}"
