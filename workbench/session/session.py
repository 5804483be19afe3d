"""Training in a thread of its own, steered by queued commands and seen through snapshots. Knows no widgets.

A session owns a relay while it is open: steps, edits and new settings happen on its thread, one after another, in the
order in which they were asked for. Nobody waits for them: commands return at once, and so does `snapshot`.

    commands ──► queue ──► thread: one command, or else one step of the run, at a time
                             │
                             └──► state, rows, traces ──► snapshot ──► whoever looks
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from l2l_core import Edit, EmulatedDevice, Forecast, Relay, Schedule, StepResult, TornStep, Trace
from l2l_core.edits import Branch, Entry
from workbench.readings import batch_bytes, in_core_bytes
from workbench.session.batches import Batches, BatchSource
from workbench.session.edit_words import edit_words, entry_words
from workbench.session.loggers import Logger, Watcher
from workbench.session.mirror import Mirror
from workbench.session.rows import explain, layer_rows, settings_words, step_row
from workbench.session.settings import LINK, SETTINGS, apply_settings, check_settings, config_of, settings_of
from workbench.session.snapshot import Snapshot
from workbench.session.values import Change, During, Failure, LayerRow, Progress, State, StepRow
from workbench.session.worker import Command, Worker


class Scheduler(Protocol):
    """What a session asks of a learning rate scheduler, as those of `torch.optim.lr_scheduler` have it."""

    def step(self) -> None: ...


class Session:
    """A relay, where its batches come from, and a thread that trains.

    Invariant: only the thread steps, edits or reconfigures the relay, and everything else here is read and written under
    one lock. A second session on the same relay takes it over: the first one closes when its step is over.

    Steps draw from the process's random generators. A cell that draws from them while a step runs changes that step's dropout;
    give such cells a `torch.Generator` of their own.

    Args:
        relay: is the session's alone as long as that is open; `close` leaves it as it is.
        batches: an iterable that begins again when it ends (a DataLoader, a list), an iterator, or a function without
            arguments that returns a batch.
        loggers: get every finished step and every change, see `loggers.py`; they are closed with the session.
        scheduler: of the learning rate, stepped after every step; a `ReduceLROnPlateau` gets the step's loss.
        schedule: of the layers: what it says is edited before every step, and which layers sit it out.

    Raises:
        TypeError: not a relay, or batches of no such kind.
    """

    def __init__(
        self,
        relay: Relay,
        batches: BatchSource,
        *,
        loggers: Sequence[Logger] = (),
        scheduler: Scheduler | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - keeps no state; this one edits nothing
    ) -> None:
        if not isinstance(relay, Relay):
            raise TypeError(f"relay is a {type(relay).__name__}: a session takes an l2l_core.Relay over your model")
        self.relay = relay
        self._batches = Batches(batches)
        self._loggers, self._scheduler, self._schedule = tuple(loggers), scheduler, schedule
        self._worker = Worker(self._due, self._fail)
        self._changed = self._worker.changed
        self._state: State = "idle"
        self._left: int | None = 0  # steps asked for and not done; None: no end
        self._done = 0
        self._pauses = False  # after the step under way
        self._owes_step = False  # commands wait until a run that has begun has made a step
        self._during: During = "step"
        self._planned = settings_of(relay)  # once everything queued is done
        self._used = dict(self._planned)  # settings of the last step
        self._set_since: Change | None = None  # what was set since then
        self._mirror = Mirror(relay)
        self._last: Trace | None = None
        self._under_way: Callable[[], Trace | None] = lambda: None
        self._in_core: tuple[Any, int | None] = None, None
        self._failure: Failure | None = None
        self._refusal: Failure | None = None
        earlier = _sessions[relay]() if relay in _sessions else None
        if earlier is not None:
            earlier.close(wait=False)
        _sessions[relay] = ref(self)
        self._worker.start(lambda: self._take_over(earlier), self._end)

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> None:
        """Train for so many steps; without a number, go on with those that are left, or else without end.

        While a run is under way, the steps are added to it. A run also ends where the batches do.

        Raises:
            ValueError: not a positive number.
        """
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ValueError(f"steps={steps!r}: must be a positive integer, or None to go on")
        with self._changed:
            stops = "stop" in [command.what for command in self._worker.queue]
            goes_on = steps is None and self._state == "running" and not stops
            self._worker.submit(Command("run", lambda: self._begin(steps, goes_on=goes_on)))

    def step(self) -> None:
        """Train one step; a run under way pauses after it."""
        self._worker.submit(Command("step", lambda: self._begin(None if self._left != 0 else 1, pauses=True)))

    def pause(self) -> None:
        """Pause when the step under way is over; `run` goes on with the steps that are left."""
        self._worker.submit(Command("pause", self._halt))

    def stop(self) -> None:
        """End the run when the step under way is over."""
        self._worker.submit(Command("stop", lambda: self._halt(left=0)))

    def skip(self) -> None:
        """Let go of the batch that a failed step has left: the next step takes another one.

        A batch that no step has failed on, as one that was taken for a forecast, stays the next one.
        """
        self._worker.submit(Command("skip the batch", self._batches.give_up))

    def edit(self, *changes: Edit | Callable[[Relay], Any], what: str = "", trust: bool = False) -> Future[Any]:
        """Edit the stack of layers, or do something else with the relay, between two steps.

        An edit that cannot be carried out changes nothing: it is shown as the session's `refusal`, and a run goes on. An
        error of any other function stops the run.

        Args:
            changes: an edit as `Insert(at=2)`, or several, of which all are carried out or none; or one function that is
                called with the relay on the session's thread, as ``lambda relay: relay.evaluate(batch)``.
            what: a few words for the record of changes; default the edits. A call without them is not recorded.
            trust: carry out edits that would be refused on evidence alone, see `Relay.apply`.

        Returns:
            A future of what the function returns; of edits, their inverse. An error reaches it too.

        Raises:
            TypeError: neither edits nor a function.
        """
        edits = [change for change in changes if isinstance(change, Edit)]
        if edits and len(edits) == len(changes):
            words = what or "; ".join(map(edit_words, edits))
            return self._revise(lambda: self.relay.apply(*edits, trust=trust), words, self._mark_edit(lambda _: words))
        if len(changes) != 1 or not callable(call := changes[0]):
            raise TypeError(f"{changes!r}: give edits, as Insert(at=2), or a function of the relay")
        return self._worker.submit(Command(what or "a call between steps", lambda: self._edit(call, what)))

    def undo(self) -> Future[Entry]:
        """Undo the last edit between two steps; what cannot be undone is refused, as in `edit`."""
        return self._revise(self.relay.undo, "undo", self._mark_edit(self._words_of))

    def redo(self) -> Future[Entry]:
        """Do again what was undone last."""
        return self._revise(self.relay.redo, "redo", self._mark_edit(self._words_of))

    def fork(self, name: str) -> Future[Branch]:
        """Make a branch of the present state and go on there; what cannot be is refused, as in `edit`."""
        return self._revise(lambda: self.relay.fork(name), f"⑂ {name}", lambda *_: self._record(f"⑂ {name}"))

    def switch(self, name: str) -> Future[Branch]:
        """Go on with another branch. A scheduler of the learning rate goes on as it is, but for the rates themselves."""
        return self._revise(lambda: self.relay.switch(name), f"switch to {name}", self._note_switch)

    def discard(self, name: str) -> Future[None]:
        """Free a branch that is not the present one."""
        return self._revise(lambda: self.relay.discard(name), f"discard {name}", lambda *_: None)

    def forecast(self) -> Future[Forecast]:
        """What the next step will need, worked out between two steps; trains nothing. See `Relay.forecast`.

        Before the first step of a kind a few micro-batches are rehearsed, which takes about as long as they do, twice.
        """
        return self._worker.submit(Command("forecast", self._forecast, is_whole=True))

    def cancel(self, ticket: int) -> bool:
        """Take a command out of the queue by its ticket, see `Snapshot.tickets`; False if its turn has come already."""
        with self._changed:
            taken = self._worker.cancel(ticket)
            self._plan()
            return taken

    def reconfigure(self, **settings: Any) -> None:
        """Give the next step other settings: fields of `RelayConfig`, or an emulated link's figures (`LINK`).

        Raises:
            ValueError: an unknown setting, a value out of range, or figures for a link that is real.
        """
        if unknown := [name for name in settings if name not in SETTINGS]:
            raise ValueError(f"there is no setting {unknown[0]!r}; there are {', '.join(SETTINGS)}")
        if (link := [name for name in settings if name in LINK]) and not isinstance(self.relay.device, EmulatedDevice):
            raise ValueError(
                f"{link[0]}: the link of {self.relay.device.name} is real; only an emulated one can be set"
            )
        with self._changed:
            planned = {**self._planned, **settings}
            check_settings(planned)
            if planned == self._planned:
                return
            what = settings_words(self._planned, planned)
            self._worker.submit(Command(what, lambda: self._set(settings), settings))
            self._planned = planned

    def close(self, wait: bool = True) -> None:
        """Let the step under way finish, drop what is queued, end the thread. Closing twice is fine."""
        self._worker.close(wait)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- looking -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The session as it is now, in the middle of a step too; never waits for the step."""
        with self._changed:
            queue = list(self._worker.queue)
            waiting = [command.what for command in queue]
            return Snapshot(
                number=self._worker.number,
                state=self._state,
                pausing=self._state == "running" and (self._pauses or bool({"pause", "stop"} & set(waiting))),
                model=type(self.relay.model).__name__,
                num_params=self._mirror.num_params,
                device=self.relay.device.name,
                figures={name: self._planned[name] for name in self.relay.device.figures()},
                config=config_of(self._planned),
                queued=tuple(waiting),
                step=self._mirror.steps,
                done=self._done,
                target=None if self._left is None else self._done + self._left,
                steps=tuple(self._mirror.past.steps),
                changes=tuple(self._mirror.past.changes),
                layers=self._mirror.layers,
                statistics=self._mirror.past.statistics.view(),
                shell_params=self.relay.shell.num_params,
                shell_trained=self.relay.shell.num_trained,
                last=self._last,
                progress=self._progress(),
                in_core_bytes=self._in_core[1],
                failure=self._failure,
                refusal=self._refusal,
                tickets=tuple(command.ticket for command in queue),
                journal=self._mirror.journal,
                can_undo=self._mirror.can_undo,
                can_redo=self._mirror.can_redo,
                branch=self._mirror.branch,
                branches=self._mirror.branches,
                elsewhere=self._mirror.elsewhere,
                touched=self._mirror.touched,
            )

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until a snapshot would have another number than this one, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._worker.number != number, timeout_s)

    def wait(self, timeout_s: float | None = None, *, progress: bool = False) -> Snapshot:
        """Wait until nothing runs and nothing is queued; an interrupt pauses the run.

        Args:
            timeout_s: give up after so many seconds.
            progress: show a progress bar.

        Raises:
            TimeoutError: it takes longer.
        """
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with tqdm(unit="step") if progress else nullcontext() as bar:
            try:
                while not self._has_settled(until_s):
                    _advance(bar, self.snapshot())
            except KeyboardInterrupt:
                with suppress(RuntimeError):  # closed meanwhile
                    self.pause()
                raise
            _advance(bar, now := self.snapshot())
            return now

    def _has_settled(self, until_s: float) -> bool:
        with self._changed:
            if self._state == "closed" or not (self._state == "running" or self._worker.is_busy):
                return True
            if time.monotonic() >= until_s:
                raise TimeoutError(
                    f"the session is still {self._state} after step {self.relay.steps}: wait longer, or pause()"
                )
            self._changed.wait(min(until_s - time.monotonic(), 0.2))
            return False

    def _progress(self) -> Progress | None:
        trace = self._under_way()
        return Progress(trace, *trace.counts, trace.now()) if trace is not None else None

    # -- the worker ----------------------------------------------------------------------------------------------------

    def _take_over(self, earlier: Session | None) -> None:
        if earlier is not None:
            earlier._worker.join()  # it may be in the middle of a step
            with self._changed:
                self._look_at_relay()
                self._used = settings_of(self.relay)
                self._worker.touch()

    def _due(self) -> Command | None:
        """A step of the run, if it is its turn."""
        if self._state == "running" and (self._owes_step or not self._worker.queue):
            return Command("train", self._train)
        return None

    def _fail(self, command: Command, error: BaseException) -> None:
        """Show an error. It stops the run, unless it says that everything is as it was before."""
        if command.is_whole and isinstance(error, ValueError | TypeError):
            with self._changed:
                self._refusal = explain(error, "refused", self.relay.steps)
                self._worker.touch()
        else:
            self._show_failure(error)

    def _show_failure(self, error: BaseException) -> None:
        with self._changed:
            self._failure = explain(error, self._during, self.relay.steps)
            self._state, self._owes_step = "failed", False
            self._worker.touch()

    def _end(self) -> None:
        self._during = "logger"
        for logger in self._loggers:
            self._worker.do(Command("close", logger.close))
        with self._changed:
            self._state = "closed"
            self._worker.touch()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _begin(self, steps: int | None, pauses: bool = False, goes_on: bool = False) -> None:
        with self._changed:
            if goes_on and self._left == 0:
                return  # what it was to go on with has come to its end meanwhile
            if self._left == 0 or (steps is not None and self._state != "running"):
                self._left, self._done = steps, 0
            elif steps is not None and self._left is not None:
                self._left += steps
            self._state, self._pauses, self._owes_step, self._failure = "running", pauses, True, None

    def _halt(self, left: int | None = None) -> None:
        with self._changed:
            if left is not None:
                self._left, self._failure = left, None
            if self._state == "running" or left is not None:
                self._state = "idle" if self._left == 0 else "paused"

    def _revise(self, action: Callable[[], Any], what: str, note: Callable[[Any, Layers], Any]) -> Future[Any]:
        """Queue something that the relay does as a whole or not at all; `note` gets its result and the layers before."""

        def revise() -> Any:
            before = self._mirror.layers
            value = self._edit(lambda _: action(), "")
            with self._changed:
                self._refusal = None
            note(value, before)
            return value

        return self._worker.submit(Command(what, revise, is_whole=True))

    def _mark_edit(self, say: Callable[[Any], str]) -> Callable[[Any, Layers], None]:
        """What to do when an edit is done, with its words."""

        def mark(value: Any, before: Layers) -> None:
            with self._changed:
                self._mirror.compare(before)
            self._record(say(value))

        return mark

    def _note_switch(self, branch: Branch, before: Layers) -> None:
        """To the branch itself nothing has happened, but loggers see other figures from now on."""
        self._tell(lambda logger: logger.log_change(Change(branch.steps, f"switch to {branch.name}", branch.name)))

    def _words_of(self, turn: Entry) -> str:
        return entry_words(turn, self.relay.journal)

    def _edit(self, change: Callable[[Relay], Any], what: str) -> Any:
        self._during = "edit"
        try:
            value = change(self.relay)
        finally:
            with self._changed:
                self._look_at_relay()
        if what:
            self._record(what)
        return value

    def _forecast(self) -> Forecast:
        self._during = "batch"
        try:
            batch = self._batches.take()
        except StopIteration:
            raise ValueError("there is no further batch: nothing is left to forecast") from None
        return self.relay.forecast(batch)

    def _set(self, settings: Mapping[str, Any]) -> None:
        """Settings since the last step are one change, however often they were set."""
        self._during = "edit"
        planned = {**settings_of(self.relay), **settings}
        try:
            apply_settings(self.relay, planned)
        finally:
            with self._changed:
                self._look_at_relay()
        with self._changed:
            if self._set_since is not None:
                self._mirror.past.changes.remove(self._set_since)
                self._set_since = None
        if what := settings_words(self._used, planned):
            self._set_since = self._record(what)

    def _record(self, what: str) -> Change:
        made = Change(self.relay.steps, what, self.relay.branch)
        with self._changed:
            self._mirror.past.changes.append(made)
        self._tell(lambda logger: logger.log_change(made))
        return made

    def _tell(self, tell: Callable[[Logger], None]) -> None:
        """Tell all loggers. When one fails the run stops, but the others are told, and what was done is done."""
        self._during = "logger"
        for logger in self._loggers:
            try:
                tell(logger)
                if isinstance(logger, Watcher):
                    logger.watch(self.snapshot())
            except Exception as error:
                self._show_failure(error)

    def _look_at_relay(self) -> None:
        """A change may have done anything to the relay; settings that still wait come on top."""
        if self._mirror.look():
            self._used, self._set_since = settings_of(self.relay), None
        self._plan()

    def _plan(self) -> None:
        """Settings as they will be once everything queued is done."""
        self._planned = settings_of(self.relay)
        for command in self._worker.queue:
            with suppress(ValueError):  # no longer fits: its turn will tell
                check_settings(planned := {**self._planned, **command.settings})
                self._planned = planned

    def _train(self) -> None:
        self._during, self._owes_step = "batch", False
        try:
            batch = self._batches.take()
        except StopIteration:
            self._halt(left=0)
            return
        self._batches.tried()
        self._follow_schedule(batch)
        self._during = "step"
        with self._watched():
            result = self._step(batch)
        self._batches.used()
        row = self._count(result)
        self._during = "scheduler"
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(result.loss)
        elif self._scheduler is not None:
            self._scheduler.step()
        self._tell(lambda logger: logger.log_step(row))

    def _follow_schedule(self, batch: Any) -> None:
        """Carry out the edits that are due; each is a change like those that a person asks for."""
        before, known = self._mirror.layers, len(self.relay.journal)
        self._during = "step"
        self.relay.expect(batch)
        self._during = "edit"
        try:
            self._schedule.prepare(self.relay)
        finally:
            if made := self.relay.journal[known:]:
                with self._changed:
                    self._look_at_relay()
                    self._mirror.compare(before)
        for entry in made:
            self._record(self._words_of(entry))

    def _step(self, batch: Any) -> StepResult:
        try:
            return self.relay.step(batch, skip=self._schedule.skip(self.relay), trust=self._schedule.trust)
        except TornStep:
            self._batches.used()  # a part of the layers has learned from it
            raise

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The relay's trace is the progress, as soon as it is that of a new step."""
        old = self.relay.trace
        self._under_way = lambda: trace if (trace := self.relay.trace) is not old else None
        try:
            yield
        finally:
            self._under_way = lambda: None

    def _count(self, result: StepResult) -> StepRow:
        """A step has succeeded: note it, and see whether the run goes on."""
        row, layers = step_row(self.relay.steps, result, self.relay.branch), layer_rows(self.relay)
        trained = self.relay.shell.num_trained, *((layer.key, layer.num_trained) for layer in layers)
        like = self.relay.config, result.samples, batch_bytes(result.trace), trained
        if like != self._in_core[0]:
            try:
                self._in_core = like, in_core_bytes(self.relay, result.trace)
            except Exception:  # the step is done whatever is thought of it
                _log.exception("what in-core training would need cannot be told")
                self._in_core = like, None
        with self._changed:
            self._mirror.note_step(row, layers)
            self._last = result.trace
            self._used, self._set_since = settings_of(self.relay), None
            self._done += 1
            if self._left is not None:
                self._left -= 1
            if self._left == 0 or self._pauses:
                self._halt()
        return row


Layers = Sequence[LayerRow]

_log = logging.getLogger(__name__)
_sessions: WeakKeyDictionary[Relay, ref[Session]] = WeakKeyDictionary()


def _advance(bar: tqdm | None, now: Snapshot) -> None:
    if bar is None:
        return
    bar.total, bar.n = now.target, now.done
    if now.steps:
        bar.set_postfix_str(f"loss {now.steps[-1].loss:.4g}", refresh=False)
    bar.refresh()
