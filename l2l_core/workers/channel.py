"""A channel: collectives that come in one order on every worker, because one thread of each makes them.

Collectives of one process group are matched by their order alone: two workers that make them in different orders exchange
the wrong bytes, or wait for ever. Copies and updates run on threads here, so a relay has three channels, each with a process
group and a thread of its own: weights are gathered on one, gradients reduced on another, and on the third the threads that
train agree. What a channel is given to do follows from the program alone (the order of visits), never from which copy
is done first; so channels need not know of one another, and none can hold another one up for good: the worker that is
furthest behind waits only for what the others have already begun.

Whether the programs are the same is not taken for granted. Before every collective workers *meet*: they tell one another
what comes next, a note, and when they came, in 32 bytes. Whoever finds that another does something else, or has failed, raises;
between a meeting and what was agreed there nothing is done that may fail. A worker that has failed *ends* each channel: it goes
to the next meeting to say so, where the others come too sooner or later. After that all have had the same number of
collectives, so a failed step leaves channels with which the next one can begin.
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

from l2l_core.workers.errors import WorkerError
from l2l_core.workers.health_monitor import HealthMonitor
from l2l_core.workers.network import Traffic, all_gather_traffic, all_to_all_traffic, broadcast_traffic

_DIGEST_BYTES = 16  # bytes: whether the worker has failed, and a digest of what it is about to do
_NOTE_BYTES = 8  # bytes of what it tells besides
_HEADER_BYTES = _DIGEST_BYTES + _NOTE_BYTES + 8  # and when it came
_all_gather: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the second before torch 2.12


def handshake_traffic(count: int) -> Traffic:
    """Say what a meeting of so many workers is to one of them."""
    return all_to_all_traffic([_HEADER_BYTES] * count, 0)


@dataclass(frozen=True, slots=True)
class Handshake:
    """Says who came when.

    Attributes:
        rank: of this worker.
        came_s: by worker, when it came, in seconds on the clock of `SharedTime`.
        notes: by worker, what it has told besides: 8 bytes.
    """

    rank: int
    arrived_s: tuple[float, ...]
    notes: tuple[bytes, ...] = ()

    @property
    def began_s(self) -> float:
        """When all were there."""
        return max(self.arrived_s)

    @property
    def waited_s(self) -> float:
        """How long this worker waited for the last one."""
        return self.began_s - self.arrived_s[self.rank]

    @property
    def last(self) -> int:
        """The worker that came last."""
        return self.arrived_s.index(self.began_s)


class Channel:
    """Collectives of one thread at a time.

    Invariant: between two passes all workers have had the same number of collectives, unless one is lost.

    Args:
        line: to the other workers.
        group: a process group for this channel alone, on CPU tensors.
    """

    def __init__(self, monitor: HealthMonitor, group: dist.ProcessGroup) -> None:
        self.monitor, self._group = monitor, group
        self._failure: WorkerError | None = None

    def reset(self) -> None:
        """Begin anew; what has failed is over."""
        self.monitor.check()
        self._failure = None

    def handshake(
        self,
        what: str,
        facts: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        note: bytes = bytes(_NOTE_BYTES),
    ) -> Handshake:
        """Make sure that all workers are about to do the same.

        Args:
            what: to do, in words that follow "is about to".
            facts: what must be the same besides, by name.
            timeout_s: how long to wait at most; default that of the line.
            note: what all are told besides, and may differ; 8 bytes, which cost no message of their own.

        Raises:
            WorkerError: they are not, or one has failed; names it and what differs.
            WorkerLostError: one is gone.
        """
        self._check()
        told = {"": what, **(facts or {})}
        digest = hashlib.sha256(repr(sorted(told.items())).encode()).digest()
        heads, met = self._exchange_headers(bytes([0]) + digest[: _DIGEST_BYTES - 1], note, what, timeout_s)
        if len(set(heads)) > 1:
            self._failure = _disagreement(self.all_gather_unchecked((told, None), "explain"))
            raise self._failure
        return met

    def announce_failure(self, cause: str | None) -> None:
        """Tell the others that this worker has failed, unless they know it from this channel already.

        Args:
            cause: of the failure; None if it failed because another one did.
        """
        if self._failure is None and self.monitor.lost is None:
            self._exchange_headers(bytes([1]) + bytes(_DIGEST_BYTES - 1), bytes(_NOTE_BYTES), "hear of a failure", None)
            self._failure = _disagreement(self.all_gather_unchecked(({}, cause), "explain"))

    def all_gather_object(self, item: Any, what: str) -> list[Any]:
        """Meet, and give everybody's `mine`, in the order of ranks; what can be pickled."""
        data = pickle.dumps(item)
        met = self.handshake(what, note=struct.pack("<q", len(data)))
        return self._all_gather_pickled(data, [struct.unpack("<q", note)[0] for note in met.notes], what)

    def all_gather_unchecked(self, item: Any, what: str) -> list[Any]:
        """Give everybody's `mine` where all have just met."""
        data = pickle.dumps(item)
        return self._all_gather_pickled(
            data, self.all_gather_small(torch.tensor([len(data)]), what).flatten().tolist(), what
        )

    def _all_gather_pickled(self, data: bytes, sizes: Sequence[int], what: str) -> list[Any]:
        rows = self.all_gather_small(
            torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8), what
        )
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_small(self, row: torch.Tensor, what: str, timeout_s: float | None = None) -> torch.Tensor:
        """Give everybody's `mine`, (n,), a row each: (count, n). For a few bytes, which are copied for every worker.

        They go to everybody directly and not round the ring: one message's latency instead of N - 1, half the work for two.
        """
        count = self.monitor.count
        every, sizes = row.new_empty(count, row.numel()), [row.numel()] * count
        self.all_to_all(every.flatten(), sizes, row.repeat(count), sizes, what, timeout_s)
        return every

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, what: str, timeout_s: float | None = None) -> None:
        """Put everybody's `mine`, (n,), side by side into `every`, (count * n,); as bytes, whatever they are."""
        self.monitor.check()
        bytes_of = output.view(torch.uint8), shard.view(torch.uint8)
        with self.monitor.link.throttled(all_gather_traffic(shard.nbytes, self.monitor.count)):
            self.monitor.wait(_all_gather(*bytes_of, group=self._group, async_op=True), what, timeout_s)

    def broadcast(self, values: torch.Tensor, source: int, what: str) -> None:
        """Give `values`, (n,), of the worker `source` to all."""
        self.monitor.check()
        with self.monitor.link.throttled(
            broadcast_traffic(values.nbytes, self.monitor.count, source, self.monitor.rank)
        ):
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
        """Send a range of `go` to every worker, `goes` elements each; theirs come side by side, `comes` elements each."""
        self.monitor.check()
        bytes_of, size = (received.view(torch.uint8), sent.view(torch.uint8)), sent.element_size()
        counts = [size * count for count in received_sizes], [size * count for count in sent_sizes]
        with self.monitor.link.throttled(all_to_all_traffic(counts[1], self.monitor.rank)):
            work = dist.all_to_all_single(*bytes_of, *counts, group=self._group, async_op=True)
            self.monitor.wait(work, what, timeout_s)

    def close(self) -> None:
        """Give the group up."""
        dist.destroy_process_group(self._group)

    def _check(self) -> None:
        self.monitor.check()
        if self._failure is not None:
            raise WorkerError(str(self._failure), self._failure.ranks)  # a new one: it may be raised on several threads

    def _exchange_headers(
        self, digest: bytes, note: bytes, what: str, timeout_s: float | None
    ) -> tuple[list[bytes], Handshake]:
        assert len(note) == _NOTE_BYTES, (
            f"a note of {len(note)} bytes"
        )  # whatever is told, all messages are of one size
        mine = bytearray(digest + note + struct.pack("<d", self.monitor.clock.now()))
        rows = [
            row.numpy().tobytes()
            for row in self.all_gather_small(torch.frombuffer(mine, dtype=torch.uint8), what, timeout_s)
        ]
        came_s = tuple(struct.unpack("<d", row[-8:])[0] for row in rows)
        notes = tuple(row[_DIGEST_BYTES : _DIGEST_BYTES + _NOTE_BYTES] for row in rows)
        return [row[:_DIGEST_BYTES] for row in rows], Handshake(self.monitor.rank, came_s, notes)


def _disagreement(reports: Sequence[tuple[Mapping[str, str], str | None]]) -> WorkerError:
    """Say why workers that met cannot go on.

    Args:
        said: by each of them: what it is about to do, nothing if it has failed; and the cause of that.
    """
    causes = {rank: cause for rank, (_, cause) in enumerate(reports) if cause is not None}
    if causes:
        listed = "; ".join(f"worker {rank}: {cause}" for rank, cause in causes.items())
        return WorkerError(f"not all workers can go on: {listed}", tuple(causes))
    told = {rank: facts for rank, (facts, _) in enumerate(reports) if facts}
    if len(told) < len(reports):
        stopped = [rank for rank in range(len(reports)) if rank not in told]
        return WorkerError(f"worker {', '.join(map(str, stopped))} has stopped after a failure elsewhere", stopped)
    names = dict.fromkeys(name for facts in told.values() for name in facts)
    unlike = [name for name in names if len({facts.get(name) for facts in told.values()}) > 1]
    if "" in unlike:  # where they do different things, the rest differs too
        unlike = [""]
    first = told[0]
    ranks = [rank for rank, facts in told.items() if any(facts.get(name) != first.get(name) for name in unlike)]
    lines = [
        f"{name or 'what comes next'}: "
        + ", ".join(f"worker {rank}: {_truncate(f.get(name))}" for rank, f in told.items())
        for name in unlike
    ]
    return WorkerError(
        f"workers disagree. {'; '.join(lines)}. All of them must make the same steps, edits and "
        "settings, on batches of the same structure, and models whose micro-batches take the same way through the layers",
        ranks,
    )


def _truncate(value: str | None, most: int = 300) -> str:
    return "nothing" if value is None else value if len(value) <= most else f"{value[:most]}..."
