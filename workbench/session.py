"""Training in a thread of its own, steered by queued commands and seen through snapshots. Knows no widgets.

A session owns a relay while it is open: steps, edits and new settings happen on its thread, one after another, in the
order in which they were asked for. Nobody waits for them: commands return at once, and so does `snapshot`.

    commands ──► queue ──► thread: one command, or else one step of the run, at a time
                             │
                             └──► state, rows, traces ──► snapshot ──► whoever looks
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from l2l_core import Edit, EmulatedDevice, Relay, RelayConfig, StepResult, TornStep, Trace
from workbench.batches import Batches, BatchSource
from workbench.in_core_bytes import batch_bytes, in_core_bytes
from workbench.loggers import Logger
from workbench.rows import count_params, explain, layer_rows, settings_words, step_row
from workbench.snapshot import Change, During, Failure, Progress, Snapshot, State, StepRow
from workbench.statistics import StatisticsLog

LINK = ("h2d_bytes_per_s", "d2h_bytes_per_s", "latency_s")
SETTINGS = (*(field.name for field in fields(RelayConfig)), *LINK)


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
    ) -> None:
        if not isinstance(relay, Relay):
            raise TypeError(f"relay is a {type(relay).__name__}: a session takes an l2l_core.Relay over your model")
        self.relay = relay
        self._batches = Batches(batches)
        self._loggers, self._scheduler = tuple(loggers), scheduler
        self._changed = threading.Condition()
        self._queue: deque[_Command] = deque()
        self._state: State = "idle"
        self._left: int | None = 0  # steps asked for and not done; None: no end
        self._done = 0
        self._pauses = False  # after the step under way
        self._owes_step = False  # commands wait until a run that has begun has made a step
        self._at_work = False
        self._closing = False
        self._number = 0
        self._during: During = "step"
        self._planned = _settings_of(relay)  # once everything queued is done
        self._used = dict(self._planned)  # settings of the last step
        self._set_since: Change | None = None  # what was set since then
        self._steps: list[StepRow] = []
        self._changes: list[Change] = []
        self._layers, self._finished = layer_rows(relay), relay.steps
        self._statistics = StatisticsLog()
        self._statistics.arrange(self._layers)
        self._num_params = count_params(relay)
        self._last: Trace | None = None
        self._under_way: Callable[[], Trace | None] = lambda: None
        self._in_core: tuple[Any, int | None] = None, None
        self._failure: Failure | None = None
        earlier = _sessions[relay]() if relay in _sessions else None
        if earlier is not None:
            earlier.close(wait=False)
        _sessions[relay] = ref(self)
        self._thread = threading.Thread(target=self._work, args=(earlier,), name="session", daemon=True)
        self._thread.start()

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
            stops = "stop" in [command.what for command in self._queue]
            goes_on = steps is None and self._state == "running" and not stops
            self._submit(_Command("run", lambda: self._begin(steps, goes_on=goes_on)))

    def step(self) -> None:
        """Train one step; a run under way pauses after it."""
        self._submit(_Command("step", lambda: self._begin(None if self._left != 0 else 1, pauses=True)))

    def pause(self) -> None:
        """Pause when the step under way is over; `run` goes on with the steps that are left."""
        self._submit(_Command("pause", self._halt))

    def stop(self) -> None:
        """End the run when the step under way is over."""
        self._submit(_Command("stop", lambda: self._halt(left=0)))

    def skip(self) -> None:
        """Let go of the batch that a failed step has left: the next step takes another one."""
        self._submit(_Command("skip the batch", self._batches.used))

    def edit(self, change: Edit | Callable[[Relay], Any], what: str = "") -> Future[Any]:
        """Edit the stack of layers, or do something else with the relay, between two steps.

        Args:
            change: an edit as `Insert(at=2)`, or a function that is called with the relay on the session's thread, as
                ``lambda relay: relay.evaluate(batch)``.
            what: a few words for the record of changes; default the edit. A call without them is not recorded.

        Returns:
            A future of what `change` returns; of an edit, its inverse. An error reaches it too, beside the session's `failure`.

        Raises:
            TypeError: not a function.
        """
        if isinstance(change, Edit):
            return self.edit(lambda relay: relay.apply(change), what or repr(change))
        if not callable(change):
            raise TypeError(f"change is a {type(change).__name__}: give a function of the relay")
        return self._submit(_Command(what or "a call between steps", lambda: self._edit(change, what)))

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
            _config_of(planned), EmulatedDevice(None, *_link_of(planned))  # both refuse what is out of range
            if planned == self._planned:
                return
            what = settings_words(self._planned, planned)
            self._submit(_Command(what, lambda: self._set(settings), settings))
            self._planned = planned

    def close(self, wait: bool = True) -> None:
        """Let the step under way finish, drop what is queued, end the thread. Closing twice is fine."""
        with self._changed:
            self._closing = True
            dropped, self._queue = self._queue, deque()
            self._touch()
        for command in dropped:
            command.future.cancel()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- looking -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The session as it is now, in the middle of a step too; never waits for the step."""
        with self._changed:
            waiting = [command.what for command in self._queue]
            return Snapshot(
                number=self._number,
                state=self._state,
                pausing=self._state == "running" and (self._pauses or bool({"pause", "stop"} & set(waiting))),
                model=type(self.relay.model).__name__,
                num_params=self._num_params,
                device=self.relay.device.name,
                figures={name: self._planned[name] for name in self.relay.device.figures()},
                config=_config_of(self._planned),
                queued=tuple(waiting),
                step=self._finished,
                done=self._done,
                target=None if self._left is None else self._done + self._left,
                steps=tuple(self._steps),
                changes=tuple(self._changes),
                layers=self._layers,
                statistics=self._statistics.view(),
                shell_params=self.relay.shell.num_params,
                last=self._last,
                progress=self._progress(),
                in_core_bytes=self._in_core[1],
                failure=self._failure,
            )

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until a snapshot would have another number than this one, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != number, timeout_s)

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
            if self._state == "closed" or not (self._state == "running" or self._queue or self._at_work):
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

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _submit(self, command: _Command) -> Future[Any]:
        with self._changed:
            if self._closing:
                raise RuntimeError("this session is closed: make a new one on the relay")
            self._queue.append(command)
            self._touch()
        return command.future

    def _touch(self) -> None:
        self._number += 1
        self._changed.notify_all()

    def _work(self, earlier: Session | None) -> None:
        if earlier is not None:
            earlier._thread.join()  # it may be in the middle of a step
            with self._changed:
                self._look_at_relay()
                self._used = _settings_of(self.relay)
                self._touch()
        del earlier
        while (command := self._next()) is not None:
            self._do(command)
            del command  # its error knows the frames of the step, and these all tensors
        self._during = "logger"
        for logger in self._loggers:
            self._do(_Command("close", logger.close))
        with self._changed:
            self._state = "closed"
            self._touch()

    def _next(self) -> _Command | None:
        """What to do next: the first of the queue, or else a step of the run; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue or self._state == "running")
            if self._closing:
                return None
            self._at_work = True
            if self._state == "running" and (self._owes_step or not self._queue):
                self._owes_step = False
                return _Command("train", self._train)
            return self._queue.popleft()

    def _do(self, command: _Command) -> None:
        """Run a command. An error stops the run and is shown, but does not end the session."""
        if not command.future.set_running_or_notify_cancel():
            with self._changed:
                self._at_work = False
                self._touch()
            return
        try:
            value = command.action()
        except BaseException as error:
            with self._changed:
                self._at_work = False
                self._fail(error)
            command.future.set_exception(error)
            del command  # the error knows this frame
            return
        with self._changed:
            self._at_work = False
            self._touch()
        command.future.set_result(value)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = explain(error, self._during, self.relay.steps)
            self._state, self._owes_step = "failed", False
            self._touch()

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

    def _edit(self, change: Callable[[Relay], Any], what: str) -> Any:
        self._during = "edit"
        try:
            value = change(self.relay)
        finally:
            with self._changed:
                self._look_at_relay()
        if what:
            self._record(Change(self.relay.steps, what))
        return value

    def _set(self, settings: Mapping[str, Any]) -> None:
        """Settings since the last step are one change, however often they were set."""
        self._during = "edit"
        planned = {**_settings_of(self.relay), **settings}
        try:
            self._apply(planned)
        finally:
            with self._changed:
                self._look_at_relay()
        with self._changed:
            if self._set_since is not None:
                self._changes.remove(self._set_since)
                self._set_since = None
        if what := settings_words(self._used, planned):
            self._set_since = Change(self.relay.steps, what)
            self._record(self._set_since)

    def _record(self, made: Change) -> None:
        with self._changed:
            self._changes.append(made)
        self._tell(lambda logger: logger.log_change(made))

    def _tell(self, tell: Callable[[Logger], None]) -> None:
        """Tell all loggers. When one fails the run stops, but the others are told, and what was done is done."""
        self._during = "logger"
        for logger in self._loggers:
            try:
                tell(logger)
            except Exception as error:
                self._fail(error)

    def _look_at_relay(self) -> None:
        """A change may have done anything to the relay; settings that still wait come on top."""
        self._layers, self._finished = layer_rows(self.relay), self.relay.steps
        self._statistics.arrange(self._layers)
        self._num_params = count_params(self.relay)
        self._planned = _settings_of(self.relay)
        for command in self._queue:
            with suppress(ValueError):  # no longer fits: its turn will tell
                _config_of(planned := {**self._planned, **command.settings})
                self._planned = planned

    def _apply(self, planned: dict[str, Any]) -> None:
        self.relay.config = _config_of(planned)
        if isinstance(self.relay.device, EmulatedDevice):
            self.relay.device.throttle(*_link_of(planned))

    def _train(self) -> None:
        self._during = "batch"
        try:
            batch = self._batches.take()
        except StopIteration:
            self._halt(left=0)
            return
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

    def _step(self, batch: Any) -> StepResult:
        try:
            return self.relay.step(batch)
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
        row, layers = step_row(self.relay.steps, result), layer_rows(self.relay)
        frozen = tuple((layer.key, layer.frozen) for layer in layers)
        like = self.relay.config, result.samples, batch_bytes(result.trace), frozen
        if like != self._in_core[0]:
            try:
                self._in_core = like, in_core_bytes(self.relay, result.trace)
            except Exception:  # the step is done whatever is thought of it
                _log.exception("what in-core training would need cannot be told")
                self._in_core = like, None
        with self._changed:
            self._steps.append(row)
            self._layers, self._last, self._finished = layers, result.trace, row.step
            self._statistics.append(row.step, layers)
            self._used, self._set_since = _settings_of(self.relay), None
            self._done += 1
            if self._left is not None:
                self._left -= 1
            if self._left == 0 or self._pauses:
                self._halt()
        return row


@dataclass(frozen=True)
class _Command:
    """Something to do on the session's thread."""

    what: str
    action: Callable[[], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)  # that it will make
    future: Future[Any] = field(default_factory=Future)


_log = logging.getLogger(__name__)
_sessions: WeakKeyDictionary[Relay, ref[Session]] = WeakKeyDictionary()


def _settings_of(relay: Relay) -> dict[str, Any]:
    config = relay.config
    return {**{field.name: getattr(config, field.name) for field in fields(config)}, **relay.device.figures()}


def _config_of(settings: dict[str, Any]) -> RelayConfig:
    return RelayConfig(**{field.name: settings[field.name] for field in fields(RelayConfig)})


def _link_of(settings: dict[str, Any]) -> list[Any]:
    return [settings.get(name, 0.0 if name == "latency_s" else None) for name in LINK]


def _advance(bar: tqdm | None, now: Snapshot) -> None:
    if bar is None:
        return
    bar.total, bar.n = now.target, now.done
    if now.steps:
        bar.set_postfix_str(f"loss {now.steps[-1].loss:.4g}", refresh=False)
    bar.refresh()
