"""Training in a thread of its own, steered by queued commands and seen through snapshots. Knows no widgets.

A session owns a relay while it is open: steps, edits and new settings happen on its thread, one after another, in the
order in which they were asked for. Nobody waits for them: commands return at once, and so does `snapshot`.

    commands ──► queue ──► thread: one command, or else one step of the run, at a time    worker.py, trainer.py
                             │
                             └──► state, rows, traces ──► snapshot ──► whoever looks      standing.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from l2l_core import Edit, Fit, Relay, Schedule
from l2l_core.edits import Branch, JournalEntry
from workbench.session.batches import Batches, BatchSource
from workbench.session.command_thread import Command, CommandThread
from workbench.session.edit_text import describe_edits
from workbench.session.loggers import Logger
from workbench.session.lr_scheduler import Scheduler
from workbench.session.probe import Probe, ProbeBatches
from workbench.session.queryable_session import QueryableSession
from workbench.session.race_controller import RaceController
from workbench.session.race_result import Race
from workbench.session.session_state import CLOSED, TAKEN_OVER, TRAIN, SessionState
from workbench.session.settings import check_names, check_settings
from workbench.session.snapshot_rows import describe_settings_change
from workbench.session.trainer import Trainer
from workbench.session.training_run import check_steps


class Session(QueryableSession):
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
        probe: a few held-out batches whose losses are measured before and after every edit, see `Probe`; None: copies of
            the first training batches; False: none, until `probe_on` is set.
        decode: ``decode(tokens) -> text``, for panels that show tokens; None: these show their numbers.

    Raises:
        TypeError, ValueError: not a relay, or batches or a probe of no such kind, or a probe without batches.
    """

    def __init__(
        self,
        relay: Relay,
        batches: BatchSource,
        *,
        loggers: Sequence[Logger] = (),
        scheduler: Scheduler | None = None,
        schedule: Schedule = Schedule(),  # noqa: B008 - keeps no state; this one edits nothing
        probe: ProbeBatches = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        if not isinstance(relay, Relay):
            raise TypeError(f"relay is a {type(relay).__name__}: a session takes an l2l_core.Relay over your model")
        self.relay, self.decode = relay, decode
        self._batches = Batches(batches)
        self._probe = Probe(relay, probe, self._batches)
        # A lambda: the standing needs the worker, and is made after it.
        self._commands = CommandThread(self._next_due, lambda command, error: self._state.show_error(command, error))
        self._changed = self._commands.changed
        self._state = SessionState(relay, self._commands, loggers, self._probe)
        self._run, self._settings_plan = self._state.run, self._state.settings_plan
        self._trainer = Trainer(relay, self._batches, self._probe, self._state, scheduler, schedule)
        self._races = RaceController(self._commands, self._trainer, self._state)
        earlier = _sessions[relay]() if relay in _sessions else None
        if earlier is not None:
            earlier._end_session(TAKEN_OVER, wait=False)
        _sessions[relay] = ref(self)  # weak both ways: to be found here keeps neither alive
        self._commands.start(lambda: self._take_over(earlier), self._shut_down)

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> None:
        """Train for so many steps; without a number, go on with those that are left, or else without end.

        While a run is under way, the steps are added to it. A run also ends where the batches do.

        Raises:
            ValueError: not a positive number; or none during a race, which goes on by itself.
        """
        steps = check_steps(steps)
        with self._changed:  # what the call means depends on what is under way and waits now
            if steps is None and self._races.resume():
                return
            # After a stop that still waits this is a new run, and not the one under way.
            stops = "stop" in [command.what for command in self._commands.queue]
            goes_on = steps is None and self._run.state == "running" and not stops
            self._commands.submit(Command("run", lambda: self._run.begin(steps, continues=goes_on)))

    def step(self) -> None:
        """Train one step; a run under way pauses after it."""
        self._commands.submit(Command("step", self._run.begin_single_step))

    def pause(self) -> None:
        """Pause when the step under way is over, that of a race too; `run` goes on with the steps that are left."""
        if not self._races.pause():
            self._commands.submit(Command("pause", self._run.pause))

    def stop(self) -> None:
        """End the run, or the race that is being run, when the step under way is over."""
        if not self._races.stop():
            self._commands.submit(Command("stop", self._run.stop))

    def skip(self) -> None:
        """Leave out the batch that a step has failed on: the next step takes another one.

        A batch that no step has failed on, as one that was taken for a forecast, stays the next one.
        """
        self._commands.submit(Command("skip the batch", self._trainer.skip))

    def edit(self, *changes: Edit | Callable[[Relay], Any], what: str = "", force: bool = False) -> Future[Any]:
        """Edit the stack of layers, or do something else with the relay, between two steps.

        An edit that cannot be carried out changes nothing: it is shown as the session's `refusal`, and a run goes on. An
        error of any other function stops the run.

        Args:
            changes: an edit as `Insert(at=2)`, or several, of which all are carried out or none; or one function that is
                called with the relay on the session's thread, as ``lambda relay: relay.evaluate(batch)``.
            what: a few words for the record of changes; default the edits. A call without them is not recorded.
            force: carry out edits that would be refused on evidence alone, see `Relay.apply`.

        Returns:
            A future of what the function returns; of edits, their inverse. An error reaches it too.

        Raises:
            TypeError: neither edits nor a function.
        """
        edits = [change for change in changes if isinstance(change, Edit)]
        if edits and len(edits) == len(changes):
            words = partial(describe_edits, edits, what)  # of layers whose numbers may be others when the turn comes
            said = lambda: words(self._state.relay_view.layers)  # noqa: E731 - short enough
            return self._submit_atomic(said, self._trainer.apply, edits, force, words)
        if len(changes) != 1 or not callable(call := changes[0]):
            raise TypeError(f"{changes!r}: give edits, as Insert(at=2), or a function of the relay")
        return self._commands.submit(Command(what or "a call between steps", lambda: self._trainer.edit(call, what)))

    def undo(self) -> Future[JournalEntry]:
        """Undo the last edit between two steps; what cannot be undone is refused, as in `edit`."""
        return self._submit_atomic("undo", self._trainer.undo_or_redo, "undo")

    def redo(self) -> Future[JournalEntry]:
        """Do again what was undone last."""
        return self._submit_atomic("redo", self._trainer.undo_or_redo, "redo")

    def fork(self, name: str) -> Future[Branch]:
        """Make a branch of the present state and go on there; what cannot be is refused, as in `edit`."""
        return self._submit_atomic(f"⑂ {name}", self._trainer.fork, name)

    def switch(self, name: str) -> Future[Branch]:
        """Go on with another branch. A scheduler of the learning rate goes on as it is, but for the rates themselves."""
        return self._submit_atomic(f"switch to {name}", self._trainer.switch, name)

    def discard(self, name: str) -> Future[None]:
        """Free a branch that is not the present one."""
        return self._submit_atomic(f"discard {name}", self._trainer.discard, name)

    def race(self, *names: str, steps: int = 200) -> Future[Race]:
        """Let branches train in turn on the same batches, each on its own clock; then go on where the session was.

        What is asked for meanwhile waits, but for `pause`, `run` and `stop`. A branch that fails leaves the race, and the
        others go on. The future gets a ValueError of a branch that there is not when the race's turn comes. A scheduler of the
        learning rate is as it is now for all of them at first; then each has a state of it of its own.

        Args:
            names: of two branches or more; the first is the one that the others are compared with.
            steps: of each.

        Raises:
            ValueError: fewer than two names, one of them twice, steps below 1, or a scheduler without `state_dict`.
        """
        return self._races.submit(names, steps)

    def cancel(self, ticket: int) -> bool:
        """Take a command out of the queue by its ticket, see `Snapshot.tickets`; False if its turn has come already."""
        with self._changed:  # at once: a snapshot shows the queue and the settings that follow from it
            taken = self._commands.cancel(ticket)
            self._state.replan_settings()
            return taken

    def reconfigure(self, **settings: Any) -> None:
        """Give the next step other settings: fields of `RelayConfig`, or an emulated link's figures (`LINK`).

        Raises:
            ValueError: an unknown setting, a value out of range, or figures for a link that is real.
        """
        check_names(settings, self.relay.device)
        with self._changed:
            planned = {**self._settings_plan.settings, **settings}
            check_settings(planned)
            if planned == self._settings_plan.settings and all(one.settings for one in self._commands.queue):
                return  # anything else that waits may make other settings first, as a switch of branches does
            what = describe_settings_change(self._settings_plan.settings, planned)
            self._commands.submit(Command(what, lambda: self._trainer.set_settings(settings), settings))
            self._settings_plan.settings = planned

    def fit(self, device_bytes: int | None = None, host_bytes: int | None = None) -> Future[Fit]:
        """Look for the fastest settings with which the next step fits, and use them from then on; see `Relay.fit`.

        The future gets a NothingFits where there are none, and the settings stay as they are.

        Args:
            device_bytes, host_bytes: that the step may take; default what there is.
        """
        return self._submit_atomic("fit", self._trainer.fit, device_bytes, host_bytes)

    def close(self, wait: bool = True) -> None:
        """Let the step under way finish, drop what is queued, end the thread. Closing twice is fine."""
        self._end_session(CLOSED, wait)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for the worker ------------------------------------------------------------------------------------------------

    def _submit_atomic(self, what: str | Callable[[], str], action: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue something that is done as a whole or not at all."""
        return self._commands.submit(Command(what, lambda: action(*args), is_atomic=True))

    def _end_session(self, reason: str, wait: bool) -> None:
        self._state.set_ended(reason)
        self._commands.close(wait)

    def _take_over(self, earlier: Session | None) -> None:
        if earlier is not None:
            earlier._commands.join()  # it may be in the middle of a step
            with self._changed:
                self._state.refresh()
                self._settings_plan.mark_used()
                self._trainer.script.begin()
                self._commands.notify_change()

    def _shut_down(self) -> None:
        self._races.close()
        self._state.close()

    def _next_due(self) -> Command | None:
        """The judgement of an edit that is done, or else a step of the run, if it is its turn."""
        if self._state.pending is not None:
            return Command("measure what the last edit did", self._trainer.complete_verdict)
        if (turn := self._races.next_turn()) is not None or self._commands.queue_paused:
            return turn  # None while a race is paused: the run waits for its end too
        return Command(TRAIN, self._trainer.train) if self._run.is_due(bool(self._commands.queue)) else None


_sessions: WeakKeyDictionary[Relay, ref[Session]] = WeakKeyDictionary()
