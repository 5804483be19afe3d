"""Values that a snapshot of a session consists of, and the state of an edit journal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from l2l_core import Trace
from l2l_core.edits import MAIN_BRANCH, JournalEntry
from workbench.session.probe_verdict import LossChange, describe_verdict

State = Literal["idle", "running", "paused", "failed", "closed"]
Activity = Literal["batch", "step", "edit", "refused", "scheduler", "logger", "save", "resume", "measurement"]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One finished step.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss over the batch.
        seconds: wall time.
        samples: rows of the batch.
        peak_device_bytes: highest device bytes.
        bytes_loaded, bytes_pushed: bytes of weights copied to the device, and of gradients copied back.
        overlap: share in [0, 1] of copy time hidden under compute.
        branch: the branch that was trained.
        objective: how the losses of micro-batches were put together, in words.
        lr: learning rate of the optimizer's first group in this step; None if it has none.
        layers: number of layers that were trained.
        epoch: pass over the batches, from 1; None if their source has no passes.
        tokens: number of tokens of the batch (`count_tokens`), or its rows; 0 if not counted.
        flop: estimated floating-point operations (`estimate_flop`); 0 if not estimated.
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
    objective: str = ""
    lr: float | None = None
    layers: int = 0
    epoch: int | None = None
    tokens: int = 0
    flop: int = 0

    @property
    def unit(self) -> str:
        """The counted parts of a batch: "tokens", or "rows"."""
        return "tokens" if self.tokens > self.samples else "rows"

    @property
    def per_s(self) -> float:
        """Tokens or rows per second; NaN without a time."""
        return max(self.tokens, self.samples) / self.seconds if self.seconds else math.nan


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """One measurement on held-out data.

    Attributes:
        step: number of steps finished before it.
        values: the held-out loss under "loss", and the metrics by name.
        branch: the branch that was measured.
        batches, rows: number of batches and rows; 0 if not counted.
        seconds: duration.
    """

    step: int
    values: Mapping[str, float]
    branch: str = MAIN_BRANCH
    batches: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of the stack; statistics are of the last step, None before the first.

    Attributes:
        key: permanent identity.
        name: dotted name in the model.
        num_params: number of weights.
        nbytes: bytes of the float32 weights.
        version: number of updates so far.
        frozen: True if none of its weights is trained.
        grad_norm: norm of its gradient.
        update_ratio: norm of the update over norm of the weights.
        influence: 1 minus the mean cosine between its input and its output, in [0, 2] (Block Influence, arXiv 2403.03853).
        stack: name of its stack; None if it is in no stack, and cannot be edited.
        position: in that stack, from 0.
        num_trained: number of weights that are trained.
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
    """A change between two steps: settings, or an edit.

    Attributes:
        step: number of steps finished before the change.
        what: short description, such as "micro_batches 4 → 8".
        branch: the branch that was changed.
        entry: number of the edit's journal entry; None if the change is not an edit.
        judged: effect of an edit on the losses of the probe, if it was measured.
        why_not: reason why `judged` is None; `PENDING` during the measurement.
    """

    step: int
    what: str
    branch: str = MAIN_BRANCH
    entry: int | None = None
    judged: LossChange | None = None
    why_not: str = ""

    @property
    def verdict(self) -> str:
        """The effect on the probe as text, or the reason why it was not measured."""
        return describe_verdict(self.judged, self.why_not)


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """State of the probe on which edits are measured.

    Attributes:
        is_on: whether edits are measured.
        is_given: whether the user gave the batches; otherwise they are training batches.
        batches: number of batches given, or measured last; None for training batches before the first measurement.
        most: maximum number of training batches that are kept.
        first_step: step of the first kept training batch, from 1; None before it, or if batches were given.
        seconds: duration of the last measurement; None before the first.
    """

    is_on: bool
    is_given: bool
    batches: int | None
    most: int
    first_step: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Remedy:
    """Remedy for a device that is too small for a step.

    Attributes:
        settings: settings with which the step fits; empty if there are none.
        least_bytes: the smallest budget with which the step fits, with any settings.
        code: line of code that makes an emulated device with this budget; empty for a real device.
    """

    settings: Mapping[str, Any]
    least_bytes: int
    code: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause and consequences of a command that failed.

    Attributes:
        step: the step that was tried, from 1.
        during: activity of the session when the error was raised.
        error: name of the exception's class.
        message: message of the exception: the cause first, a remedy last.
        traceback: traceback in Python's format.
        after: the state after the error, such as "Nothing was changed."
        trace: trace of the failed step up to the error (see `Trace.failed`); None if no step had begun.
        branch: the branch on which the step was tried.
        remedy: remedy, if one was found.
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
    """A step in progress: the first `events` events and `samples` samples of `trace`."""

    trace: Trace
    events: int
    samples: int
    now_s: float  # seconds since the step began


class JournalState(NamedTuple):
    """Edits of a journal that are in force, and edits that a redo would restore; the latest is last."""

    in_force: tuple[JournalEntry, ...]
    undone: tuple[JournalEntry, ...]


def journal_state_of(journal: Sequence[JournalEntry]) -> JournalState:
    """Replay a journal from its first entry to its last, and return the state of its edits."""
    done: list[JournalEntry] = []
    undone: list[JournalEntry] = []
    for entry in journal:
        if entry.kind == "edit":
            done.append(entry)
            undone.clear()
        elif entry.kind == "undo" and done:
            undone.append(done.pop())
        elif undone:
            done.append(undone.pop())
    return JournalState(tuple(done), tuple(undone))


class LayerFlop(NamedTuple):
    """Operations of one layer in a step.

    Attributes:
        flop: operations.
        calls: calls.
        receives_gradient: whether its input gets a gradient in all of them.
        depth_is_all, loops_are_all: whether another number of layers in its stack, or of its loops, changes no operation outside
            of the layers; False if that is not known.
    """

    flop: int
    calls: int
    receives_gradient: bool
    depth_is_all: bool
    loops_are_all: bool


@dataclass(frozen=True)
class StepFlop:
    """Operations of a step on a batch in which all layers run, counted by `FlopCounter`.

    Attributes:
        total: of the step.
        layers: by key.
    """

    total: int
    layers: Mapping[str, LayerFlop]


@dataclass(frozen=True, slots=True, eq=False)
class ShownStep:
    """A finished step with the branch, layers and journal that its trace belongs to.

    Attributes:
        branch: the branch that was trained.
        number: number of the step on that branch, from 1.
        trace: trace of the step.
        layers: the stack after the step, in order.
        journal: the journal after the step.
        in_core_bytes: estimated device bytes of in-core training on the same batch; None if there is no estimate.
        flop: operations of the step; None if they were not counted.
    """

    branch: str
    number: int
    trace: Trace
    layers: Sequence[LayerRow]
    journal: Sequence[JournalEntry] = ()
    in_core_bytes: int | None = None
    flop: StepFlop | None = None

    def is_before_edit(self, layers: Sequence[LayerRow], journal: Sequence[JournalEntry]) -> bool:
        """Return True if the stack was edited after this step and not edited back.

        Args:
            layers, journal: the current ones.
        """
        if [_layer_identity(row) for row in self.layers] != [_layer_identity(row) for row in layers]:
            return True
        return self.journal != journal and journal_state_of(self.journal).in_force != journal_state_of(journal).in_force


def _layer_identity(row: LayerRow) -> tuple[Any, ...]:
    """Return the part of a row that steps do not change."""
    return row.key, row.num_params, row.num_trained, row.frozen
