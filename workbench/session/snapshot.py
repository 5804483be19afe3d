"""What a session looks like at one moment: immutable values that panels, tables, loggers and tests read.

A snapshot in the middle of a step holds the trace under way with the numbers of events and samples that it had: a trace
only grows, so what it says up to there stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from l2l_core import RelayConfig, Trace
from l2l_core.edits import MAIN_BRANCH, Branch, JournalEntry
from workbench.session.race_result import Race
from workbench.session.shown_step import ShownStep
from workbench.session.snapshot_values import Change, Failure, LayerRow, ProbeRow, Progress, State, StepRow
from workbench.session.statistics import Statistics


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
        shell_trained: those of them that are trained.
        busy: what is being done now, for which `queued` waits: "step 12", "forecast"; "" if nothing is.
        ended: why nothing more can be asked of the session, and what to do; "" as long as it is open.
        shown: the last finished step that led to the present state and is kept: of this branch, or of the one that it was
            forked from, as the step itself says; None before the first.
        progress: the step under way.
        failure: why the last command failed, until something runs again.
        refusal: why the last edit was not carried out, until another one is; it changed nothing.
        tickets: of the commands in `queued`, for `Session.cancel`.
        journal: what was edited, oldest first.
        can_undo, can_redo: whether there is an edit to undo, or to do again.
        branch: the one that is trained now.
        branches: all of them.
        elsewhere: by other branch, the steps that it has not in common with this one, after the last common one.
        touched: keys of the layers that the last edit has made, moved, frozen or thawed.
        probe: what edits are judged on; None of a recorded run.
        race: the last one, while it is run too (of a recorded run, the last that was over by then); None before the first.
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
    shell_trained: int
    shown: ShownStep | None
    progress: Progress | None
    failure: Failure | None
    refusal: Failure | None = None
    tickets: Sequence[int] = ()
    journal: Sequence[JournalEntry] = ()
    can_undo: bool = False
    can_redo: bool = False
    branch: str = MAIN_BRANCH
    branches: Sequence[Branch] = ()
    elsewhere: Mapping[str, Sequence[StepRow]] = field(default_factory=dict)
    touched: Collection[str] = ()
    probe: ProbeRow | None = None
    race: Race | None = None
    busy: str = ""
    ended: str = ""

    @property
    def budget_bytes(self) -> int | None:
        """Memory of the device, None if it has no limit."""
        return self.figures.get("memory_bytes")

    @property
    def last(self) -> Trace | None:
        """Trace of the step that is shown."""
        return self.shown.trace if self.shown is not None else None

    @property
    def in_core_bytes(self) -> int | None:
        """What in-core training of the step that is shown would need; None if there is none, or it cannot be told."""
        return self.shown.in_core_bytes if self.shown is not None else None

    # -- whose it is ---------------------------------------------------------------------------------------------------

    @property
    def shown_words(self) -> str:
        """Which step is shown, as "step 12 of wide, before the last edit"."""
        if self.shown is not None:
            return self.words_of(self.shown)
        kept = "is kept, the next one will be shown" if self.steps else "yet"
        return f"no step{self._branch_suffix(self.branch)} {kept}"

    @property
    def state_words(self) -> str:
        """Which state is shown, as "after step 12 of wide and the last edit"."""
        step = self.shown
        if step is None or step.number != self.step:
            return f"{f'after step {self.step}' if self.step else 'before the first step'}{self._branch_suffix(self.branch)}"
        edited = " and the last edit" if self._is_edited(step) else ""
        return f"after {self.name_of(step)}{edited}{self._branch_note(step)}"

    @property
    def progress_words(self) -> str:
        """Which step is under way."""
        return f"step {self.step + 1}{self._branch_suffix(self.branch)}, under way"

    @property
    def failed_words(self) -> str:
        """Which step has failed last; "" if none has."""
        if self.failure is None:
            return ""
        return f"step {self.failure.step}{self._branch_suffix(self.failure.branch)}, which failed"

    def words_of(self, step: ShownStep) -> str:
        """Say which step this is, seen from this snapshot; it need not be the one that is shown."""
        edited = ", before the last edit" if step is self.shown and self._is_edited(step) else ""
        return f"{self.name_of(step)}{edited}{self._branch_note(step)}"

    def name_of(self, step: ShownStep) -> str:
        """Name a step, whatever has happened since: "step 12", or "step 12 of wide" where there are branches."""
        return f"step {step.number}{self._branch_suffix(step.branch)}"

    def _is_edited(self, step: ShownStep) -> bool:
        return step.is_before_edit(self.layers, self.journal)

    def _branch_note(self, step: ShownStep) -> str:
        forked = step is self.shown and step.branch != self.branch
        return f"; {self.branch} has made no step since it was forked" if forked else ""

    def _branch_suffix(self, branch: str) -> str:
        """Whose, where there are several branches."""
        return f" of {branch}" if len(self.branches) > 1 or branch != self.branch else ""
