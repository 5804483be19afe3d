"""Steers all ranks as a session steers one relay: what is asked reaches every rank at the same place between two steps.

    commands ──► queue ──► thread: one command, or else one step, at a time ──► every rank does it ──► all have answered

So ranks cannot disagree on what comes next, whenever somebody presses a button; the price is a message to each rank and back
per step. The queue and the run are those of a session.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from l2l_core import Edit
from workbench.ranks.messages import RankResponse
from workbench.ranks.rank_processes import END_S, RankProcesses
from workbench.session import Command, Failure, RunController, Snapshot

_CLOSED = "These workers were ended: run the cell again to start others."


class RankController(RunController):
    """What can be done with ranks together, and how they stand; `ranks` has each of them by itself.

    Invariant: a rank is asked by the conductor's thread alone, and all are asked the same.

    Args:
        ranks: are the conductor's alone, and end with it.
    """

    has_shelf = False  # which several workers cannot have

    def __init__(self, ranks: RankProcesses) -> None:
        super().__init__(lambda command, error: None)  # whoever asked gets the error, by the future
        self.ranks = ranks
        ranks.on_message = self._commands.notify_change
        self._commands.start(lambda: None, self._shut_down)

    # -- looking -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return how the first rank stands, with the run and the queue of all of them."""
        first = self.ranks[0].snapshot()
        with self._changed:
            run, queue = self._run, list(self._commands.queue)
            return replace(
                first,
                number=self._commands.number,
                state="closed" if self._ended else run.state,
                pausing=self._is_pausing,
                device=f"{len(self.ranks)} workers, {first.device}",
                queued=tuple(command.label for command in queue),
                tickets=tuple(command.ticket for command in queue),
                done=run.done,
                target=run.target,
                failure=run.failure,
                ended=self._ended,
                probe=None,
            )

    # -- commands ------------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Leave out the batch that a step has failed on, on every rank."""
        self._submit("skip the batch", "skip")

    def edit(self, *edits: Edit, what: str = "", force: bool = False) -> Future[None]:
        """Edit the stack of layers on all ranks between two steps, as `Session.edit`. The future gets a ValueError if refused.

        Raises:
            TypeError: not edits: a function cannot be sent to another process.
        """
        if not edits or not all(isinstance(edit, Edit) for edit in edits):
            raise TypeError(f"{edits!r}: give edits, as Drop(2)")
        return self._submit(what or ", ".join(map(repr, edits)), "edit", *edits, what=what, force=force)

    def undo(self) -> Future[None]:
        """Undo the last edit on all ranks."""
        return self._submit("undo", "undo")

    def redo(self) -> Future[None]:
        """Do again what was undone last, on all ranks."""
        return self._submit("redo", "redo")

    def fork(self, name: str) -> Future[None]:
        """Make a branch of the present state on all ranks, and go on there. The future gets a ValueError if refused."""
        return self._submit(f"⑂ {name}", "fork", name)

    def switch(self, name: str) -> Future[None]:
        """Go on with another branch on all ranks, as `Session.switch`. The future gets a ValueError if there is none."""
        return self._submit(f"switch to {name}", "switch", name)

    def discard(self, name: str) -> Future[None]:
        """Free a branch that is not the present one, on all ranks."""
        return self._submit(f"discard {name}", "discard", name)

    def reconfigure(self, **settings: Any) -> Future[None]:
        """Give the next step of all ranks other settings, as `Session.reconfigure`. The future gets a ValueError if refused."""
        words = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return self._submit(words, "reconfigure", **settings)

    def close(self, wait: bool = True) -> None:
        """Let the step under way finish, for so long as ranks may take to end, and end every process. Closing twice is fine.

        Args:
            wait: until they have ended.
        """
        with self._changed:
            self._ended = _CLOSED
        self._commands.close(wait=False)
        ender = threading.Thread(
            target=self._end_ranks, name="end ranks"
        )  # no daemon: a process must not end before its ranks
        ender.start()
        if wait:
            ender.join()

    def _end_ranks(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._run.state == "closed", END_S)
        self.ranks.close(0.0)  # for whoever hangs; the thread that waits for its answer ends with it
        self._commands.join()

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _submit(self, label: str, method: str, *args: Any, **options: Any) -> Future[None]:
        return self._commands.submit(Command(label, lambda: self._call_all(method, *args, **options)))

    def _step(self) -> None:
        before = self.ranks[0].snapshot().step
        with self._changed:
            self._run.first_step_pending = False
        if self._show_failure(self.ranks.call_all("step")):
            return
        with self._changed:
            if self.ranks[0].snapshot().step == before:  # the batches have come to their end
                self._run.stop()
            else:
                self._run.count_step()

    def _call_all(self, method: str, *args: Any, **options: Any) -> None:
        answers = self.ranks.call_all(method, *args, **options)
        if self._show_failure(answers):
            return
        refused = {rank: answer.refused for rank, answer in enumerate(answers) if answer.refused}
        if refused:
            raise ValueError("; ".join(f"worker {rank}: {why}" for rank, why in refused.items()))

    def _show_failure(self, answers: Sequence[RankResponse]) -> bool:
        """Show the failure that was the cause of the others, if there is one."""
        failures = [(rank, answer.failure) for rank, answer in enumerate(answers) if answer.failure is not None]
        if not failures:
            return False
        rank, failure = min(failures, key=lambda each: _distance_from_cause(self.ranks[each[0]].ended, each[1]))
        told = failure if self.ranks[rank].ended else replace(failure, message=f"worker {rank}: {failure.message}")
        self._run.fail(told)
        return True

    def _shut_down(self) -> None:
        self.ranks.close()
        with self._changed:
            self._run.state = "closed"
            self._commands.notify_change()


def _distance_from_cause(ended: str, failure: Failure) -> int:
    """How far a failure is from the cause: first a worker that is gone, then one that failed by itself, then the others."""
    return 0 if ended else 1 if failure.error not in ("WorkerError", "WorkerLostError") else 2
