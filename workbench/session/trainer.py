"""What a session does with its relay: steps, edits, settings and forecasts, one at a time, all on its thread.

A file of one idea, and longer than others for it: whatever reaches the relay is here, in order of what it is called for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from l2l_core import Edit, Fit, Forecast, Inside, Relay, Schedule, StepResult, TornStep
from l2l_core.edits import Branch, Entry
from workbench.session.batches import Batches, copied
from workbench.session.edit_words import entry_words
from workbench.session.facts import LayerFacts, facts_of
from workbench.session.in_core import InCore
from workbench.session.judgement import Judged, Measured
from workbench.session.probe import Judging, Probe
from workbench.session.rates import Rates, Scheduler
from workbench.session.rows import layer_rows, settings_words, step_row
from workbench.session.script import Script
from workbench.session.settings import apply_settings, settings_of
from workbench.session.standing import Standing
from workbench.session.values import Change, LayerRow, StepRow

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
        standing: Standing,
        scheduler: Scheduler | None,
        schedule: Schedule,
    ) -> None:
        self.relay, self._batches, self._probe, self._standing = relay, batches, probe, standing
        self.rates, self._schedule = Rates(scheduler), schedule
        self._changed = standing.changed
        self.script = Script(relay, batches, scheduler, schedule, self._changed)
        self._in_core = InCore(relay)

    # -- a step --------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Make a step on the next batch; without one the run ends."""
        self._standing.during = "batch"
        with self._changed:
            self._standing.run.owes_step = False  # whatever comes of it: commands waited for this one alone
        is_new, known = not self._batches.waiting, len(self.relay.journal)
        try:
            batch = self._batches.take()
        except StopIteration:
            self._standing.run.end()
            return
        self._batches.tried()  # from here on it may be skipped: the schedule too may fail on it
        try:
            result = self._make_step(batch)
        except BaseException as error:
            # Tried again, the same batch is drawn already; only what a schedule has edited is new.
            if is_new or len(self.relay.journal) > known:
                self.script.attempt()
            if isinstance(error, TornStep):  # a part of the layers has learned from it
                self._batches.used()
                self.script.leave_out()
                self._note_torn(error)
            raise
        self._batches.used()
        row = self._note_step(result, self._standing.run.count)
        with self._changed:
            self._probe.keep(batch, row.step)
            self.script.step(row.loss)
        self._standing.during = "scheduler"
        self.rates.step(result.loss)
        self._standing.tell(lambda logger: logger.log_step(row))

    # -- a step of a race ----------------------------------------------------------------------------------------------

    def take(self) -> Any:
        """Copy the next batch, which waits until `used`.

        Raises:
            StopIteration: there are no more.
        """
        self._standing.during = "batch"
        return copied(self._batches.take())  # several branches train on it, and its source may fill the old one again

    def used(self) -> None:
        """Be done with the batch that was taken."""
        self._batches.used()

    def race_on(self, batch: Any, used: Callable[[], None]) -> tuple[StepRow, StepResult]:
        """Make a step on a batch that was taken; `used` is called once a part of the layers has learned from it."""
        self._batches.tried()
        try:
            result = self._make_step(batch)
        except TornStep as error:
            used()
            self._note_torn(error)
            raise
        used()
        row = self._note_step(result)
        with self._changed:
            self._probe.keep(batch, row.step)
        self._standing.tell(lambda logger: logger.log_step(row))
        return row, result

    def look_at_probe(self) -> Measured | str:
        """Measure the losses of the probe, or say why there are none."""
        return self._probe.before()

    def turn_to(self, name: str) -> None:
        """Switch for a turn of a race: every step says of which branch it is, so loggers are not told."""
        if name != self.relay.branch:
            self._to_branch(self.relay.switch, name)

    # -- a schedule, and what is noted of a step -----------------------------------------------------------------------

    def _make_step(self, batch: Any) -> StepResult:
        """Carry out the edits that are due, and train on a batch; of one that fails, edits keep no rows to run layers on."""
        self._standing.during = "step"
        with self.relay.expect(batch):
            self._follow_schedule()
            if self.relay.fits_itself:
                self._fit(batch)
            self._standing.during = "step"
            with self._standing.watch_step():
                return self.relay.step(batch, skip=self._schedule.skip(self.relay), trust=self._schedule.trust)

    def _follow_schedule(self) -> None:
        """Carry out the edits that are due; each is a change like those that a person asks for."""
        before, known = self._standing.mirror.layers, len(self.relay.journal)
        judging = Judging(self.relay, self._probe)
        self._standing.during = "edit"
        try:
            self._schedule.prepare(judging)
        finally:
            if made := self.relay.journal[known:]:
                with self._changed:
                    self._standing.look()
                    self._standing.mirror.compare(before)
        for entry in made:
            self._standing.record(self.words_of(entry), entry.number, judging.found.get(entry.number, ""))

    def _note_torn(self, error: TornStep) -> None:
        self.script.by_hand(f"step {self.relay.steps + 1}, which failed when some layers were updated: {error}")

    def _note_step(self, result: StepResult, count: Callable[[], None] = lambda: None) -> StepRow:
        """A step has succeeded: show it, and let `count` see whether the run goes on."""
        # Outside of the lock, since these take a while: whoever looks must not wait.
        row, layers = step_row(self.relay.steps, result, self.relay.branch), layer_rows(self.relay)
        needed = self._in_core.need(result, layers)
        with self._changed:  # all at once: no snapshot counts a step that it has no row of
            self._standing.mirror.note_step(row, layers, result.trace, needed)
            self._standing.plan.note_use()
            count()
        return row

    # -- between two steps ---------------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """Forecast what the next step will need."""
        return self.relay.forecast(self._look_ahead("nothing is left to forecast"))

    def fit(self, device_bytes: int | None = None, host_bytes: int | None = None) -> Fit:
        """Look for the fastest settings for the next step, and use them."""
        batch = self._look_ahead("there is no step to find settings for")
        self._standing.during = "edit"
        return self._fit(batch, device_bytes, host_bytes)

    def _look_ahead(self, otherwise: str) -> Any:
        """Take the next batch, which stays the next one."""
        self._standing.during, is_new = "batch", not self._batches.waiting
        try:
            batch = self._batches.take()
        except StopIteration:
            raise ValueError(f"there is no further batch: {otherwise}") from None
        if is_new:
            self.script.take()
        return batch

    def _fit(self, batch: Any, device_bytes: int | None = None, host_bytes: int | None = None) -> Fit:
        before = self.relay.config
        found = self.relay.fit(batch, device_bytes, host_bytes)
        self.relay.config = before  # they are set like any others: on record, and in the script
        self.set(found.settings)
        self._standing.follow_queue()
        return found

    def edit(self, change: Callable[[Relay], Any], what: str = "") -> Any:
        """Let a function change the relay; without words it is not recorded."""
        self._probe.forget()
        try:
            value = self._let(lambda: change(self.relay))
        finally:  # what it did before an error stays
            self.script.by_hand(what or f"a function of the relay that was called after step {self.relay.steps}")
        if what:
            self._standing.record(what)
        return value

    def fork(self, name: str) -> Branch:
        """Go on in a branch of its own."""
        branch = self._to_branch(self.relay.fork, name)
        self.script.call("fork", name)
        self._standing.record(f"⑂ {name}")
        return branch

    def switch(self, name: str) -> Branch:
        """Go on with another branch, and tell the loggers, who see other figures from now on."""
        branch = self._to_branch(self.relay.switch, name)
        self.script.call("switch", name)
        change = Change(branch.steps, f"switch to {branch.name}", branch.name)
        self._standing.tell(lambda logger: logger.log_change(change))
        return branch

    def discard(self, name: str) -> None:
        """Free another branch."""
        self._to_branch(self.relay.discard, name)
        self.script.call("discard", name)

    def skip(self) -> None:
        """Leave out the batch that a step has failed on, if there is one."""
        if self._batches.give_up():
            self.script.leave_out()

    def _to_branch(self, action: Callable[[str], Any], name: str) -> Any:
        self._probe.forget()  # a branch of the same name, after as many steps, may be another one
        value = self._let(lambda: action(name))
        with self._changed:
            self._standing.refusal = None
        return value

    def apply(self, edits: Sequence[Edit], trust: bool, words: Callable[[Layers], str]) -> Any:
        """Edit the stack, record it with the numbers that layers had before, and return the inverse edit."""
        action, note = partial(self.relay.apply, *edits, trust=trust), partial(self.script.apply, edits, trust)
        return self._amend(action, note, lambda _, before: words(before))

    def turn_back(self, verb: Literal["undo", "redo"]) -> Entry:
        """Undo the last edit, or do it again."""
        return self._amend(getattr(self.relay, verb), partial(self.script.call, verb), self.words_of)

    def _amend(self, action: Callable[[], Any], note: Callable[[], None], words: Callable[[Any, Layers], str]) -> Any:
        """Edit the stack, or undo or redo that: record it, and show which layers it has changed; `judge` is due next."""
        losses, before = self._probe.before(), self._standing.mirror.layers
        value = self._let(action)
        note()
        with self._changed:
            self._standing.refusal = None
            self._standing.mirror.compare(before)
        self._standing.record(words(value, before), self.relay.journal[-1].number, losses)
        return value

    def judge(self) -> None:
        """Measure what the last edit did, ahead of whatever else is asked for."""
        self._standing.during = "edit"
        owed = self._standing.owed
        assert owed is not None
        self._standing.judge(self._probe.after(owed.before))

    def measure(self, edits: Sequence[Edit]) -> Judged:
        """Measure what edits would do; they are taken back again."""
        self._standing.during = "edit"
        return self._probe.judge(edits)

    def inspect(self, key: str) -> LayerFacts | None:
        """Say what a layer is made of now; None if there is none with this key."""
        self._standing.during = "edit"
        return facts_of(self.relay, key)

    def look(self, batch: Any, layers: Any, options: Mapping[str, Any], decode: Decode | None) -> Inside:
        """Look inside of layers, on the probe's first batch unless another one is given, and tell the loggers."""
        self._standing.during = "edit"
        seen = self._probe.look(batch, layers, options)
        if not options.get("leave_out"):  # that would be another model
            self._standing.tell_look(seen, decode)
        return seen

    def _let(self, action: Callable[[], Any]) -> Any:
        self._standing.during = "edit"
        try:
            return action()
        finally:
            self._standing.look()

    def words_of(self, turn: Entry, before: Layers = ()) -> str:
        """Say a line of the journal in words; it holds the numbers of layers itself."""
        return entry_words(turn, self.relay.journal)

    def set(self, settings: Mapping[str, Any]) -> None:
        """Give the next step other settings: with those since the last step they are one change."""
        self._standing.during = "edit"
        self._probe.forget()  # a link or a device may be another one, too
        plan, planned = self._standing.plan, {**settings_of(self.relay), **settings}
        try:
            apply_settings(self.relay, planned)
            self.script.set(settings)
        finally:
            self._standing.look()
        with self._changed:
            if plan.noted is not None:
                self._standing.mirror.past.changes.remove(plan.noted)
                plan.noted = None
        if what := settings_words(plan.used, planned):
            plan.noted = self._standing.record(what)
