"""Values that a snapshot of a session consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from l2l_core import Trace
from l2l_core.edits import MAIN_BRANCH
from workbench.session.probe_verdict import LossChange, describe_verdict

State = Literal["idle", "running", "paused", "failed", "closed"]
Activity = Literal["batch", "step", "edit", "refused", "scheduler", "logger"]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One finished step.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss over the batch.
        seconds: wall time.
        samples: rows of the batch.
        peak_device_bytes: highest device bytes.
        bytes_loaded, bytes_pushed: weights to the device, gradients back.
        overlap: share in [0, 1] of copy time hidden under compute.
        branch: on which it was made.
    """

    step: int
    loss: float
    seconds: float
    samples: int
    peak_device_bytes: int
    bytes_loaded: int
    bytes_pushed: int
    overlap: float
    branch: str = MAIN_BRANCH


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of the stack; statistics are of the last step, None before the first.

    Attributes:
        key: permanent identity.
        name: dotted name in the model.
        num_params: weights.
        nbytes: bytes of the float32 weights.
        version: number of updates so far.
        frozen: whether nothing in it is trained.
        grad_norm: norm of its gradient.
        update_ratio: norm of the update over norm of the weights.
        influence: 1 minus the mean cosine between its input and its output, in [0, 2] (Block Influence, arXiv 2403.03853).
        stack: name of the stack that it is in; None if it is in none, and cannot be edited.
        position: in that stack, from 0.
        num_trained: weights that are trained.
    """

    key: str
    name: str
    num_params: int
    nbytes: int
    version: int
    frozen: bool
    grad_norm: float | None
    update_ratio: float | None
    influence: float | None = None
    stack: str | None = None
    position: int = -1
    num_trained: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Change:
    """Something that changed between two steps: settings, or an edit.

    Attributes:
        step: number of steps that were finished.
        what: a few words, as "micro_batches 4 → 8".
        branch: on which it happened.
        entry: number of its line in the journal; None: it is no edit.
        judged: what it did to the losses of the probe, if that was measured.
        why_not: otherwise, of an edit; `PENDING` while it is being measured.
    """

    step: int
    what: str
    branch: str = MAIN_BRANCH
    entry: int | None = None
    judged: LossChange | None = None
    why_not: str = ""

    @property
    def verdict(self) -> str:
        """What the probe says of it, in words."""
        return describe_verdict(self.judged, self.why_not)


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """What edits are judged on.

    Attributes:
        is_on: whether they are.
        is_given: whether somebody has given the batches; otherwise they are training batches.
        batches: how many were given, or measured last; None of training batches before the first measurement.
        most: training batches that are kept.
        first_step: from which training batches are kept, from 1; None before that, or if batches were given.
        seconds: that the last measurement took; None before the first.
    """

    is_on: bool
    is_given: bool
    batches: int | None
    most: int
    first_step: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Remedy:
    """What was found to help against a device that is too small.

    Attributes:
        settings: with which the step fits; empty if none do.
        least_bytes: the smallest budget with which it would fit, with whatever settings.
        code: that gives an emulated device this budget; empty where the device has the memory that it has.
    """

    settings: Mapping[str, Any]
    least_bytes: int
    code: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last command did not succeed.

    Attributes:
        step: the step that was tried, from 1.
        during: what was being done.
        error: name of the exception's class.
        message: its message; begins with what happened and ends with a remedy.
        traceback: as Python prints it.
        after: what holds now, as "Nothing was updated: Run tries the same batch again."
        trace: of the step that failed, up to that moment; None if none was begun. `Trace.failed` says how it ended.
        branch: on which it was tried.
        remedy: what would help, if that was found out.
    """

    step: int
    during: Activity
    error: str
    message: str
    traceback: str
    after: str
    trace: Trace | None = None
    branch: str = MAIN_BRANCH
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A step under way, as far as it had come: the first `events` events and `samples` samples of `trace`."""

    trace: Trace
    events: int
    samples: int
    now_s: float  # seconds since the step began
