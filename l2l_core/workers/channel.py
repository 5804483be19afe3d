"""Ordered collectives between workers on one process group, each preceded by a handshake.

Collectives of one process group are matched by their order alone: workers that issue them in different orders exchange the
wrong bytes or hang. A relay therefore has three channels, each with its own process group and thread: one gathers weights, one
reduces gradients, one synchronises the training threads. The order within a channel follows from the order of visits, never
from which copy finishes first, so channels need not wait for each other.

A handshake before each collective compares the programs: every worker sends a digest of its next operation, a note and its
arrival time, 32 bytes in all. A mismatch or a failure raises on every worker; nothing that may fail runs between a handshake and
its collective. A failed worker calls `announce_failure` on each channel, so afterwards all workers have issued the same number
of collectives and the next step can use the same channels.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from l2l_core.trace import Event, Trace
from l2l_core.workers.health_monitor import HealthMonitor, WorkerError
from l2l_core.workers.network import Traffic, all_gather_traffic, all_to_all_traffic, broadcast_traffic

_DIGEST_BYTES = 16  # one byte for a failure, the others a digest of the next operation
_NOTE_BYTES = 8
_HEADER_BYTES = _DIGEST_BYTES + _NOTE_BYTES + 8  # the last 8: time of arrival
# `all_gather_into_tensor` before torch 2.12
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def handshake_traffic(count: int) -> Traffic:
    """Return the traffic of a handshake between `count` workers."""
    return all_to_all_traffic([_HEADER_BYTES] * count, 0)


@dataclass(frozen=True, slots=True)
class Handshake:
    """Arrival times and notes of a completed handshake."""

    rank: int  # of this worker
    arrived_s: tuple[float, ...]  # by worker, in seconds of `SharedClock`
    notes: tuple[bytes, ...] = ()  # by worker, 8 bytes each

    @property
    def began_s(self) -> float:
        """Arrival time of the last worker."""
        return max(self.arrived_s)

    @property
    def waited_s(self) -> float:
        """Seconds for which this worker waited for the last one."""
        return self.began_s - self.arrived_s[self.rank]

    @property
    def last(self) -> int:
        """Rank of the worker that arrived last."""
        return self.arrived_s.index(self.began_s)


def record_collective(trace: Trace, lane: str, kind: str, layer: str, handshake: Handshake, nbytes: int = 0) -> None:
    """Add the event of a collective that has just finished, with `nbytes` received from other workers, to the trace.

    The wait for the last worker at the handshake before it is recorded as stalled time.
    """
    stop_s, waited_s, last = trace.now(), handshake.waited_s, handshake.last
    start_s = min(handshake.began_s - trace.worker.began_s, stop_s)
    trace.add(Event(lane, kind, start_s, stop_s, layer, nbytes=nbytes, stalled_s=waited_s, last=last))


class Channel:
    """Collectives on CPU tensors, issued by one thread at a time on a process group that only this channel uses.

    Invariant: between two passes all workers have issued the same number of collectives, unless one is lost.
    """

    def __init__(self, monitor: HealthMonitor, group: dist.ProcessGroup) -> None:
        self.monitor, self._group = monitor, group
        self._failure: WorkerError | None = None

    def reset(self) -> None:
        """Clear the failure of an earlier step."""
        self.monitor.check()
        self._failure = None

    def handshake(
        self,
        what: str,
        facts: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        note: bytes = bytes(_NOTE_BYTES),
    ) -> Handshake:
        """Check that all workers are about to run the same operation, the verb phrase `what`, with equal `facts` by name.

        `note` is 8 bytes that may differ between workers and are sent to all of them. The default of `timeout_s` is that of the
        health monitor.

        Raises:
            WorkerError: workers differ, or one has failed; names the workers and the difference.
            WorkerLostError: a worker is lost.
        """
        self.monitor.check()
        if self._failure is not None:
            raise WorkerError(str(self._failure), self._failure.ranks)  # a new one: several threads may raise it
        facts = {"": what, **(facts or {})}
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
        digests, handshake = self._exchange_headers(bytes([0]) + digest[: _DIGEST_BYTES - 1], note, what, timeout_s)
        if len(set(digests)) > 1:
            self._failure = _disagreement(self.all_gather_unchecked((facts, None), "explain"))
            raise self._failure
        return handshake

    def announce_failure(self, cause: str | None) -> None:
        """Report a failure of this worker to the others, unless this channel has already failed.

        `cause` is None if it follows from the failure of another worker.
        """
        if self._failure is None and self.monitor.lost is None:
            self._exchange_headers(bytes([1]) + bytes(_DIGEST_BYTES - 1), bytes(_NOTE_BYTES), "report a failure", None)
            self._failure = _disagreement(self.all_gather_unchecked(({}, cause), "explain"))

    def all_gather_object(self, item: Any, what: str) -> list[Any]:
        """Gather a picklable object from every worker, in the order of ranks, after a handshake."""
        data = pickle.dumps(item)
        notes = self.handshake(what, note=struct.pack("<q", len(data))).notes
        return self._all_gather_pickled(data, [struct.unpack("<q", note)[0] for note in notes], what)

    def all_gather_unchecked(self, item: Any, what: str) -> list[Any]:
        """Gather a picklable object from every worker without a handshake."""
        data = pickle.dumps(item)
        sizes = self.all_gather_small(torch.tensor([len(data)]), what).flatten().tolist()
        return self._all_gather_pickled(data, sizes, what)

    def _all_gather_pickled(self, data: bytes, sizes: Sequence[int], what: str) -> list[Any]:
        padded = bytearray(data.ljust(max(sizes), b"\0"))
        rows = self.all_gather_small(torch.frombuffer(padded, dtype=torch.uint8), what)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_small(self, row: torch.Tensor, what: str, timeout_s: float | None = None) -> torch.Tensor:
        """Gather `row`, (n,), of every worker into (count, n), by direct messages.

        The row is copied once per worker, so this is for a few bytes only.
        """
        count = self.monitor.count
        every, sizes = row.new_empty(count, row.numel()), [row.numel()] * count
        self.all_to_all(every.flatten(), sizes, row.repeat(count), sizes, what, timeout_s)
        return every

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, what: str, timeout_s: float | None = None) -> None:
        """Gather `shard`, (n,), of every worker into `output`, (count * n,), sent as bytes."""
        self.monitor.check()
        with self.monitor.link.throttled(all_gather_traffic(shard.nbytes, self.monitor.count)):
            tensors = output.view(torch.uint8), shard.view(torch.uint8)
            self.monitor.wait(_all_gather(*tensors, group=self._group, async_op=True), what, timeout_s)

    def broadcast(self, values: torch.Tensor, source: int, what: str) -> None:
        """Overwrite `values`, (n,), with those of the worker `source`."""
        self.monitor.check()
        traffic = broadcast_traffic(values.nbytes, self.monitor.count, source, self.monitor.rank)
        with self.monitor.link.throttled(traffic):
            work = dist.broadcast(values.view(torch.uint8), group=self._group, group_src=source, async_op=True)
            self.monitor.wait(work, what)

    def all_to_all(
        self,
        received: torch.Tensor,
        received_sizes: Sequence[int],
        sent: torch.Tensor,
        sent_sizes: Sequence[int],
        what: str,
        timeout_s: float | None = None,
    ) -> None:
        """Send `sent_sizes[r]` elements of `sent` to each worker r; receive `received_sizes[r]` elements from it."""
        self.monitor.check()
        tensors, size = (received.view(torch.uint8), sent.view(torch.uint8)), sent.element_size()
        counts = [size * count for count in received_sizes], [size * count for count in sent_sizes]
        with self.monitor.link.throttled(all_to_all_traffic(counts[1], self.monitor.rank)):
            work = dist.all_to_all_single(*tensors, *counts, group=self._group, async_op=True)
            self.monitor.wait(work, what, timeout_s)

    def close(self) -> None:
        """Destroy the process group and end its threads; a closed channel cannot be used again."""
        dist.destroy_process_group(self._group)
        # Its threads end with the last reference. One that still runs when the interpreter exits may abort the process. Those
        # that wait for a lost worker would be waited for.
        if self.monitor.lost is None:
            del self._group

    def _exchange_headers(
        self, digest: bytes, note: bytes, what: str, timeout_s: float | None
    ) -> tuple[list[bytes], Handshake]:
        assert len(note) == _NOTE_BYTES, f"a note of {len(note)} bytes"  # all messages have one size
        header = bytearray(digest + note + struct.pack("<d", self.monitor.clock.now()))
        headers = self.all_gather_small(torch.frombuffer(header, dtype=torch.uint8), what, timeout_s)
        rows = [row.numpy().tobytes() for row in headers]
        arrived_s = tuple(struct.unpack("<d", row[-8:])[0] for row in rows)
        notes = tuple(row[_DIGEST_BYTES : _DIGEST_BYTES + _NOTE_BYTES] for row in rows)
        return [row[:_DIGEST_BYTES] for row in rows], Handshake(self.monitor.rank, arrived_s, notes)


def _disagreement(reports: Sequence[tuple[Mapping[str, str], str | None]]) -> WorkerError:
    """Return the error for workers that cannot continue together.

    Each reports the facts of its next operation (empty after a failure) and the cause of its failure.
    """
    causes = {rank: cause for rank, (_, cause) in enumerate(reports) if cause is not None}
    if causes:
        listed = "; ".join(f"worker {rank}: {cause}" for rank, cause in causes.items())
        return WorkerError(f"not all workers can go on: {listed}", tuple(causes))
    running = {rank: facts for rank, (facts, _) in enumerate(reports) if facts}
    if len(running) < len(reports):
        stopped = [rank for rank in range(len(reports)) if rank not in running]
        return WorkerError(f"worker {', '.join(map(str, stopped))} has stopped after a failure elsewhere", stopped)
    names = dict.fromkeys(name for facts in running.values() for name in facts)
    unlike = [name for name in names if len({facts.get(name) for facts in running.values()}) > 1]
    if "" in unlike:  # different operations differ in their other facts too
        unlike = [""]
    first = running[0]
    ranks = [rank for rank, facts in running.items() if any(facts.get(name) != first.get(name) for name in unlike)]
    lines = [
        f"{name or 'next operation'}: " + ", ".join(f"worker {r}: {_truncate(f.get(name))}" for r, f in running.items())
        for name in unlike
    ]
    return WorkerError(
        f"workers disagree. {'; '.join(lines)}. All workers must make the same steps and edits with the same settings, on "
        "batches of the same structure, and every micro-batch must call the layers in the same order",
        ranks,
    )


def _truncate(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) <= 300 else f"{value[:300]}..."
