"""Workers on a virtual clock: `place.py`, `reducer.py` and `channel.py` of `l2l_core/workers`, in numbers.

Every kind of worker replays the step by itself, and stops where it needs what others have not brought yet; so the replays run as
greenlets, in turn. All make the same collectives in the same order: whoever is furthest behind waits for nobody.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from greenlet import getcurrent, greenlet

from l2l_core.schedule_rules import weight_itemsize
from l2l_core.simulator.cluster import BlockShards, Cluster
from l2l_core.trace import Event, WorkerInfo
from l2l_core.workers import Traffic, handshake_traffic

T = TypeVar("T")


class VirtualBackend(Protocol):
    """Is whoever trains along in a replay.

    Attributes:
        worker: that replays.
        events: of what it does together with others.
    """

    worker: WorkerInfo
    events: Sequence[Event]

    def prefetch(self, t: float, layers: Iterable[str]) -> None:
        """Hear at `t` which layers will be lent next."""

    def acquire(self, t: float, layer: str) -> float:
        """Say when the weights of a layer, asked for at `t`, are in this host's memory."""

    def release(self, layer: str) -> None:
        """Hear that a layer that was lent has been loaded."""

    def prefetch_update(self, t: float, block: str) -> None:
        """Hear at `t` which block will be updated next."""

    def load_block(self, t: float, block: str) -> float:
        """Say when weights and state of a block, asked for at `t` for its update, are in this host's memory."""

    def store_block(self, t: float, block: str) -> None:
        """Hear that a block was updated at `t`."""

    def exchange_gradients(self, t: float, block: str) -> float:
        """Say when the gradients of a block, given at `t`, have come from everybody."""

    def gather_for_clip(self, t: float) -> float:
        """Say when the norm of all gradients can be found, if that begins at `t`."""

    def end_step(self, t: float) -> float:
        """Say when all have ended the step, if this one does at `t`."""


class VirtualLocalBackend:
    """Is the company of one worker, whose weights and gradients are there."""

    worker: WorkerInfo = WorkerInfo()
    events: Sequence[Event] = ()

    def prefetch(self, t: float, layers: Iterable[str]) -> None:
        pass

    def acquire(self, t: float, layer: str) -> float:
        return -math.inf

    def release(self, layer: str) -> None:
        pass

    def prefetch_update(self, t: float, block: str) -> None:
        pass

    def load_block(self, t: float, block: str) -> float:
        return t

    def store_block(self, t: float, block: str) -> None:
        pass

    def exchange_gradients(self, t: float, block: str) -> float:
        return t

    def gather_for_clip(self, t: float) -> float:
        return t

    def end_step(self, t: float) -> float:
        return t


class VirtualRendezvous:
    """Where replays wait for one another."""

    def __init__(self) -> None:
        self._arrivals: dict[tuple[str, int], dict[int, float]] = {}
        self._count = 0

    def run(self, replays: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run the replays of these workers; gives what they return."""
        self._count = len(replays)
        running = {rank: greenlet(replay) for rank, replay in replays.items()}
        results: dict[int, T] = {}
        while running:
            before = sum(map(len, self._arrivals.values())), len(running)
            for rank, one in list(running.items()):
                result = one.switch()
                if one.dead:
                    results[rank] = result
                    del running[rank]
            assert before != (sum(map(len, self._arrivals.values())), len(running)), (
                f"workers {[*running]} wait for ever"
            )
        return results

    def wait_for_all(self, channel: str, number: int, rank: int, t: float) -> dict[int, float]:
        """Come to a meeting of a channel at `t`; gives when everybody came."""
        came = self._arrivals.setdefault((channel, number), {})
        came[rank] = t
        while len(came) < self._count:
            getcurrent().parent.switch()
        return came


class _SharedLink:
    """A link that several channels share. What is ready first goes first, in whatever order it is told."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []  # from when to when, in order, without overlaps

    def reserve(self, t: float, seconds: float) -> float:
        """Fill the link for so many seconds from `t` on, whenever nothing else does; gives the end."""
        at = max(0, bisect_right(self._busy, (t, math.inf)) - 1)
        added = []
        for start_s, stop_s in [*self._busy[at:], (math.inf, math.inf)]:
            if seconds <= 0:
                break
            if t < start_s:
                used = min(seconds, start_s - t)
                added.append((t, t + used))
                seconds, t = seconds - used, t + used
            if seconds > 0:
                t = max(t, stop_s)
        for interval in added:
            insort(self._busy, interval)
        return t


class TrafficTotal(NamedTuple):
    """Bytes of a step between one worker and the others, gloo's own not counted."""

    sent: int = 0
    received: int = 0

    def add(self, traffic: Traffic) -> TrafficTotal:
        """Add a collective."""
        return TrafficTotal(self.sent + traffic.sent, self.received + traffic.received)


class VirtualDistributedBackend(VirtualLocalBackend):
    """Is the company of one of several workers.

    Args:
        fleet: the workers.
        rank: of the one that this is of.
        shares: what is held of each layer.
        itemsize: bytes of a weight on its way.
        meetings: with the others.
        rounds: exchanges of a block's gradients: one, or one for each micro-batch of a worker.

    Attributes:
        sent: by channel, what has moved so far; meetings included.
        buffers: how many there are of so many elements, into which layers are gathered.
    """

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        shards: Mapping[str, Sequence[BlockShards]],
        itemsize: int,
        rendezvous: VirtualRendezvous,
        exchanges_per_block: int = 1,
    ) -> None:
        self.worker, self.events = WorkerInfo(rank, cluster.count), list[Event]()
        self._rank, self._shards, self._itemsize, self._rendezvous = rank, shards, itemsize, rendezvous
        self._network, self._wire = cluster.network, weight_itemsize(cluster.wire)
        self._handshake_traffic, self._exchanges_per_block = handshake_traffic(cluster.count), exchanges_per_block
        self._blocks = {share.key: share for each in shards.values() for share in each if any(share.gradient_numels)}
        self._link = _SharedLink()
        self._handshakes = Counter[str]()  # by channel
        self._started_gathers: list[tuple[BlockShards, float]] = []  # gathers in order, and when each was begun
        self._gathered_s: list[float] = []  # when they were over, of those that are
        self._pending_gathers: dict[str, int] = {}  # numbers of gathers that nobody has been lent, by block
        self._acquired: set[str] = set()  # layers
        self._exchanged_blocks: list[str] = []  # blocks
        self._free_buffers = Counter[int]()
        self.buffers = Counter[int]()
        self.traffic = {"gather": TrafficTotal(), "reduce": TrafficTotal(), "control": TrafficTotal()}

    def prefetch(self, t: float, layers: Iterable[str]) -> None:
        for share in (share for layer in layers for share in self._shards[layer]):
            if share.key not in self._pending_gathers:
                self._start_gather(t, share)

    def acquire(self, t: float, layer: str) -> float:
        self._acquired.add(layer)
        for share in self._shards[layer]:
            if share.key not in self._pending_gathers:
                self._start_gather(t, share)
            t = max(t, self._finish_gather(self._pending_gathers.pop(share.key)))
        return t

    def release(self, layer: str) -> None:
        if layer in self._acquired:
            self._acquired.remove(layer)
            self._free_buffers.update(share.layout.numel for share in self._shards[layer])

    def exchange_gradients(self, t: float, block: str) -> float:
        share = self._blocks[block]
        self._exchanged_blocks.append(block)
        exchanges = [share.exchange_traffic(self._wire, self._rank)] * self._exchanges_per_block
        return self._run_collective("reduce", "exchange", t, block, exchanges)

    def gather_for_clip(self, t: float) -> float:
        for share in [self._blocks[block] for block in self._exchanged_blocks]:
            t = self._run_collective("reduce", "clip", t, share.key, share.clip_traffic(self._rank))
        return t

    def end_step(self, t: float) -> float:
        return self._run_collective("control", "end", t, "", [])

    def _start_gather(self, t: float, shards: BlockShards) -> None:
        self._pending_gathers[shards.key] = len(self._started_gathers)
        self._started_gathers.append((shards, t))
        numel = shards.layout.numel
        self.buffers[numel] += not self._free_buffers[numel]
        self._free_buffers[numel] -= bool(self._free_buffers[numel])

    def _finish_gather(self, number: int) -> float:
        """Say when a gather is over: one thread makes them, one after another."""
        while len(self._gathered_s) <= number:
            share, asked_s = self._started_gathers[len(self._gathered_s)]
            t = max([asked_s, *self._gathered_s[-1:]])
            there_s = self._run_collective(
                "gather", "gather", t, share.key, share.gather_traffic(self._itemsize, self._rank)
            )
            self._gathered_s.append(there_s)
        return self._gathered_s[number]

    def _run_collective(self, channel: str, kind: str, t: float, block: str, transfers: Sequence[Traffic]) -> float:
        """Meet, and move what there is to move; gives when that is over."""
        came = self._rendezvous.wait_for_all(channel, self._handshakes[channel], self._rank, t)
        self._handshakes[channel] += 1
        met_s = max(came.values())
        stop_s = met_s
        for traffic in (self._handshake_traffic, *transfers):
            stop_s = self._link.reserve(stop_s, self._network.busy_s(traffic)) + self._network.delay_s(traffic)
            self.traffic[channel] = self.traffic[channel].add(traffic)
        received = sum(traffic.received for traffic in transfers)
        last = min(rank for rank, came_s in came.items() if came_s == met_s)
        lane = "gather" if channel == "gather" else "reduce"
        self.events.append(Event(lane, kind, met_s, stop_s, block, nbytes=received, stalled_s=met_s - t, last=last))
        return stop_s
