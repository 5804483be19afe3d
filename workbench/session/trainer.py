"""All operations of a session on its relay: steps, edits, branches, settings and queries, on the session's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from l2l_core import Edit, Fit, Forecast, Inside, Relay, Schedule, StepResult, TornStep
from l2l_core.edits import Branch, JournalEntry
from workbench.session.batches import Batches, copy_batch
from workbench.session.edit_text import describe_entry, describe_fork
from workbench.session.layer_facts import LayerFacts, read_layer_facts
from workbench.session.lr_finder import F, LRFinder
from workbench.session.lr_scheduler import LRSchedulerAdapter, Scheduler
from workbench.session.probe import Probe, ProbingRelay
from workbench.session.probe_verdict import LossChange
from workbench.session.script import Script
from workbench.session.session_state import SessionState
from workbench.session.settings import apply_settings, read_settings
from workbench.session.settings_search import FIT_S
from workbench.session.snapshot_rows import describe_settings_change, layer_rows, step_row
from workbench.session.snapshot_values import Change, LayerRow, StepRow
from workbench.session.step_estimates import FlopCounter, InCoreEstimate

if TYPE_CHECKING:
    from l2l_core.edits import SchedulableRelay

Layers = Sequence[LayerRow]
Decode = Callable[[Sequence[int]], str]


class Trainer:
    """Trains, edits and queries a relay, and records the results in the session's state.

    Invariant: called on the session's thread alone. The session's lock is taken only to write the state, never while the
    relay works. A batch is used once, even if several steps on it fail.

    Args:
        relay, scheduler, schedule: see `Session`.
        batches: source of training batches.
        probe: measured before and after edits.
        state: the session's.

    Attributes:
        lr_scheduler: the learning rate scheduler.
        script: record of all operations.
    """

    def __init__(
        self,
        relay: Relay,
        batches: Batches,
        probe: Probe,
        state: SessionState,
        scheduler: Scheduler | None,
        schedule: Schedule,
    ) -> None:
        self.relay, self.batches, self.probe, self._state = relay, batches, probe, state
        self.lr_scheduler, self._schedule = LRSchedulerAdapter(scheduler), schedule
        self._changed = state.changed
        self.script = Script(relay, batches, scheduler, schedule, self._changed)
        self._in_core = InCoreEstimate(relay)
        self._flop, self.counts_flop = FlopCounter(relay), False

    # -- a step --------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Make a step on the next batch; the run ends if there is none."""
        self._state.activity = "batch"
        with self._changed:
            self._state.run.first_step_pending = False  # even if the step fails
        is_new, entries = not self.batches.pending, len(self.relay.journal)
        try:
            batch = self.batches.next_batch()
        except StopIteration:
            self._state.run.stop()
            return
        self.batches.mark_tried()  # the schedule may fail on it, too
        try:
            result = self._step(batch)
        except BaseException as error:
            # A repeated batch is in the script already; only edits of a schedule are new.
            if is_new or len(self.relay.journal) > entries:
                self.script.record_failed_step()
            if isinstance(error, TornStep):  # some layers were updated
                self.batches.mark_used()
                self.script.record_skipped_batch()
                self._record_torn_step(error)
            raise
        self.batches.mark_used()
        row = self._record_step(result, batch, self._state.run.count_step)
        with self._changed:
            self.probe.add_training_batch(batch, row.step)
            self.script.record_step(row.loss)
        self._state.activity = "scheduler"
        self.lr_scheduler.step(result.loss)
        self._state.notify_loggers(lambda logger: logger.log_step(row))

    # -- a step of a race ----------------------------------------------------------------------------------------------

    def take_batch(self) -> Any:
        """Return a copy of the next batch, which remains pending until it is marked as used.

        Raises:
            StopIteration: the batches have ended.
        """
        self._state.activity = "batch"
        return copy_batch(
            self.batches.next_batch()
        )  # several branches train on it, and its source may fill the old one again

    def race_step(self, batch: Any, mark_used: Callable[[], None]) -> tuple[StepRow, StepResult]:
        """Make a step on a batch that was taken; `mark_used` is called if any layer was updated."""
        self.batches.mark_tried()
        try:
            result = self._step(batch)
        except TornStep as error:
            mark_used()
            self._record_torn_step(error)
            raise
        mark_used()
        row = self._record_step(result, batch)
        with self._changed:
            self.probe.add_training_batch(batch, row.step)
        self._state.notify_loggers(lambda logger: logger.log_step(row))
        return row, result

    def switch_for_turn(self, name: str) -> None:
        """Switch branches for a turn of a race; loggers are not notified, since every row has its branch."""
        if name != self.relay.branch:
            self._change_branch(self.relay.switch, name)

    # -- parts of a step -----------------------------------------------------------------------------------------------

    def _step(self, batch: Any) -> StepResult:
        """Apply the edits of the schedule, which may run layers on the batch, and train on it."""
        self._state.activity = "step"
        with self.relay.expect(batch), self._state.search.watch(self.relay):
            self._apply_schedule()
            if self.relay.fits_itself:
                self._fit(batch)
            self._state.activity = "step"
            with self._state.track_step():
                return self._make_step(batch)

    def _apply_schedule(self) -> None:
        """Apply the edits of the schedule; each is recorded as a change."""
        before, entries = self._state.relay_view.layers, len(self.relay.journal)
        probing = ProbingRelay(self.relay, self.probe)
        self._state.activity = "edit"
        try:
            self._schedule.prepare(cast("SchedulableRelay", probing))  # which has the other attributes by `__getattr__`
        finally:
            if made := self.relay.journal[entries:]:
                with self._changed:
                    self._state.refresh()
                    self._state.relay_view.find_changed(before)
        for entry in made:
            self._state.record_change(self.describe_entry(entry), entry.number, probing.found.get(entry.number, ""))

    def _record_torn_step(self, error: TornStep) -> None:
        self.script.record_manual(f"step {self.relay.steps + 1}, which failed when some layers were updated: {error}")

    def _record_step(self, result: StepResult, batch: Any, count: Callable[[], None] = lambda: None) -> StepRow:
        """Add a finished step to the state, and call `count` in the same critical section."""
        # Outside of the lock, since these are slow and snapshots must not wait.
        row, layers = step_row(self.relay, result, batch, self.batches.epoch), layer_rows(self.relay)
        needed = self._in_core.estimate(result, layers)
        flop = self._flop.count_layers(batch, result.trace) if self.counts_flop else None
        with self._changed:  # all at once: no snapshot may count a step without its row
            self._state.relay_view.add_step(row, layers, result.trace, needed, flop)
            self._state.settings_plan.mark_used()
            count()
        return row

    # -- between steps -------------------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """Forecast the needs of the next step."""
        return self.relay.forecast(self._peek_batch("nothing is left to forecast"))

    def fit(self, device_bytes: int | None = None, host_bytes: int | None = None) -> Fit:
        """Find the fastest settings for the next step; only a relay that fits itself uses them."""
        batch = self._peek_batch("there is no step to find settings for")
        self._state.activity = "edit"
        if self.relay.fits_itself:
            return self._fit(batch, device_bytes, host_bytes)
        before = self.relay.config
        try:
            with self._state.search.watch(self.relay):
                return self.relay.fit(batch, device_bytes, host_bytes, most_s=FIT_S)
        finally:
            self.relay.config = before

    def _peek_batch(self, otherwise: str) -> Any:
        """Return the next batch, which remains pending."""
        self._state.activity, is_new = "batch", not self.batches.pending
        try:
            batch = self.batches.next_batch()
        except StopIteration:
            raise ValueError(f"there is no further batch: {otherwise}") from None
        if is_new:
            self.script.record_taken_batch()
        return batch

    def _fit(self, batch: Any, device_bytes: int | None = None, host_bytes: int | None = None) -> Fit:
        before = self.relay.config
        found = self.relay.fit(batch, device_bytes, host_bytes)
        self.relay.config = before  # `set_settings` records the new ones
        self.set_settings(found.settings)
        self._state.replan_settings()
        return found

    def find_lr(self, lowest: float, highest: float, steps: int, result: type[F]) -> F:
        """Find a learning rate; the relay and the batches are as before."""
        self._state.activity = "measurement"
        finder = LRFinder(self.relay, self.batches, self._state.work, self._make_step)
        try:
            return finder.find(lowest, highest, steps, result)
        finally:
            self.probe.invalidate()
            self._state.refresh()

    def _make_step(self, batch: Any) -> StepResult:
        schedule, relay = self._schedule, cast("SchedulableRelay", self.relay)
        return self.relay.step(batch, skip=schedule.skip(relay), force=schedule.is_forced(relay))

    def edit(self, change: Callable[[Relay], Any], what: str = "") -> Any:
        """Call a function of the relay; without a description it is not recorded as a change."""
        self.probe.invalidate()
        try:
            value = self._change_relay(lambda: change(self.relay))
        finally:  # its effect before an error remains
            self.script.record_manual(what or f"a function of the relay that was called after step {self.relay.steps}")
        if what:
            self._state.record_change(what)
        return value

    def fork(self, name: str) -> Branch:
        """Create a branch and make it active."""
        branch = self._change_branch(self.relay.fork, name)
        self.script.record_call("fork", name)
        self._state.record_change(describe_fork(name))
        return branch

    def switch(self, name: str) -> Branch:
        """Make another branch active, and notify the loggers, since the next rows are of that branch."""
        branch = self._change_branch(self.relay.switch, name)
        self.script.record_call("switch", name)
        change = Change(branch.steps, f"switch to {branch.name}", branch.name)
        self._state.notify_loggers(lambda logger: logger.log_change(change))
        return branch

    def make_variant(self, name: str, edits: Sequence[Edit], describe: Callable[[Layers], str]) -> None:
        """Create a branch, edit it, and return to the active one; without the branch if the edits are refused."""
        home = self.relay.branch
        self.fork(name)
        try:
            self.apply(edits, False, describe)
            if self._state.pending is not None:
                self.complete_verdict()  # while the edited branch is active
        except BaseException:
            self.switch(home)
            self.discard(name)
            raise
        self.switch(home)

    def discard(self, name: str) -> None:
        """Delete another branch."""
        self._change_branch(self.relay.discard, name)
        self.script.record_call("discard", name)

    def skip(self) -> None:
        """Skip the batch on which a step has failed, if there is one."""
        if self.batches.skip_failed():
            self.script.record_skipped_batch()

    def _change_branch(self, action: Callable[[str], Any], name: str) -> Any:
        self.probe.invalidate()  # another branch may have the same name and number of steps
        value = self._change_relay(lambda: action(name))
        with self._changed:
            self._state.refusal = None
        return value

    def apply(self, edits: Sequence[Edit], force: bool, describe: Callable[[Layers], str]) -> Any:
        """Apply edits, record them with the numbers of layers before, and return the inverse edit."""
        apply, record = partial(self.relay.apply, *edits, force=force), partial(self.script.record_edits, edits, force)
        return self._edit_stack(apply, record, lambda _, before: describe(before))

    def undo_or_redo(self, method: Literal["undo", "redo"]) -> JournalEntry:
        """Undo the last edit, or redo it."""
        return self._edit_stack(
            getattr(self.relay, method), partial(self.script.record_call, method), self.describe_entry
        )

    def _edit_stack(
        self, action: Callable[[], Any], record: Callable[[], None], describe: Callable[[Any, Layers], str]
    ) -> Any:
        """Edit the stack, and record the edit and the changed layers; `complete_verdict` is due next."""
        losses, before = self.probe.measure_before(), self._state.relay_view.layers
        value = self._change_relay(action)
        record()
        with self._changed:
            self._state.refusal = None
            self._state.relay_view.find_changed(before)
        self._state.record_change(describe(value, before), self.relay.journal[-1].number, losses)
        return value

    def complete_verdict(self) -> None:
        """Measure the effect of the last edit."""
        self._state.activity = "edit"
        pending = self._state.pending
        assert pending is not None
        self._state.complete_pending(self.probe.measure_after(pending.before))

    def measure(self, edits: Sequence[Edit]) -> LossChange:
        """Measure the effect of edits, which are reverted."""
        self._state.activity = "edit"
        return self.probe.measure_edits(edits)

    def inspect(self, key: str) -> LayerFacts | None:
        """Read a layer; return None if there is no layer with this key."""
        self._state.activity = "edit"
        return read_layer_facts(self.relay, key)

    def look(
        self,
        batch: Any,
        layers: Any,
        options: Mapping[str, Any],
        decode: Decode | None,
        tokens: Sequence[int] | None = None,
    ) -> Inside:
        """Look inside layers, by default on the probe's first batch, and notify the loggers."""
        self._state.activity = "edit"
        inside = self.probe.look(batch, layers, options, tokens)
        # with layers left out it is another model, and a typed text changes with every key: neither is logged
        if not options.get("leave_out") and tokens is None:
            self._state.log_look(inside, decode)
        return inside

    def _change_relay(self, action: Callable[[], Any]) -> Any:
        self._state.activity = "edit"
        try:
            return action()
        finally:
            self._state.refresh()

    def describe_entry(self, entry: JournalEntry, before: Layers = ()) -> str:
        """Describe a journal entry, which has the numbers of layers itself."""
        return describe_entry(entry, self.relay.journal)

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Change settings of the next step; all changes between two steps are recorded as one."""
        self._state.activity = "edit"
        self.probe.invalidate()  # settings may change results
        plan, planned = self._state.settings_plan, {**read_settings(self.relay), **settings}
        try:
            apply_settings(self.relay, planned)
            self.script.record_settings(settings)
        finally:
            self._state.refresh()
        with self._changed:
            if plan.recorded is not None:
                self._state.relay_view.histories.current.changes.remove(plan.recorded)
                plan.recorded = None
        if what := describe_settings_change(plan.last_used, planned):
            plan.recorded = self._state.record_change(what)
