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
from l2l_core.workers.line import Line
from l2l_core.workers.network import Traffic, exchange_traffic, gather_traffic, spread_traffic

_DIGEST = 16  # bytes: whether the worker has failed, and a digest of what it is about to do
_NOTE = 8  # bytes of what it tells besides
_HEADER = _DIGEST + _NOTE + 8  # and when it came
_all_gather: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the second before torch 2.12


def meeting_traffic(count: int) -> Traffic:
    """Say what a meeting of so many workers is to one of them."""
    return exchange_traffic([_HEADER] * count, 0)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Says who came when.

    Attributes:
        rank: of this worker.
        came_s: by worker, when it came, in seconds on the clock of `SharedTime`.
        notes: by worker, what it has told besides: 8 bytes.
    """

    rank: int
    came_s: tuple[float, ...]
    notes: tuple[bytes, ...] = ()

    @property
    def began_s(self) -> float:
        """When all were there."""
        return max(self.came_s)

    @property
    def waited_s(self) -> float:
        """How long this worker waited for the last one."""
        return self.began_s - self.came_s[self.rank]

    @property
    def last(self) -> int:
        """The worker that came last."""
        return self.came_s.index(self.began_s)


class Channel:
    """Collectives of one thread at a time.

    Invariant: between two passes all workers have had the same number of collectives, unless one is lost.

    Args:
        line: to the other workers.
        group: a process group for this channel alone, on CPU tensors.
    """

    def __init__(self, line: Line, group: dist.ProcessGroup) -> None:
        self.line, self._group = line, group
        self._ended: WorkerError | None = None

    def open(self) -> None:
        """Begin anew; what has failed is over."""
        self.line.check()
        self._ended = None

    def meet(
        self,
        what: str,
        facts: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        note: bytes = bytes(_NOTE),
    ) -> Meeting:
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
        heads, met = self._all_heads(bytes([0]) + digest[: _DIGEST - 1], note, what, timeout_s)
        if len(set(heads)) > 1:
            self._ended = _explained(self.objects((told, None), "explain"))
            raise self._ended
        return met

    def end(self, cause: str | None) -> None:
        """Tell the others that this worker has failed, unless they know it from this channel already.

        Args:
            cause: of the failure; None if it failed because another one did.
        """
        if self._ended is None and self.line.lost is None:
            self._all_heads(bytes([1]) + bytes(_DIGEST - 1), bytes(_NOTE), "hear of a failure", None)
            self._ended = _explained(self.objects(({}, cause), "explain"))

    def share(self, mine: Any, what: str) -> list[Any]:
        """Meet, and give everybody's `mine`, in the order of ranks; what can be pickled."""
        data = pickle.dumps(mine)
        met = self.meet(what, note=struct.pack("<q", len(data)))
        return self._objects(data, [struct.unpack("<q", note)[0] for note in met.notes], what)

    def objects(self, mine: Any, what: str) -> list[Any]:
        """Give everybody's `mine` where all have just met."""
        data = pickle.dumps(mine)
        return self._objects(data, self.tell(torch.tensor([len(data)]), what).flatten().tolist(), what)

    def _objects(self, data: bytes, sizes: Sequence[int], what: str) -> list[Any]:
        rows = self.tell(torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8), what)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def tell(self, mine: torch.Tensor, what: str, timeout_s: float | None = None) -> torch.Tensor:
        """Give everybody's `mine`, (n,), a row each: (count, n). For a few bytes, which are copied for every worker.

        They go to everybody directly and not round the ring: one message's latency instead of N - 1, half the work for two.
        """
        count = self.line.count
        every, sizes = mine.new_empty(count, mine.numel()), [mine.numel()] * count
        self.exchange(every.flatten(), sizes, mine.repeat(count), sizes, what, timeout_s)
        return every

    def gather(self, every: torch.Tensor, mine: torch.Tensor, what: str, timeout_s: float | None = None) -> None:
        """Put everybody's `mine`, (n,), side by side into `every`, (count * n,); as bytes, whatever they are."""
        self.line.check()
        bytes_of = every.view(torch.uint8), mine.view(torch.uint8)
        with self.line.link.carrying(gather_traffic(mine.nbytes, self.line.count)):
            self.line.wait(_all_gather(*bytes_of, group=self._group, async_op=True), what, timeout_s)

    def spread(self, values: torch.Tensor, source: int, what: str) -> None:
        """Give `values`, (n,), of the worker `source` to all."""
        self.line.check()
        with self.line.link.carrying(spread_traffic(values.nbytes, self.line.count, source, self.line.rank)):
            work = dist.broadcast(values.view(torch.uint8), group=self._group, group_src=source, async_op=True)
            self.line.wait(work, what)

    def exchange(
        self,
        come: torch.Tensor,
        comes: Sequence[int],
        go: torch.Tensor,
        goes: Sequence[int],
        what: str,
        timeout_s: float | None = None,
    ) -> None:
        """Send a range of `go` to every worker, `goes` elements each; theirs come side by side, `comes` elements each."""
        self.line.check()
        bytes_of, size = (come.view(torch.uint8), go.view(torch.uint8)), go.element_size()
        counts = [size * count for count in comes], [size * count for count in goes]
        with self.line.link.carrying(exchange_traffic(counts[1], self.line.rank)):
            work = dist.all_to_all_single(*bytes_of, *counts, group=self._group, async_op=True)
            self.line.wait(work, what, timeout_s)

    def close(self) -> None:
        """Give the group up."""
        dist.destroy_process_group(self._group)

    def _check(self) -> None:
        self.line.check()
        if self._ended is not None:
            raise WorkerError(str(self._ended), self._ended.ranks)  # a new one: it may be raised on several threads

    def _all_heads(self, head: bytes, note: bytes, what: str, timeout_s: float | None) -> tuple[list[bytes], Meeting]:
        assert len(note) == _NOTE, f"a note of {len(note)} bytes"  # whatever is told, all messages are of one size
        mine = bytearray(head + note + struct.pack("<d", self.line.time.now()))
        rows = [row.numpy().tobytes() for row in self.tell(torch.frombuffer(mine, dtype=torch.uint8), what, timeout_s)]
        came_s = tuple(struct.unpack("<d", row[-8:])[0] for row in rows)
        notes = tuple(row[_DIGEST : _DIGEST + _NOTE] for row in rows)
        return [row[:_DIGEST] for row in rows], Meeting(self.line.rank, came_s, notes)


def _explained(said: Sequence[tuple[Mapping[str, str], str | None]]) -> WorkerError:
    """Say why workers that met cannot go on.

    Args:
        said: by each of them: what it is about to do, nothing if it has failed; and the cause of that.
    """
    causes = {rank: cause for rank, (_, cause) in enumerate(said) if cause is not None}
    if causes:
        listed = "; ".join(f"worker {rank}: {cause}" for rank, cause in causes.items())
        return WorkerError(f"not all workers can go on: {listed}", tuple(causes))
    told = {rank: facts for rank, (facts, _) in enumerate(said) if facts}
    if len(told) < len(said):
        stopped = [rank for rank in range(len(said)) if rank not in told]
        return WorkerError(f"worker {', '.join(map(str, stopped))} has stopped after a failure elsewhere", stopped)
    names = dict.fromkeys(name for facts in told.values() for name in facts)
    unlike = [name for name in names if len({facts.get(name) for facts in told.values()}) > 1]
    if "" in unlike:  # where they do different things, the rest differs too
        unlike = [""]
    first = told[0]
    ranks = [rank for rank, facts in told.items() if any(facts.get(name) != first.get(name) for name in unlike)]
    lines = [
        f"{name or 'what comes next'}: "
        + ", ".join(f"worker {rank}: {_short(f.get(name))}" for rank, f in told.items())
        for name in unlike
    ]
    return WorkerError(
        f"workers disagree. {'; '.join(lines)}. All of them must make the same steps, edits and "
        "settings, on batches of the same structure, and models whose micro-batches take the same way through the layers",
        ranks,
    )


def _short(value: str | None, most: int = 300) -> str:
    return "nothing" if value is None else value if len(value) <= most else f"{value[:most]}..."
