"""What all channels between workers have in common: who they are, the time, how long one waits, and the news that one is lost.

A worker that dies is noticed at once by those who talk to it, and by nobody else: collectives go round in rings. So whoever
notices it leaves word in the store through which the process group was made, and whoever waits looks there now and then.
torchrun's agent holds that store, or else a worker does, with whom it is gone.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import psutil
import torch.distributed as dist

from l2l_core.workers.errors import WorkerLostError
from l2l_core.workers.network import EmulatedLink, Network
from l2l_core.workers.shared_clock import SharedClock

_POLL_S = 0.5  # how often one who waits looks for word of a lost worker
_ANSWER_TIMEOUT_S = 3.0  # how long the others have to say that they are there


class HealthMonitor:
    """The connection of one worker with the others.

    Invariant: once a worker is lost it stays lost; every wait ends with the same error from then on.

    Args:
        rank, count: of this worker, and how many there are.
        timeout_s: how long to wait for another worker at most, in seconds.
        store: where word is left.
        network: that is emulated.

    Attributes:
        time: the clock of all.
        link: what all channels share of the network.
    """

    def __init__(self, rank: int, count: int, timeout_s: float, store: dist.Store, network: Network) -> None:
        self.rank, self.count, self.timeout_s = rank, count, timeout_s
        self._store, self._name = store, ""
        self._holder: int | None = None
        self.link = EmulatedLink(network)
        self.clock = SharedClock(rank, count)
        self._lost: WorkerLostError | None = None
        self._lock = threading.Lock()

    def configure(self, name: str, holder: int | None) -> None:
        """Hear what all have agreed on.

        Args:
            name: of this connection; keys in the store begin with it.
            holder: number of the worker whose process holds the store, None if none of theirs does.
        """
        self._name, self._holder = name, holder

    def holds_store(self) -> bool:
        """Tell whether this process holds the store: it is it that listens on the store's port."""
        store = self._store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        ports = [
            each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN
        ]
        return isinstance(store, dist.TCPStore) and store.port in ports

    @property
    def lost(self) -> WorkerLostError | None:
        """The error that tells of a lost worker, if there is one."""
        return self._lost

    def check(self) -> None:
        """Raise the error that tells of a lost worker, if there is one."""
        if self._lost is not None:
            raise self._lost

    def wait(self, work: dist.Work, what: str, timeout_s: float | None = None) -> None:
        """Wait for a collective.

        Args:
            work: the collective.
            what: it is for, in words.
            timeout_s: how long at most; default that of the line.

        Raises:
            WorkerLostError: a worker is gone, or did not come in time.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + limit_s
        while True:
            self.check()
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return
            except RuntimeError as error:
                if work.is_completed():  # it has failed, and no time is up
                    raise self.mark_lost(f"{what}: {_first_line(error)}") from error
            if self._reported_loss():
                raise self.mark_lost(f"{what}: {self._reported_loss()}")
            if time.monotonic() > until_s:
                raise self.mark_lost(f"{what}: nothing came for {limit_s:g} s")

    def mark_lost(self, cause: str) -> WorkerLostError:
        """Leave word that a worker is lost, and find out which; the result is to be raised."""
        with self._lock:
            if self._lost is None:
                silent = self._find_unresponsive(cause)
                who = f"worker {', '.join(map(str, silent))}" if silent else "a worker"
                self._lost = WorkerLostError(
                    f"{who} of {self.count} is lost, as worker {self.rank} found while it waited for the others to {cause}. "
                    "Workers that have lost one cannot go on: start them again from the last save, with as many as there are now",
                    silent,
                )
            return self._lost

    def _find_unresponsive(self, cause: str) -> list[int]:
        """Find the workers that do not say within a few seconds that they are there; none where that cannot be found out."""
        others = {rank for rank in range(self.count) if rank != self.rank}
        if len(others) == 1:
            return sorted(others)
        if not self._name:
            return []
        try:
            self._store.set(self._key(self.rank), "here")
            if not self._reported_loss():
                self._store.set(self._key("lost"), f"worker {self.rank} has lost one ({cause})")
            until_s = time.monotonic() + _ANSWER_TIMEOUT_S
            while others and time.monotonic() < until_s:
                others -= {rank for rank in others if self._store.check([self._key(rank)])}
                time.sleep(0.05)
        except (RuntimeError, OSError):  # the store is gone with whoever held it
            if self._holder is None:
                return []
            if self._holder in others:
                return [self._holder]
        return sorted(others)  # a holder that was there has found the same, and ended

    def _reported_loss(self) -> str:
        """Return what others have left in the store; empty if nothing."""
        if not self._name:
            return ""
        try:
            key = self._key("lost")
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except (RuntimeError, OSError) as error:
            return f"the store of the process group is gone ({_first_line(error)})"

    def _key(self, what: object) -> str:
        return f"l2l/{self._name}/{what}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
