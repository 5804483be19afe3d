"""What a session looks like at one moment: immutable values that panels, tables, loggers and tests read.

A snapshot in the middle of a step holds the trace under way with the numbers of events and samples that it had: a trace
only grows, so what it says up to there stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from l2l_core import RelayConfig, Trace
from l2l_core.edits.branches import FIRST, Branch
from l2l_core.edits.history import Entry
from workbench.session.statistics import Statistics

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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session at one moment.

    Attributes:
        number: grows whenever something but `progress` changes.
        state: "idle" (nothing asked for), "running", "paused" (steps are left), "failed", "closed".
        pausing: whether it will pause or stop when the step under way is over.
        model: name of the model's class.
        num_params: weights of the model, shell included.
        device: its name.
        figures: what the device states about itself; see `Device.figures`.
        config: settings of the next step.
        queued: commands that wait for the step under way to end, in words.
        step: number of finished steps of the relay.
        done, target: steps finished and asked for in this run; None: until the batches end or someone stops it.
        steps: finished steps of this session that led to the present state, in order.
        changes: settings and edits between them, in order.
        layers: the stack, in order.
        statistics: figures of the layers over these steps.
        shell_params: weights that are in no layer.
        shell_trained: those of them that are trained; None where a recording of an older version does not tell.
        last: trace of the last finished step.
        progress: the step under way.
        in_core_bytes: device bytes that in-core training of the same batch would need, an estimate; None before the
            first step.
        failure: why the last command failed, until something runs again.
        refusal: why the last edit was not carried out, until another one is; it changed nothing.
        tickets: of the commands in `queued`, for `Session.cancel`.
        journal: what was edited, oldest first.
        can_undo, can_redo: whether there is an edit to undo, or to do again.
        branch: the one that is trained now.
        branches: all of them.
        elsewhere: by other branch, the steps that it has not in common with this one, after the last common one.
        touched: keys of the layers that the last edit has made, moved, frozen or thawed.
    """

    number: int
    state: State
    pausing: bool
    model: str
    num_params: int
    device: str
    figures: Mapping[str, Any]
    config: RelayConfig
    queued: Sequence[str]
    step: int
    done: int
    target: int | None
    steps: Sequence[StepRow]
    changes: Sequence[Change]
    layers: Sequence[LayerRow]
    statistics: Statistics
    shell_params: int
    last: Trace | None
    progress: Progress | None
    in_core_bytes: int | None
    failure: Failure | None
    refusal: Failure | None = None
    tickets: Sequence[int] = ()
    journal: Sequence[Entry] = ()
    can_undo: bool = False
    can_redo: bool = False
    branch: str = FIRST
    branches: Sequence[Branch] = ()
    elsewhere: Mapping[str, Sequence[StepRow]] = field(default_factory=dict)
    touched: Collection[str] = ()
    shell_trained: int | None = None

    @property
    def budget_bytes(self) -> int | None:
        """Memory of the device, None if it has no limit."""
        return self.figures.get("memory_bytes")
