"""What a session does with its relay: steps, edits, settings and forecasts, one at a time, all on its thread.

A file of one idea, and longer than others for it: whatever reaches the relay is here, in order of what it is called for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from l2l_core import Edit, Fit, Forecast, Inside, Relay, Schedule, StepResult, TornStep
from l2l_core.edits import Branch, JournalEntry
from workbench.session.batches import Batches, copy_batch
from workbench.session.edit_text import describe_entry
from workbench.session.in_core import InCoreEstimate
from workbench.session.layer_facts import LayerFacts, read_layer_facts
from workbench.session.lr_scheduler import LRSchedulerAdapter, Scheduler
from workbench.session.probe import Probe, ProbingRelay
from workbench.session.probe_verdict import LossChange, ProbeLosses
from workbench.session.script import Script
from workbench.session.session_state import SessionState
from workbench.session.settings import apply_settings, read_settings
from workbench.session.snapshot_rows import describe_settings_change, layer_rows, step_row
from workbench.session.snapshot_values import Change, LayerRow, StepRow

Layers = Sequence[LayerRow]
Decode = Callable[[Sequence[int]], str]


class Trainer:
    """A relay and where its batches come from; what is done, and what goes wrong, shows in `standing`.

    Invariant: called on the session's thread alone; takes the session's lock only where it writes what is shown, never
    while the relay works. A batch is used once, however often a step on it fails.

    Args:
        relay, scheduler, schedule: as of `Session`.
        batches: the next one is trained on.
        probe: is measured around edits.
        standing: of the session.

    Attributes:
        rates: the scheduler of the learning rate.
        script: what was done, as a program.
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
        self.relay, self._batches, self._probe, self._state = relay, batches, probe, state
        self.lr_scheduler, self._schedule = LRSchedulerAdapter(scheduler), schedule
        self._changed = state.changed
        self.script = Script(relay, batches, scheduler, schedule, self._changed)
        self._in_core = InCoreEstimate(relay)

    # -- a step --------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Make a step on the next batch; without one the run ends."""
        self._state.activity = "batch"
        with self._changed:
            self._state.run.first_step_pending = False  # whatever comes of it: commands waited for this one alone
        is_new, known = not self._batches.pending, len(self.relay.journal)
        try:
            batch = self._batches.next_batch()
        except StopIteration:
            self._state.run.stop()
            return
        self._batches.mark_tried()  # from here on it may be skipped: the schedule too may fail on it
        try:
            result = self._step(batch)
        except BaseException as error:
            # Tried again, the same batch is drawn already; only what a schedule has edited is new.
            if is_new or len(self.relay.journal) > known:
                self.script.record_failed_step()
            if isinstance(error, TornStep):  # a part of the layers has learned from it
                self._batches.mark_used()
                self.script.record_skipped_batch()
                self._record_torn_step(error)
            raise
        self._batches.mark_used()
        row = self._record_step(result, self._state.run.count_step)
        with self._changed:
            self._probe.add_training_batch(batch, row.step)
            self.script.record_step(row.loss)
        self._state.activity = "scheduler"
        self.lr_scheduler.step(result.loss)
        self._state.notify_loggers(lambda logger: logger.log_step(row))

    # -- a step of a race ----------------------------------------------------------------------------------------------

    def take_batch(self) -> Any:
        """Copy the next batch, which waits until `used`.

        Raises:
            StopIteration: there are no more.
        """
        self._state.activity = "batch"
        return copy_batch(
            self._batches.next_batch()
        )  # several branches train on it, and its source may fill the old one again

    def mark_batch_used(self) -> None:
        """Be done with the batch that was taken."""
        self._batches.mark_used()

    def race_step(self, batch: Any, mark_used: Callable[[], None]) -> tuple[StepRow, StepResult]:
        """Make a step on a batch that was taken; `used` is called once a part of the layers has learned from it."""
        self._batches.mark_tried()
        try:
            result = self._step(batch)
        except TornStep as error:
            mark_used()
            self._record_torn_step(error)
            raise
        mark_used()
        row = self._record_step(result)
        with self._changed:
            self._probe.add_training_batch(batch, row.step)
        self._state.notify_loggers(lambda logger: logger.log_step(row))
        return row, result

    def measure_probe(self) -> ProbeLosses | str:
        """Measure the losses of the probe, or say why there are none."""
        return self._probe.measure_before()

    def switch_for_turn(self, name: str) -> None:
        """Switch for a turn of a race: every step says of which branch it is, so loggers are not told."""
        if name != self.relay.branch:
            self._change_branch(self.relay.switch, name)

    # -- a schedule, and what is noted of a step -----------------------------------------------------------------------

    def _step(self, batch: Any) -> StepResult:
        """Carry out the edits that are due, and train on a batch; of one that fails, edits keep no rows to run layers on."""
        self._state.activity = "step"
        with self.relay.expect(batch):
            self._apply_schedule()
            if self.relay.fits_itself:
                self._fit(batch)
            self._state.activity = "step"
            with self._state.track_step():
                return self.relay.step(batch, skip=self._schedule.skip(self.relay), force=self._schedule.force)

    def _apply_schedule(self) -> None:
        """Carry out the edits that are due; each is a change like those that a person asks for."""
        before, known = self._state.relay_view.layers, len(self.relay.journal)
        judging = ProbingRelay(self.relay, self._probe)
        self._state.activity = "edit"
        try:
            self._schedule.prepare(judging)
        finally:
            if made := self.relay.journal[known:]:
                with self._changed:
                    self._state.refresh()
                    self._state.relay_view.find_changed(before)
        for entry in made:
            self._state.record_change(self.describe_entry(entry), entry.number, judging.found.get(entry.number, ""))

    def _record_torn_step(self, error: TornStep) -> None:
        self.script.record_manual(f"step {self.relay.steps + 1}, which failed when some layers were updated: {error}")

    def _record_step(self, result: StepResult, count: Callable[[], None] = lambda: None) -> StepRow:
        """A step has succeeded: show it, and let `count` see whether the run goes on."""
        # Outside of the lock, since these take a while: whoever looks must not wait.
        row, layers = step_row(self.relay.steps, result, self.relay.branch), layer_rows(self.relay)
        needed = self._in_core.estimate(result, layers)
        with self._changed:  # all at once: no snapshot counts a step that it has no row of
            self._state.relay_view.add_step(row, layers, result.trace, needed)
            self._state.settings_plan.mark_used()
            count()
        return row

    # -- between two steps ---------------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """Forecast what the next step will need."""
        return self.relay.forecast(self._peek_batch("nothing is left to forecast"))

    def fit(self, device_bytes: int | None = None, host_bytes: int | None = None) -> Fit:
        """Look for the fastest settings for the next step, and use them."""
        batch = self._peek_batch("there is no step to find settings for")
        self._state.activity = "edit"
        return self._fit(batch, device_bytes, host_bytes)

    def _peek_batch(self, otherwise: str) -> Any:
        """Take the next batch, which stays the next one."""
        self._state.activity, is_new = "batch", not self._batches.pending
        try:
            batch = self._batches.next_batch()
        except StopIteration:
            raise ValueError(f"there is no further batch: {otherwise}") from None
        if is_new:
            self.script.record_taken_batch()
        return batch

    def _fit(self, batch: Any, device_bytes: int | None = None, host_bytes: int | None = None) -> Fit:
        before = self.relay.config
        found = self.relay.fit(batch, device_bytes, host_bytes)
        self.relay.config = before  # they are set like any others: on record, and in the script
        self.set_settings(found.settings)
        self._state.replan_settings()
        return found

    def edit(self, change: Callable[[Relay], Any], what: str = "") -> Any:
        """Let a function change the relay; without words it is not recorded."""
        self._probe.invalidate()
        try:
            value = self._change_relay(lambda: change(self.relay))
        finally:  # what it did before an error stays
            self.script.record_manual(what or f"a function of the relay that was called after step {self.relay.steps}")
        if what:
            self._state.record_change(what)
        return value

    def fork(self, name: str) -> Branch:
        """Go on in a branch of its own."""
        branch = self._change_branch(self.relay.fork, name)
        self.script.record_call("fork", name)
        self._state.record_change(f"⑂ {name}")
        return branch

    def switch(self, name: str) -> Branch:
        """Go on with another branch, and tell the loggers, who see other figures from now on."""
        branch = self._change_branch(self.relay.switch, name)
        self.script.record_call("switch", name)
        change = Change(branch.steps, f"switch to {branch.name}", branch.name)
        self._state.notify_loggers(lambda logger: logger.log_change(change))
        return branch

    def discard(self, name: str) -> None:
        """Free another branch."""
        self._change_branch(self.relay.discard, name)
        self.script.record_call("discard", name)

    def skip(self) -> None:
        """Leave out the batch that a step has failed on, if there is one."""
        if self._batches.skip_failed():
            self.script.record_skipped_batch()

    def _change_branch(self, action: Callable[[str], Any], name: str) -> Any:
        self._probe.invalidate()  # a branch of the same name, after as many steps, may be another one
        value = self._change_relay(lambda: action(name))
        with self._changed:
            self._state.refusal = None
        return value

    def apply(self, edits: Sequence[Edit], force: bool, describe: Callable[[Layers], str]) -> Any:
        """Edit the stack, record it with the numbers that layers had before, and return the inverse edit."""
        action, note = partial(self.relay.apply, *edits, force=force), partial(self.script.record_edits, edits, force)
        return self._edit_stack(action, note, lambda _, before: describe(before))

    def undo_or_redo(self, method: Literal["undo", "redo"]) -> JournalEntry:
        """Undo the last edit, or do it again."""
        return self._edit_stack(
            getattr(self.relay, method), partial(self.script.record_call, method), self.describe_entry
        )

    def _edit_stack(
        self, action: Callable[[], Any], record: Callable[[], None], describe: Callable[[Any, Layers], str]
    ) -> Any:
        """Edit the stack, or undo or redo that: record it, and show which layers it has changed; `judge` is due next."""
        losses, before = self._probe.measure_before(), self._state.relay_view.layers
        value = self._change_relay(action)
        record()
        with self._changed:
            self._state.refusal = None
            self._state.relay_view.find_changed(before)
        self._state.record_change(describe(value, before), self.relay.journal[-1].number, losses)
        return value

    def complete_verdict(self) -> None:
        """Measure what the last edit did, ahead of whatever else is asked for."""
        self._state.activity = "edit"
        owed = self._state.pending
        assert owed is not None
        self._state.complete_pending(self._probe.measure_after(owed.before))

    def measure(self, edits: Sequence[Edit]) -> LossChange:
        """Measure what edits would do; they are taken back again."""
        self._state.activity = "edit"
        return self._probe.measure_edits(edits)

    def inspect(self, key: str) -> LayerFacts | None:
        """Say what a layer is made of now; None if there is none with this key."""
        self._state.activity = "edit"
        return read_layer_facts(self.relay, key)

    def look(self, batch: Any, layers: Any, options: Mapping[str, Any], decode: Decode | None) -> Inside:
        """Look inside of layers, on the probe's first batch unless another one is given, and tell the loggers."""
        self._state.activity = "edit"
        seen = self._probe.look(batch, layers, options)
        if not options.get("leave_out"):  # that would be another model
            self._state.log_look(seen, decode)
        return seen

    def _change_relay(self, action: Callable[[], Any]) -> Any:
        self._state.activity = "edit"
        try:
            return action()
        finally:
            self._state.refresh()

    def describe_entry(self, entry: JournalEntry, before: Layers = ()) -> str:
        """Say a line of the journal in words; it holds the numbers of layers itself."""
        return describe_entry(entry, self.relay.journal)

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Give the next step other settings: with those since the last step they are one change."""
        self._state.activity = "edit"
        self._probe.invalidate()  # a link or a device may be another one, too
        plan, planned = self._state.settings_plan, {**read_settings(self.relay), **settings}
        try:
            apply_settings(self.relay, planned)
            self.script.record_settings(settings)
        finally:
            self._state.refresh()
        with self._changed:
            if plan.recorded is not None:
                self._state.relay_view.history.changes.remove(plan.recorded)
                plan.recorded = None
        if what := describe_settings_change(plan.last_used, planned):
            plan.recorded = self._state.record_change(what)
