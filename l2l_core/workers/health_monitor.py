"""Shared state of the channels between workers: ranks, clock, time limits, errors, and the report that a worker is lost.

Collectives run in rings, so only the neighbours of a dead worker notice its death. The first to notice writes it to the store
through which the process group was made; waiting workers poll that store. Either torchrun's agent holds the store, or one of the
workers, with which the store dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from l2l_core.workers.network import EmulatedLink, Network

_POLL_S = 0.5  # interval at which a waiting worker polls the store
_ANSWER_TIMEOUT_S = 3.0  # time for the others to show that they are alive


class WorkerError(RuntimeError):
    """Raised on every worker when one has failed, or when workers are about to run different operations.

    Attributes:
        ranks: ranks of the workers that failed, or that differ from the first one.

    Example:
        See `Workers`.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorkerLostError(WorkerError):
    """Raised when a worker has died or exceeded the time limit. Start all workers again from a save.

    Example:
        See `Workers`.
    """


def cause_of(error: BaseException) -> str | None:
    """Return the cause of a worker's failure, or None if it follows from the failure of another worker."""
    return None if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"


class SharedClock:
    """The clock of worker 0, estimated on every worker from the exchange of readings.

    A message arrives no earlier than it was sent, so two exchanged readings bound the difference of two clocks from both sides.
    An estimate starts at 0, which is exact for processes of one machine, and moves only as far as the bounds demand. It
    therefore never leaves the true value once it has reached it, and follows clocks that drift.

    Invariant: `offsets_s` are the same on all workers.
    """

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self.offsets_s = rank, [0.0] * count  # by worker, seconds to add to its local clock

    def now(self) -> float:
        """Return the time in seconds."""
        return self.from_local(time.perf_counter())

    def from_local(self, local_s: float) -> float:
        """Convert a reading of this process's `time.perf_counter`."""
        return local_s + self.offsets_s[self._rank]

    def synchronize(self, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Update the offsets, just after a handshake; `all_gather` returns one row per worker."""
        readings = all_gather(torch.tensor([time.perf_counter()], dtype=torch.float64)).flatten()
        # [i, j]: the clock of i is ahead of that of j by at most this.
        most = all_gather(time.perf_counter() - readings)
        for rank in range(1, len(self.offsets_s)):
            least_s, most_s = -float(most[rank, 0]), float(most[0, rank])
            self.offsets_s[rank] = min(max(self.offsets_s[rank], least_s), most_s)


class HealthMonitor:
    """Waits for collectives, and detects lost workers.

    Invariant: a lost worker stays lost; every later wait raises the same error.
    """

    def __init__(self, rank: int, count: int, timeout_s: float, store: dist.Store, network: Network) -> None:
        self.rank, self.count, self.timeout_s = rank, count, timeout_s
        self._store = store  # a loss is reported through it
        # Set once all workers have agreed: prefix of the keys in the store, rank of the worker whose process holds it.
        self.name = ""
        self.holder: int | None = None
        self.link, self.clock = EmulatedLink(network), SharedClock(rank, count)
        self.lost: WorkerLostError | None = None
        self._lock = threading.Lock()

    def holds_store(self) -> bool:
        """Return whether this process holds the store, that is, listens on its port."""
        store = self._store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        sockets = psutil.Process().net_connections("tcp")
        ports = [socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN]
        return isinstance(store, dist.TCPStore) and store.port in ports

    def check(self) -> None:
        """Raise if a worker is lost."""
        if self.lost is not None:
            raise self.lost

    def wait(self, work: dist.Work | None, what: str, timeout_s: float | None = None) -> None:
        """Wait for a collective with the purpose `what`; raise WorkerLostError if a worker does not respond."""
        assert work is not None, "a process that is not in the group"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + limit_s
        while True:
            self.check()
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return
            except RuntimeError as error:
                if work.is_completed():  # failed, rather than timed out
                    raise self.mark_lost(f"{what}: {_first_line(error)}") from error
            if reported := self._reported_loss():
                raise self.mark_lost(f"{what}: {reported}")
            if time.monotonic() > until_s:
                raise self.mark_lost(f"{what}: no response for {limit_s:g} s")

    def mark_lost(self, cause: str) -> WorkerLostError:
        """Report that a worker is lost, find out which one, and return the error to raise."""
        with self._lock:
            if self.lost is None:
                silent = self._find_unresponsive(cause)
                who = f"worker {', '.join(map(str, silent))}" if silent else "a worker"
                self.lost = WorkerLostError(
                    f"{who} of {self.count} is lost, as worker {self.rank} found while it waited for the others to {cause}. "
                    "The other workers cannot continue: start again from the last save; the number of workers may differ",
                    silent,
                )
            return self.lost

    def _find_unresponsive(self, cause: str) -> list[int]:
        """Return the workers that do not answer within `_ANSWER_TIMEOUT_S`; empty if that cannot be determined."""
        others = {rank for rank in range(self.count) if rank != self.rank}
        if len(others) == 1:
            return sorted(others)
        if not self.name:
            return []
        try:
            self._store.set(self._key(self.rank), "here")
            if not self._reported_loss():
                self._store.set(self._key("lost"), f"worker {self.rank} has lost one ({cause})")
            until_s = time.monotonic() + _ANSWER_TIMEOUT_S
            while others and time.monotonic() < until_s:
                others -= {rank for rank in others if self._store.check([self._key(rank)])}
                time.sleep(0.05)
        except (RuntimeError, OSError):  # the process that held the store has ended
            if self.holder is None:
                return []
            if self.holder in others:
                return [self.holder]
        return sorted(others)  # with a holder among the survivors: it has found the same, and ended

    def _reported_loss(self) -> str:
        """Return the loss that another worker has reported, or ""."""
        if not self.name:
            return ""
        try:
            key = self._key("lost")
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except (RuntimeError, OSError) as error:
            return f"the store of the process group is unreachable ({_first_line(error)})"

    def _key(self, suffix: object) -> str:
        return f"l2l/{self.name}/{suffix}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
