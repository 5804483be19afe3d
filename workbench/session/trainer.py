"""What a session does with its relay: steps, edits, settings and forecasts, one at a time, all on its thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.optim.lr_scheduler import ReduceLROnPlateau

from l2l_core import Forecast, Relay, Schedule, StepResult, TornStep
from l2l_core.edits import Branch, Entry
from workbench.readings import batch_bytes, in_core_bytes
from workbench.session.batches import Batches
from workbench.session.edit_words import entry_words
from workbench.session.rows import layer_rows, settings_words, step_row
from workbench.session.settings import apply_settings, settings_of
from workbench.session.standing import Standing
from workbench.session.values import Change, LayerRow, StepRow

Layers = Sequence[LayerRow]
Note = Callable[[Any, Layers], Any]  # gets what a change has given back, and the layers before it

_log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """What a session asks of a learning rate scheduler, as those of `torch.optim.lr_scheduler` have it."""

    def step(self) -> None: ...


class Trainer:
    """A relay and where its batches come from; what is done, and what goes wrong, shows in `standing`.

    Invariant: called on the session's thread alone; takes the session's lock only where it writes what is shown, never
    while the relay works. A batch is used once, however often a step on it fails.

    Args:
        relay, scheduler, schedule: as of `Session`.
        batches: the next one is trained on.
        standing: of the session.
    """

    def __init__(
        self, relay: Relay, batches: Batches, standing: Standing, scheduler: Scheduler | None, schedule: Schedule
    ) -> None:
        self._relay, self._batches, self._standing = relay, batches, standing
        self._scheduler, self._schedule = scheduler, schedule
        self._changed = standing.changed
        self._in_core_for: object = None  # what the need in core was last told for

    # -- a step --------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Make a step on the next batch; without one the run ends."""
        self._standing.during = "batch"
        with self._changed:
            self._standing.run.owes_step = False
        try:
            batch = self._batches.take()
        except StopIteration:
            self._standing.run.end()
            return
        self._batches.tried()  # from here on it may be skipped: the schedule too may fail on it
        self._follow_schedule(batch)
        self._standing.during = "step"
        with self._standing.watch_step():
            result = self._step(batch)
        self._batches.used()
        row = self._note_step(result)
        self._standing.during = "scheduler"
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(result.loss)
        elif self._scheduler is not None:
            self._scheduler.step()
        self._standing.tell(lambda logger: logger.log_step(row))

    def _follow_schedule(self, batch: Any) -> None:
        """Carry out the edits that are due; each is a change like those that a person asks for."""
        before, known = self._standing.mirror.layers, len(self._relay.journal)
        self._standing.during = "step"
        self._relay.expect(batch)
        self._standing.during = "edit"
        try:
            self._schedule.prepare(self._relay)
        finally:
            if made := self._relay.journal[known:]:
                with self._changed:
                    self._standing.look()
                    self._standing.mirror.compare(before)
        for entry in made:
            self._standing.record(self._words_of(entry))

    def _step(self, batch: Any) -> StepResult:
        try:
            return self._relay.step(batch, skip=self._schedule.skip(self._relay), trust=self._schedule.trust)
        except TornStep:
            self._batches.used()  # a part of the layers has learned from it
            raise

    def _note_step(self, result: StepResult) -> StepRow:
        """A step has succeeded: show it, and see whether the run goes on."""
        row, layers = step_row(self._relay.steps, result, self._relay.branch), layer_rows(self._relay)
        needed = self._need_in_core(result, layers)
        with self._changed:  # all at once: no snapshot counts a step that it has no row of
            self._standing.mirror.note_step(row, layers)
            self._standing.last, self._standing.in_core_bytes = result.trace, needed
            self._standing.plan.note_use()
            self._standing.run.count()
        return row

    def _need_in_core(self, result: StepResult, layers: Layers) -> int | None:
        """Device bytes that in-core training would need, told anew when what it depends on is different."""
        trained = self._relay.shell.num_trained, *((layer.key, layer.num_trained) for layer in layers)
        like = self._relay.config, result.samples, batch_bytes(result.trace), trained
        if like == self._in_core_for:
            return self._standing.in_core_bytes
        self._in_core_for = like
        try:
            return in_core_bytes(self._relay, result.trace)
        except Exception:  # the step is done whatever is thought of it
            _log.exception("what in-core training would need cannot be told")
            return None

    # -- between two steps ---------------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """What the next step will need."""
        self._standing.during = "batch"
        try:
            batch = self._batches.take()
        except StopIteration:
            raise ValueError("there is no further batch: nothing is left to forecast") from None
        return self._relay.forecast(batch)

    def edit(self, change: Callable[[Relay], Any], what: str = "") -> Any:
        """Let a function change the relay; without words it is not recorded."""
        self._standing.during = "edit"
        try:
            value = change(self._relay)
        finally:
            self._standing.look()
        if what:
            self._standing.record(what)
        return value

    def revise(self, action: Callable[[], Any], note: Note) -> Any:
        """Do something that the relay does as a whole or not at all, and note it."""
        before = self._standing.mirror.layers
        value = self.edit(lambda _: action())
        with self._changed:
            self._standing.refusal = None
        note(value, before)
        return value

    def note_edit(self, what: str, before: Layers) -> None:
        """An edit is done: record it, and show which layers it has changed."""
        with self._changed:
            self._standing.mirror.compare(before)
        self._standing.record(what)

    def note_turn(self, turn: Entry, before: Layers) -> None:
        """An edit is undone, or done again."""
        self.note_edit(self._words_of(turn), before)

    def note_switch(self, branch: Branch, before: Layers) -> None:
        """To the branch itself nothing has happened, but loggers see other figures from now on."""
        change = Change(branch.steps, f"switch to {branch.name}", branch.name)
        self._standing.tell(lambda logger: logger.log_change(change))

    def _words_of(self, turn: Entry) -> str:
        return entry_words(turn, self._relay.journal)

    def set(self, settings: Mapping[str, Any]) -> None:
        """Give the next step other settings: with those since the last step they are one change."""
        self._standing.during = "edit"
        plan, planned = self._standing.plan, {**settings_of(self._relay), **settings}
        try:
            apply_settings(self._relay, planned)
        finally:
            self._standing.look()
        with self._changed:
            if plan.noted is not None:
                self._standing.mirror.past.changes.remove(plan.noted)
                plan.noted = None
        if what := settings_words(plan.used, planned):
            plan.noted = self._standing.record(what)
