"""What a session looks like at one moment: immutable values that panels, tables, loggers and tests read.

A snapshot in the middle of a step holds the trace under way with the numbers of events and samples that it had: a trace
only grows, so what it says up to there stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from l2l_core import RelayConfig, Trace
from l2l_core.edits import FIRST, Branch, Entry
from workbench.session.statistics import Statistics
from workbench.session.values import Change, Failure, LayerRow, Progress, State, StepRow


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
