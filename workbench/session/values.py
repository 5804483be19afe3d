"""Values that a snapshot of a session consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from l2l_core import Trace
from l2l_core.edits import FIRST

State = Literal["idle", "running", "paused", "failed", "closed"]
During = Literal["batch", "step", "edit", "refused", "scheduler", "logger"]


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
    branch: str = FIRST


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
        num_trained: weights that are trained; None where a recording of an older version does not tell.
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
    num_trained: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Something that changed between two steps: settings, or an edit.

    Attributes:
        step: number of steps that were finished.
        what: a few words, as "micro_batches 4 → 8".
        branch: on which it happened.
    """

    step: int
    what: str
    branch: str = FIRST


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
    """

    step: int
    during: During
    error: str
    message: str
    traceback: str
    after: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A step under way, as far as it had come: the first `events` events and `samples` samples of `trace`."""

    trace: Trace
    events: int
    samples: int
    now_s: float  # seconds since the step began
