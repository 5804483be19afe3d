"""A rank as it is seen from here: what it has told last, and whether its process lives."""

from __future__ import annotations

import pickle
import signal
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Condition

from workbench.ranks.messages import RankFailure, RankRequest, RankResponse, SnapshotMessage
from workbench.session import ShownStep, Snapshot


class RemoteRank:
    """One rank in another process; panels look at it as at a session.

    Invariant: written by the thread that reads, under `changed`; what was shown once is the same object as long as it is shown.

    Args:
        rank: its number.
        process: that it is in.
        pipe: to it.
        changed: is notified of whatever comes.

    Attributes:
        ended: why there is no process any more; "" while there is one.
        broken: what went wrong in it outside of any step, if anything did.
    """

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, changed: Condition) -> None:
        self.rank, self.process, self.pipe, self._changed = rank, process, pipe, changed
        self.ended, self.failure = "", None  # type: str, Broken | None
        self._snapshot: Snapshot | None = None
        self._shown_step: ShownStep | None = None
        self._number = 0
        self._responses: dict[int, RankResponse] = {}

    @property
    def is_ready(self) -> bool:
        """Whether it has said how it stands."""
        return self._snapshot is not None

    def snapshot(self) -> Snapshot:
        """Return how it stood when it last said so."""
        with self._changed:
            assert self._snapshot is not None, f"rank {self.rank} has said nothing yet"
            return replace(self._snapshot, number=self._number, ended=self._snapshot.ended or self.ended)

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until a snapshot would have another number than this one, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != number, timeout_s)

    def send(self, request: RankRequest) -> None:
        """Send a question; one that has ended does not get it."""
        data = pickle.dumps(request)
        with suppress(OSError):  # it has just ended, which the thread that reads finds out by itself
            self.pipe.send_bytes(data)

    def take_response(self, number: int) -> RankResponse | None:
        """Take the answer to a question, if there is one."""
        return self._responses.pop(number, None)

    def read_message(self) -> None:
        """Take in one message, or the end of the process."""
        try:
            message = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            with self._changed:
                self.ended = self.ended or _describe_exit(self.process.exitcode)
                self._notify_change()
            return
        with self._changed:
            if isinstance(message, RankResponse):
                self._responses[message.number] = message
            elif isinstance(message, RankFailure):
                self.failure = message
            else:
                self._store_snapshot(message)
            self._notify_change()

    def _store_snapshot(self, message: SnapshotMessage) -> None:
        now = replace(message.snapshot, shown=self._shown_step) if message.step_unchanged else message.snapshot
        self._snapshot, self._shown_step = now, now.shown

    def _notify_change(self) -> None:
        self._number += 1
        self._changed.notify_all()


def _describe_exit(exitcode: int | None) -> str:
    """Say how a process has ended."""
    if exitcode is not None and exitcode < 0:
        return f"its process was ended by {signal.Signals(-exitcode).name}"
    return "its process has ended" if not exitcode else f"its process has ended with exit status {exitcode}"
