"""Control all ranks together: every command reaches every rank between the same two steps.

    commands ──► queue ──► thread: one command or one step at a time ──► every rank executes it ──► all have responded

So all ranks execute the same sequence. The cost is one message per rank and direction for each step. The queue and the run are
those of a session.
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

_CLOSED = "These workers were ended: run the cell again to start new ones."


class RankController(RunController):
    """Commands and snapshot of all ranks together; `ranks` has the single ranks.

    Invariant: only the thread of the controller sends requests, and it sends the same to all ranks.

    Args:
        ranks: owned by the controller, and closed with it.
    """

    has_shelf = False  # not supported with several workers

    def __init__(self, ranks: RankProcesses) -> None:
        super().__init__(lambda command, error: None)  # the future of the command has the error
        self.ranks = ranks
        ranks.on_message = self._commands.notify_change
        self._commands.start(lambda: None, self._shut_down)

    # -- snapshot ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the snapshot of the first rank, with the run and the queue of the controller."""
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
                dropped=run.dropped,
                failure=run.failure,
                ended=self._ended,
                probe=None,
            )

    # -- commands ------------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Skip the batch of a failed step on every rank."""
        self._submit("skip the batch", "skip")

    def edit(self, *edits: Edit, what: str = "", force: bool = False) -> Future[None]:
        """Edit the layers on all ranks, as `Session.edit`. The future raises ValueError if the edit is refused.

        Raises:
            TypeError: an argument is not an edit. (Functions cannot be sent to another process.)
        """
        if not edits or not all(isinstance(edit, Edit) for edit in edits):
            raise TypeError(f"{edits!r}: pass edits, e.g. Drop(2)")
        return self._submit(what or ", ".join(map(repr, edits)), "edit", *edits, what=what, force=force)

    def undo(self) -> Future[None]:
        """Undo the last edit on all ranks."""
        return self._submit("undo", "undo")

    def redo(self) -> Future[None]:
        """Redo the last undone edit on all ranks."""
        return self._submit("redo", "redo")

    def fork(self, name: str) -> Future[None]:
        """Create a branch and switch to it on all ranks. The future raises ValueError if it is refused."""
        return self._submit(f"fork {name}", "fork", name)

    def switch(self, name: str) -> Future[None]:
        """Switch to another branch on all ranks. The future raises ValueError if the branch does not exist."""
        return self._submit(f"switch to {name}", "switch", name)

    def discard(self, name: str) -> Future[None]:
        """Delete a branch other than the current one on all ranks."""
        return self._submit(f"discard {name}", "discard", name)

    def reconfigure(self, **settings: Any) -> Future[None]:
        """Change settings on all ranks, as `Session.reconfigure`. The future raises ValueError if they are refused."""
        label = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return self._submit(label, "reconfigure", **settings)

    def close(self, wait: bool = True) -> None:
        """Finish the current step, at most for `END_S` seconds, and end every process. Further calls do nothing.

        Args:
            wait: block until all processes have ended.
        """
        with self._changed:
            self._ended = _CLOSED
        self._commands.close(wait=False)
        # Not a daemon, because this process must not exit before its ranks.
        closer = threading.Thread(target=self._end_ranks, name="end ranks")
        closer.start()
        if wait:
            closer.join()

    def _end_ranks(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._run.state == "closed", END_S)
        self.ranks.close(0.0)  # kills ranks that hang, which also ends the wait for their responses
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
            if self.ranks[0].snapshot().step == before:  # no batch is left
                self._run.stop()
            else:
                self._run.count_step()

    def _call_all(self, method: str, *args: Any, **options: Any) -> None:
        responses = self.ranks.call_all(method, *args, **options)
        if self._show_failure(responses):
            return
        refused = {rank: response.refused for rank, response in enumerate(responses) if response.refused}
        if refused:
            raise ValueError("; ".join(f"worker {rank}: {reason}" for rank, reason in refused.items()))

    def _show_failure(self, responses: Sequence[RankResponse]) -> bool:
        """Show the failure that caused the others; return False if no rank has failed."""
        failures = [(rank, response.failure) for rank, response in enumerate(responses) if response.failure is not None]
        if not failures:
            return False
        rank, failure = min(failures, key=lambda each: _distance_from_cause(self.ranks[each[0]].ended, each[1]))
        if not self.ranks[rank].ended:
            failure = replace(failure, message=f"worker {rank}: {failure.message}")
        self._run.fail(failure)
        return True

    def _shut_down(self) -> None:
        self.ranks.close()
        with self._changed:
            self._run.state = "closed"
            self._commands.notify_change()


def _distance_from_cause(ended: str, failure: Failure) -> int:
    """Rank a failure: 0 for an ended worker, 1 for the worker's own error, 2 for a consequence."""
    return 0 if ended else 1 if failure.error not in ("WorkerError", "WorkerLostError") else 2
