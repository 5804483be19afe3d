"""A session: training in a background thread, controlled by queued commands and observed through snapshots. No widgets.

A session owns a relay while it is open: steps, edits and new settings run on its thread, one after another, in the order
of the calls. Commands and `snapshot` return at once.

    commands ──► queue ──► thread: one command, or else one step of the run    command_thread.py, trainer.py
                             │
                             └──► state, rows, traces ──► snapshot             session_state.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from l2l_core import Edit, Fit, Relay, Schedule
from l2l_core.edits import Branch, JournalEntry, refuse_own_step
from workbench.session.batches import Batches, BatchSource
from workbench.session.command_thread import Command
from workbench.session.edit_text import describe_edits
from workbench.session.evaluator import Evaluator
from workbench.session.loggers import Logger
from workbench.session.lr_scheduler import Scheduler
from workbench.session.probe import Probe, ProbeBatches
from workbench.session.race_controller import RaceController
from workbench.session.race_result import Race
from workbench.session.resumable_session import ResumableSession
from workbench.session.save_folder import Autosave
from workbench.session.session_state import CLOSED, TAKEN_OVER, SessionState
from workbench.session.settings import check_names, check_settings
from workbench.session.snapshot_rows import describe_settings_change
from workbench.session.tokenizer import find_decode, find_encode
from workbench.session.trainer import Trainer


class Session(ResumableSession):
    """A relay, a source of batches, and a thread that trains.

    Invariant: only the thread steps, edits or reconfigures the relay; all other state is read and written under one lock.
    A second session on the same relay takes it over: the first one closes after its current step.

    Steps draw from the process's random generators. A cell that draws from them during a step changes the dropout of that
    step; use a separate `torch.Generator` in such cells.

    Args:
        relay: used by the session alone while the session is open; `close` leaves it open.
        batches: an iterable that begins again when it ends (a DataLoader, a list), an iterator, or a function without
            arguments that returns a batch.
        loggers: receive every finished step and every change, see `Logger`; they are closed with the session.
        scheduler: learning rate scheduler, stepped after every step; a `ReduceLROnPlateau` gets the loss of the step.
        schedule: edits the layers before each step, and selects layers that the step skips.
        probe: a few held-out batches whose losses are measured before and after every edit, see `Probe`; None: copies of
            the first training batches; False: no probe until `probe_on` is set.
        decode: ``decode(tokens) -> text``, for panels that show tokens. None: that of the tokenizer on the model, on the
            batches or their data set, or in a variable of the notebook (`find_decode`); without one, token numbers are shown.
        autosave: saves the session in a folder, and resumes an earlier one that is there, see `Autosave` and `resume`.

    Raises:
        TypeError: `relay`, `batches` or `probe` has the wrong type.
        ValueError: `probe` is empty, `schedule` overrides `step`, or the relay or the scheduler cannot be saved with `autosave`.

    Example:
        >>> from workbench import Session
        >>> with Session(relay, lambda: batch) as session:
        ...     session.run(3)
        ...     state = session.wait()
        >>> relay.steps
        3
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
        autosave: Autosave | None = None,
    ) -> None:
        if not isinstance(relay, Relay):
            raise TypeError(f"relay is a {type(relay).__name__}: a session takes an l2l_core.Relay over your model")
        refuse_own_step(schedule, "a session")
        self.relay, self.decode = relay, decode or find_decode(relay.model, batches)
        self.encode = find_encode(self.decode, relay.model)
        self._batches = Batches(batches, tracks=autosave is not None)
        self._probe = Probe(relay, probe, self._batches)
        # A lambda: the state needs the command thread, and is made after it.
        super().__init__(lambda command, error: self._state.show_error(command, error))
        self._state = SessionState(relay, self._commands, self._run, loggers, self._probe)
        self._trainer = Trainer(relay, self._batches, self._probe, self._state, scheduler, schedule)
        self._races = RaceController(self._commands, self._trainer, self._state)
        self._evaluator = Evaluator(relay, self._commands, self._state)
        if autosave is not None:
            self._begin_saving(autosave)
        earlier = _sessions[relay]() if relay in _sessions else None
        if earlier is not None:
            earlier._end_session(TAKEN_OVER, wait=False)
        _sessions[relay] = ref(self)  # weak both ways: this entry keeps neither alive
        self._commands.start(lambda: self._take_over(earlier), self._shut_down)

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, steps: int | None = None, *, epochs: int | None = None) -> None:
        """Train a number of steps; without a number, resume the remaining steps, or else train without end.

        Steps are added to a run in progress. A run also ends when the batches end.

        Args:
            steps: number of steps.
            epochs: number of passes over the batches, instead of `steps`.

        Raises:
            ValueError: not a positive integer; both are given; `epochs` with batches that have no length; or no number
                during a race that is not paused.
        """
        if epochs is not None:
            if steps is not None:
                raise ValueError(f"steps={steps!r} and epochs={epochs!r} are both given: give one of them")
            steps = self._batches.steps_of(epochs)
        with self._changed:
            if steps is not None or not self._races.resume():
                super().run(steps)

    def pause(self) -> None:
        """Pause after the current step, also in a race; `run` resumes the remaining steps."""
        if not self._races.pause():
            super().pause()

    def stop(self) -> None:
        """End the run, or the race in progress, after the current step."""
        if not self._races.stop():
            super().stop()

    def cancel_search(self) -> None:
        """Cancel the search for settings that fit, the evaluation, or the learning-rate finder; training is as before."""
        self._state.search.cancel()
        self._state.work.cancel()

    def skip(self) -> None:
        """Skip the batch on which a step has failed: the next step takes another one.

        A batch without a failed step, such as one taken for a forecast, remains the next one.
        """
        self._commands.submit(Command("skip the batch", self._trainer.skip))

    def edit(self, *changes: Edit | Callable[[Relay], Any], what: str = "", force: bool = False) -> Future[Any]:
        """Edit the stack of layers, or call a function of the relay, between two steps.

        An edit that cannot be applied changes nothing: it is shown as the session's `refusal`, and the run continues. An
        error of a function stops the run.

        Args:
            changes: edits such as `Insert(at=2)`, applied all or none; or one function that is called with the relay on
                the session's thread, such as ``lambda relay: relay.evaluate(batch)``.
            what: description for the record of changes; default the edits. A function without one is not recorded.
            force: apply edits that would be refused on evidence alone, see `Relay.apply`.

        Returns:
            A future of the inverse edit, or of the function's return value. It also gets the error. It is done before the
            losses of the probe after an edit are measured; until then another call of the relay is refused. `wait` waits for
            the measurement, too.

        Raises:
            TypeError: neither edits nor a function.
        """
        edits = [change for change in changes if isinstance(change, Edit)]
        if edits and len(edits) == len(changes):
            words = partial(describe_edits, edits, what)  # evaluated when shown: the numbers of layers may change
            done = partial(words, is_done=True)
            return self._submit_atomic(
                lambda: words(self._state.relay_view.layers), self._trainer.apply, edits, force, done
            )
        if len(changes) != 1 or not callable(call := changes[0]):
            raise TypeError(f"{changes!r}: give edits, such as Insert(at=2), or a function of the relay")
        return self._commands.submit(Command(what or "a call between steps", lambda: self._trainer.edit(call, what)))

    def undo(self) -> Future[JournalEntry]:
        """Undo the last edit between two steps; refused like an edit if that is impossible. For the future see `edit`."""
        return self._submit_atomic("undo", self._trainer.undo_or_redo, "undo")

    def redo(self) -> Future[JournalEntry]:
        """Redo the edit that was undone last. For the future see `edit`."""
        return self._submit_atomic("redo", self._trainer.undo_or_redo, "redo")

    def fork(self, name: str) -> Future[Branch]:
        """Create a branch from the current state and make it active; a name in use is refused like an edit."""
        return self._submit_atomic(f"fork {name}", self._trainer.fork, name)

    def switch(self, name: str) -> Future[Branch]:
        """Make another branch active. The learning rates are the branch's; the state of a scheduler is kept as it is."""
        return self._submit_atomic(f"switch to {name}", self._trainer.switch, name)

    def discard(self, name: str) -> Future[None]:
        """Delete a branch that is not active."""
        return self._submit_atomic(f"discard {name}", self._trainer.discard, name)

    def race(self, *names: str, steps: int = 200) -> Future[Race]:
        """Train branches in turn on the same batches, each timed separately; then return to the active branch.

        Commands wait until the race is over, except `pause`, `run` and `stop`. A branch that fails leaves the race, and the
        others continue. Each branch has a separate copy of the state of a learning rate scheduler, which begins as it is at
        the start of the race. The future gets a ValueError if a branch does not exist then.

        Args:
            names: two branches or more; the others are compared with the first.
            steps: number of steps of each branch.

        Raises:
            ValueError: fewer than two names, a repeated name, steps below 1, or a scheduler without `state_dict`.
        """
        return self._races.submit(names, steps)

    def race_variant(self, *edits: Edit, steps: int = 200, name: str = "") -> Future[Race]:
        """Fork a branch, edit it, and race it against the active branch, which stays active; see `race`.

        If the edits are refused, the branch is discarded and no race begins.

        Args:
            edits: applied to the new branch, all or none.
            steps: number of steps of each branch.
            name: of the branch. Default: "variant", with a number if that is in use.
        """
        home, used = self.relay.branch, {branch.name for branch in self.snapshot().branches}
        names = (name,) if name else ("variant", *(f"variant {i}" for i in range(2, len(used) + 3)))
        variant = next((each for each in names if each not in used), name)
        words = partial(describe_edits, edits, "", is_done=True)
        return self._races.submit((home, variant), steps, partial(self._trainer.make_variant, variant, edits, words))

    def cancel(self, ticket: int) -> bool:
        """Remove a command from the queue by its `Snapshot.tickets` entry; return False if it is not queued any more."""
        with self._changed:  # both at once: a snapshot shows the queue and the settings that follow from it
            cancelled = super().cancel(ticket)
            self._state.replan_settings()
            return cancelled

    def reconfigure(self, **settings: Any) -> None:
        """Change settings of the next step: fields of `RelayConfig`, or figures of an emulated link (`LINK_SETTINGS`).

        Raises:
            ValueError: an unknown setting, a value out of range, or figures for a real link.
        """
        check_names(settings, self.relay.device)
        plan = self._state.settings_plan
        with self._changed:
            planned = {**plan.settings, **settings}
            check_settings(planned)
            if planned == plan.settings and all(one.settings for one in self._commands.queue):
                return  # any other queued command may change settings first, as a switch of branches does
            what = describe_settings_change(plan.settings, planned)
            self._commands.submit(Command(what, lambda: self._trainer.set_settings(settings), settings))
            plan.settings = planned

    def fit(self, device_bytes: int | None = None, host_bytes: int | None = None) -> Future[Fit]:
        """Propose the fastest settings with which the next step fits; see `Relay.fit`. The settings in force stay.

        ``session.reconfigure(**fit.settings)`` uses them. A relay made with ``config="auto"`` uses them at once. The future
        gets a NothingFits if there are none.

        Args:
            device_bytes, host_bytes: limits of the step; default the available memory.
        """
        return self._submit_query("search for settings that fit", self._trainer.fit, device_bytes, host_bytes)

    def close(self, wait: bool = True) -> None:
        """Finish the current step, cancel the queue and end the thread. Closing twice is allowed."""
        self._end_session(CLOSED, wait)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _submit_atomic(self, what: str | Callable[[], str], action: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._commands.submit(Command(what, lambda: action(*args), is_atomic=True))

    def _end_session(self, reason: str, wait: bool) -> None:
        self._state.set_ended(reason)
        self._state.work.cancel()
        self._commands.close(wait)

    def _take_over(self, earlier: Session | None) -> None:
        if earlier is not None:
            earlier._commands.join()  # its last step may still run
            self._find_offer()
            with self._changed:
                self._state.refresh()
                self._state.settings_plan.mark_used()
                self._trainer.script.begin()
                self._commands.notify_change()

    def _shut_down(self) -> None:
        self._races.close()
        self._save_last()
        self._state.close()

    def _next_due(self) -> Command | None:
        """Return a measurement that is due, or else a turn of a race, or a step."""
        if self._state.pending is not None:
            return Command("measure what the last edit did", self._trainer.complete_verdict)
        if (evaluation := self._evaluator.next_due()) is not None:
            return evaluation
        if (turn := self._races.next_turn()) is not None or self._commands.queue_paused:
            return turn  # None while a race is paused: the run waits for its end too
        if self._save_is_due():
            return self._save_command()
        return super()._next_due()

    def _step(self) -> None:
        steps = self.relay.steps
        self._trainer.train()
        self._count_for_save()
        if self.relay.steps > steps:  # False if the batches have ended
            self._evaluator.after_step()


_sessions: WeakKeyDictionary[Relay, ref[Session]] = WeakKeyDictionary()
