"""Parent side of one rank: its last snapshot, its responses, and the state of its process."""

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
    """A rank in another process, as a source of snapshots for panels.

    Invariant: only the reading thread changes it, under `changed`. Snapshots with the same shown step share one object.

    Args:
        rank: number of the rank.
        process: process of the rank.
        pipe: pipe to the process.
        changed: notified after every message.

    Attributes:
        ended: how the process has ended; "" while it runs.
        failure: an error of the rank outside of steps.
    """

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, changed: Condition) -> None:
        self.rank, self.process, self.pipe, self._changed = rank, process, pipe, changed
        self.ended = ""
        self.failure: RankFailure | None = None
        self._snapshot: Snapshot | None = None
        self._shown_step: ShownStep | None = None
        self._number = 0
        self._responses: dict[int, RankResponse] = {}

    @property
    def is_ready(self) -> bool:
        """True after the first snapshot."""
        return self._snapshot is not None

    def snapshot(self) -> Snapshot:
        """Return the last snapshot."""
        with self._changed:
            assert self._snapshot is not None, f"rank {self.rank} has not sent a snapshot yet"
            return replace(self._snapshot, number=self._number, ended=self._snapshot.ended or self.ended)

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until the snapshot has another number."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != number, timeout_s)

    def send(self, request: RankRequest) -> None:
        """Send a request, unless the process has ended."""
        data = pickle.dumps(request)
        with suppress(OSError):  # the process has just ended, which the reading thread detects
            self.pipe.send_bytes(data)

    def take_response(self, number: int) -> RankResponse | None:
        """Remove and return the response to a request; None if it has not arrived."""
        return self._responses.pop(number, None)

    def read_message(self) -> None:
        """Read one message, or detect the end of the process."""
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
                assert isinstance(message, SnapshotMessage)
                now = replace(message.snapshot, shown=self._shown_step) if message.step_unchanged else message.snapshot
                self._snapshot, self._shown_step = now, now.shown
            self._notify_change()

    def _notify_change(self) -> None:
        self._number += 1
        self._changed.notify_all()


def _describe_exit(exitcode: int | None) -> str:
    """Describe how a process has ended."""
    if exitcode is not None and exitcode < 0:
        return f"its process was ended by {signal.Signals(-exitcode).name}"
    return "its process has ended" if not exitcode else f"its process has ended with exit status {exitcode}"
