"""Training in a thread of its own, steered by queued commands and seen through snapshots. Knows no widgets.

A session owns a relay while it is open: steps, edits and new settings happen on its thread, one after another, in the
order in which they were asked for. Nobody waits for them: commands return at once, and so does `snapshot`.

    commands ──► queue ──► thread: one command, or else one step of the run, at a time    worker.py, trainer.py
                             │
                             └──► state, rows, traces ──► snapshot ──► whoever looks      standing.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from tqdm.auto import tqdm

from l2l_core import Edit, EmulatedDevice, Forecast, Relay, Schedule
from l2l_core.edits import Branch, Entry
from workbench.session.batches import Batches, BatchSource
from workbench.session.edit_words import edit_words
from workbench.session.loggers import Logger
from workbench.session.rows import settings_words
from workbench.session.settings import LINK, SETTINGS, check_settings
from workbench.session.snapshot import Snapshot
from workbench.session.standing import Standing
from workbench.session.trainer import Note, Scheduler, Trainer
from workbench.session.worker import Command, Worker


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
        self._worker = Worker(self._due, self._fail)
        self._changed = self._worker.changed
        self._standing = Standing(relay, self._worker, loggers)
        self._run, self._plan = self._standing.run, self._standing.plan
        self._trainer = Trainer(relay, self._batches, self._standing, scheduler, schedule)
        earlier = _sessions[relay]() if relay in _sessions else None
        if earlier is not None:
            earlier.close(wait=False)
        _sessions[relay] = ref(self)
        self._worker.start(lambda: self._take_over(earlier), self._standing.close)

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> None:
        """Train for so many steps; without a number, go on with those that are left, or else without end.

        While a run is under way, the steps are added to it. A run also ends where the batches do.

        Raises:
            ValueError: not a positive number.
        """
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ValueError(f"steps={steps!r}: must be a positive integer, or None to go on")
        with self._changed:  # what the call means depends on what is under way and waits now
            stops = "stop" in [command.what for command in self._worker.queue]
            goes_on = steps is None and self._run.state == "running" and not stops
            self._worker.submit(Command("run", lambda: self._run.begin(steps, goes_on=goes_on)))

    def step(self) -> None:
        """Train one step; a run under way pauses after it."""
        self._worker.submit(Command("step", self._run.begin_one))

    def pause(self) -> None:
        """Pause when the step under way is over; `run` goes on with the steps that are left."""
        self._worker.submit(Command("pause", self._run.halt))

    def stop(self) -> None:
        """End the run when the step under way is over."""
        self._worker.submit(Command("stop", self._run.end))

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
            action = partial(self.relay.apply, *edits, trust=trust)
            return self._revise(action, words, lambda _, before: self._trainer.note_edit(words, before))
        if len(changes) != 1 or not callable(call := changes[0]):
            raise TypeError(f"{changes!r}: give edits, as Insert(at=2), or a function of the relay")
        return self._worker.submit(Command(what or "a call between steps", lambda: self._trainer.edit(call, what)))

    def undo(self) -> Future[Entry]:
        """Undo the last edit between two steps; what cannot be undone is refused, as in `edit`."""
        return self._revise(self.relay.undo, "undo", self._trainer.note_turn)

    def redo(self) -> Future[Entry]:
        """Do again what was undone last."""
        return self._revise(self.relay.redo, "redo", self._trainer.note_turn)

    def fork(self, name: str) -> Future[Branch]:
        """Make a branch of the present state and go on there; what cannot be is refused, as in `edit`."""
        return self._revise(lambda: self.relay.fork(name), f"⑂ {name}", lambda *_: self._standing.record(f"⑂ {name}"))

    def switch(self, name: str) -> Future[Branch]:
        """Go on with another branch. A scheduler of the learning rate goes on as it is, but for the rates themselves."""
        return self._revise(lambda: self.relay.switch(name), f"switch to {name}", self._trainer.note_switch)

    def discard(self, name: str) -> Future[None]:
        """Free a branch that is not the present one."""
        return self._revise(lambda: self.relay.discard(name), f"discard {name}", lambda *_: None)

    def forecast(self) -> Future[Forecast]:
        """What the next step will need, worked out between two steps; trains nothing. See `Relay.forecast`.

        Before the first step of a kind a few micro-batches are rehearsed, which takes about as long as they do, twice.
        """
        return self._worker.submit(Command("forecast", self._trainer.forecast, is_whole=True))

    def cancel(self, ticket: int) -> bool:
        """Take a command out of the queue by its ticket, see `Snapshot.tickets`; False if its turn has come already."""
        with self._changed:
            taken = self._worker.cancel(ticket)
            self._standing.follow_queue()
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
            planned = {**self._plan.settings, **settings}
            check_settings(planned)
            if planned == self._plan.settings:
                return
            what = settings_words(self._plan.settings, planned)
            self._worker.submit(Command(what, lambda: self._trainer.set(settings), settings))
            self._plan.settings = planned

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
        return self._standing.snapshot()

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
            if self._run.state == "closed" or not (self._run.state == "running" or self._worker.is_busy):
                return True
            if time.monotonic() >= until_s:
                raise TimeoutError(
                    f"the session is still {self._run.state} after step {self.relay.steps}: wait longer, or pause()"
                )
            self._changed.wait(min(until_s - time.monotonic(), 0.2))
            return False

    # -- for the worker ------------------------------------------------------------------------------------------------

    def _revise(self, action: Callable[[], Any], what: str, note: Note) -> Future[Any]:
        """Queue something that the relay does as a whole or not at all."""
        return self._worker.submit(Command(what, lambda: self._trainer.revise(action, note), is_whole=True))

    def _take_over(self, earlier: Session | None) -> None:
        if earlier is not None:
            earlier._worker.join()  # it may be in the middle of a step
            with self._changed:
                self._standing.look()
                self._plan.note_use()
                self._worker.touch()

    def _due(self) -> Command | None:
        """A step of the run, if it is its turn."""
        return Command("train", self._trainer.train) if self._run.is_due(bool(self._worker.queue)) else None

    def _fail(self, command: Command, error: BaseException) -> None:
        """Show an error. It stops the run, unless it says that everything is as it was before."""
        if command.is_whole and isinstance(error, ValueError | TypeError):
            self._standing.refuse(error)
        else:
            self._standing.fail(error)


_sessions: WeakKeyDictionary[Relay, ref[Session]] = WeakKeyDictionary()


def _advance(bar: tqdm | None, now: Snapshot) -> None:
    if bar is None:
        return
    bar.total, bar.n = now.target, now.done
    if now.steps:
        bar.set_postfix_str(f"loss {now.steps[-1].loss:.4g}", refresh=False)
    bar.refresh()
