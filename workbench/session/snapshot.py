"""Immutable snapshots of a session for panels, tables, loggers and tests, and the interface of their sources.

A snapshot in the middle of a step holds the step's trace with the numbers of events and samples at that moment. A trace
only grows, so its contents up to these numbers do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from l2l_core import RelayConfig, Trace
from l2l_core.edits import MAIN_BRANCH, Branch, JournalEntry
from workbench.session.background_work import WorkRow
from workbench.session.race_result import Race
from workbench.session.save_folder import SavedSession
from workbench.session.settings_search import SearchRow
from workbench.session.snapshot_values import (
    Change,
    Failure,
    HeldOutRow,
    LayerRow,
    ProbeRow,
    Progress,
    ShownStep,
    State,
    StepRow,
)
from workbench.session.statistics import Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a session at one moment.

    Attributes:
        number: increases with every change, except of `progress`.
        state: "idle" (no steps left), "running", "paused" (steps are left), "failed", "closed".
        pausing: True if the session will pause or stop after the current step.
        model: name of the model's class.
        num_params: number of weights of the model, shell included.
        device: name of the device.
        figures: properties of the device; see `Device.figures`.
        config: settings of the next step.
        queued: descriptions of the commands that wait for the current step.
        step: number of finished steps of the relay.
        done, target: steps finished and requested in this run; None: no end but that of the batches.
        dropped: steps of this run that were requested and that Stop has left out.
        held_out: measurements on held-out data that led to the current state, in order.
        steps: finished steps of this session that led to the current state, in order.
        changes: settings and edits between them, in order.
        layers: the stack, in order.
        statistics: figures of the layers over these steps.
        shell_params: number of weights in the shell.
        shell_trained: number of these that are trained.
        changed_from: settings changed since the session began, with the values that they had.
        search: the search for settings that fit, while it runs.
        work: an evaluation or a learning-rate finder, while it runs.
        notice: why the run paused by itself, in words; "" if it did not.
        busy: description of the current command, such as "step 12" or "forecast"; "" if there is none.
        ended: why the session accepts no more commands, and the remedy; "" while it is open.
        shown: the last kept step that led to the current state, of this branch or of the branch that it was forked from;
            None before the first.
        progress: the step in progress.
        failure: why the last command failed, until the next run.
        refusal: why the last edit was refused, until the next one is applied.
        tickets: tickets of the commands in `queued`, for `Session.cancel`.
        journal: edits, oldest first.
        can_undo, can_redo: whether there is an edit to undo, or to redo.
        branch: the active branch.
        branches: all branches.
        elsewhere: other branch -> its steps after the last step that it shares with this one.
        touched: keys of the layers that the last edit added, moved, froze or unfroze.
        probe: state of the probe; None in a recorded run.
        race: the last race, finished or in progress (in a recorded run, the last finished one); None before the first.
        saved: the last save of the session; None before the first, or without `Autosave`.
        offer: a saved session, until the user has chosen to resume it or to start afresh.

    Example:
        >>> from workbench import Session
        >>> with Session(relay, lambda: batch) as session:
        ...     session.run(2)
        ...     state = session.wait()
        >>> state.state, state.step, len(state.layers)
        ('idle', 2, 6)
    """

    number: int
    state: State
    pausing: bool = False
    model: str
    num_params: int
    device: str
    figures: Mapping[str, Any]
    config: RelayConfig
    queued: Sequence[str] = ()
    step: int
    done: int
    target: int | None
    dropped: int = 0
    steps: Sequence[StepRow]
    changes: Sequence[Change] = ()
    layers: Sequence[LayerRow]
    statistics: Statistics
    shell_params: int
    shell_trained: int
    shown: ShownStep | None
    progress: Progress | None = None
    failure: Failure | None = None
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
    saved: SavedSession | None = None
    offer: SavedSession | None = None
    changed_from: Mapping[str, Any] = field(default_factory=dict)
    search: SearchRow | None = None
    work: WorkRow | None = None
    held_out: Sequence[HeldOutRow] = ()
    notice: str = ""
    busy: str = ""
    ended: str = ""

    @property
    def budget_bytes(self) -> int | None:
        """Memory of the device; None if it has no limit."""
        return self.figures.get("memory_bytes")

    @property
    def last(self) -> Trace | None:
        """Trace of the shown step."""
        return self.shown.trace if self.shown is not None else None

    @property
    def in_core_bytes(self) -> int | None:
        """Estimated device bytes of in-core training on the batch of the shown step; None if there is no estimate."""
        return self.shown.in_core_bytes if self.shown is not None else None

    # -- names of steps and states -------------------------------------------------------------------------------------

    @property
    def shown_words(self) -> str:
        """Name of the shown step, such as "step 12 of wide, before the last edit"."""
        if self.shown is not None:
            return self.words_of(self.shown)
        kept = "is kept, the next one will be shown" if self.steps else "yet"
        return f"no step{self._branch_suffix(self.branch)} {kept}"

    @property
    def state_words(self) -> str:
        """Name of the current state, such as "after step 12 of wide and the last edit"."""
        step = self.shown
        if step is None or step.number != self.step:
            return f"{f'after step {self.step}' if self.step else 'before the first step'}{self._branch_suffix(self.branch)}"
        edited = " and the last edit" if self._is_edited(step) else ""
        return f"after {self.name_of(step)}{edited}{self._branch_note(step)}"

    @property
    def progress_words(self) -> str:
        """Name of the step in progress."""
        return f"step {self.step + 1}{self._branch_suffix(self.branch)}, under way"

    @property
    def failed_words(self) -> str:
        """Name of the step that failed; "" if none did."""
        if self.failure is None:
            return ""
        return f"step {self.failure.step}{self._branch_suffix(self.failure.branch)}, which failed"

    def words_of(self, step: ShownStep) -> str:
        """Return the name of any step, with its relation to the current state if it is the shown one."""
        edited = ", before the last edit" if step is self.shown and self._is_edited(step) else ""
        return f"{self.name_of(step)}{edited}{self._branch_note(step)}"

    def name_of(self, step: ShownStep) -> str:
        """Return the name of a step: "step 12", or "step 12 of wide" if there are branches."""
        return f"step {step.number}{self._branch_suffix(step.branch)}"

    def _is_edited(self, step: ShownStep) -> bool:
        return step.is_before_edit(self.layers, self.journal)

    def _branch_note(self, step: ShownStep) -> str:
        if step is not self.shown:
            return ""
        if later := self.step - step.number:  # a function of the user made them: the session has no traces of them
            what = f"step {self.step} was" if later == 1 else f"steps {step.number + 1} to {self.step} were"
            return f"; {what} made outside of the session"
        return f"; {self.branch} has made no step since it was forked" if step.branch != self.branch else ""

    def _branch_suffix(self, branch: str) -> str:
        return f" of {branch}" if len(self.branches) > 1 or branch != self.branch else ""


@runtime_checkable
class SnapshotSource(Protocol):
    """A source of snapshots: a session, or a recorded run, which cannot be controlled."""

    def snapshot(self) -> Snapshot:
        """Return the current state; never blocks on a step."""
        ...

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until the number of the snapshot differs from `number`, at most `timeout_s`."""


@runtime_checkable
class ControllableSource(SnapshotSource, Protocol):
    """A source whose run can be controlled: one session, or several that do the same."""

    def run(self, steps: int | None = None) -> None: ...
    def step(self) -> None: ...
    def pause(self) -> None: ...
    def stop(self) -> None: ...
    def skip(self) -> None: ...
    def cancel(self, ticket: int) -> bool: ...
    def cancel_search(self) -> None: ...
    def reconfigure(self, **settings: Any) -> Any: ...
