"""Workers on a virtual clock: weight source, reducer and channel of `l2l_core/workers`, in numbers.

One worker per speed replays the step, in a greenlet that switches where it waits for the others. All run the same
collectives in the same order, so the last one never waits.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from greenlet import getcurrent, greenlet

from l2l_core.schedule_rules import weight_itemsize
from l2l_core.simulator.cluster import BlockShards, Cluster
from l2l_core.trace import Event, WorkerInfo
from l2l_core.workers import Traffic, handshake_traffic

T = TypeVar("T")


class VirtualLocalBackend:
    """A single worker with weights and gradients in memory; base class of the other backends."""

    worker: WorkerInfo = WorkerInfo()
    events: Sequence[Event] = ()
    reads_ahead = False  # whether `prefetch` has an effect

    def prefetch(self, t: float, layers: Iterable[str]) -> None:
        """Announce at `t` the layers to be acquired next."""

    def acquire(self, t: float, layer: str) -> float:
        """Request the weights of a layer at `t`; return when they are in host memory."""
        return -math.inf

    def release(self, layer: str) -> None:
        """Release an acquired layer, once it is loaded."""

    def prefetch_update(self, t: float, block: str) -> None:
        """Announce at `t` the next block to be updated."""

    def load_block(self, t: float, block: str) -> float:
        """Request weights and state of a block at `t` for its update; return when they are in host memory."""
        return t

    def store_block(self, t: float, block: str) -> None:
        """Record the update of a block at `t`."""

    def exchange_gradients(self, t: float, block: str) -> float:
        """Exchange the gradients of a block at `t`; return when those of all workers have arrived."""
        return t

    def gather_for_clip(self, t: float) -> float:
        """Gather what the norm of all gradients needs at `t`; return the end."""
        return t

    def end_step(self, t: float) -> float:
        """End the step at `t`; return when all workers have ended it."""
        return t


class VirtualRendezvous:
    """Barriers at which replays wait for one another."""

    def __init__(self) -> None:
        self._arrivals: dict[tuple[str, int], dict[int, float]] = {}
        self._count = 0

    def run(self, replays: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run the replays of these workers; return their results."""
        self._count = len(replays)
        running = {rank: greenlet(replay) for rank, replay in replays.items()}
        results: dict[int, T] = {}
        while running:
            before = sum(map(len, self._arrivals.values())), len(running)
            for rank, replay in list(running.items()):
                result = replay.switch()
                if replay.dead:
                    results[rank] = result
                    del running[rank]
            after = sum(map(len, self._arrivals.values())), len(running)
            assert before != after, f"workers {[*running]} wait forever"
        return results

    def wait_for_all(self, channel: str, number: int, rank: int, t: float) -> dict[int, float]:
        """Enter a barrier of a channel at `t`; return the times at which the workers entered."""
        parent = getcurrent().parent
        assert parent is not None, "a replay runs in a greenlet of `run`"
        arrivals = self._arrivals.setdefault((channel, number), {})
        arrivals[rank] = t
        while len(arrivals) < self._count:
            parent.switch()
        return arrivals


class _SharedLink:
    """A link shared by several channels, in order of readiness, not of issue."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []  # sorted, without overlaps

    def reserve(self, t: float, seconds: float) -> float:
        """Use the link for `seconds` of its free time from `t` on; return the end."""
        first = max(0, bisect_right(self._busy, (t, math.inf)) - 1)
        added: list[tuple[float, float]] = []
        for start_s, stop_s in [*self._busy[first:], (math.inf, math.inf)]:
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
    """Bytes of a step between one worker and the others, without gloo's own."""

    sent: int = 0
    received: int = 0

    def add(self, traffic: Traffic) -> TrafficTotal:
        """Add a collective."""
        return TrafficTotal(self.sent + traffic.sent, self.received + traffic.received)


class VirtualDistributedBackend(VirtualLocalBackend):
    """One of several workers."""

    reads_ahead = True

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        shards: Mapping[str, Sequence[BlockShards]],
        itemsize: int,
        rendezvous: VirtualRendezvous,
        exchanges_per_block: int = 1,  # or one for each micro-batch of a worker
    ) -> None:
        self.worker = WorkerInfo(rank, cluster.count)
        self.events: list[Event] = []
        self._rank, self._shards, self._itemsize, self._rendezvous = rank, shards, itemsize, rendezvous
        self._network, self._wire = cluster.network, weight_itemsize(cluster.wire)
        self._handshake_traffic, self._exchanges_per_block = handshake_traffic(cluster.count), exchanges_per_block
        self._blocks = {share.key: share for each in shards.values() for share in each if any(share.gradient_numels)}
        self._link = _SharedLink()
        self._handshakes = Counter[str]()  # by channel
        self._started_gathers: list[tuple[BlockShards, float]] = []  # in order, with the time of each request
        self._gathered_s: list[float] = []  # ends of the finished ones
        self._pending_gathers: dict[str, int] = {}  # indices of gathers that were not acquired yet, by block
        self._acquired: set[str] = set()
        self._exchanged_blocks: list[str] = []
        self._free_buffers = Counter[int]()
        self.buffers = Counter[int]()  # host buffers for gathered layers, by elements
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
        """Return the end of a gather: one thread runs them one after another."""
        while len(self._gathered_s) <= number:
            share, requested_s = self._started_gathers[len(self._gathered_s)]
            t = max([requested_s, *self._gathered_s[-1:]])
            traffic = share.gather_traffic(self._itemsize, self._rank)
            self._gathered_s.append(self._run_collective("gather", "gather", t, share.key, traffic))
        return self._gathered_s[number]

    def _run_collective(self, channel: str, kind: str, t: float, block: str, transfers: Sequence[Traffic]) -> float:
        """Wait for all workers and run the transfers; return the end."""
        arrivals = self._rendezvous.wait_for_all(channel, self._handshakes[channel], self._rank, t)
        self._handshakes[channel] += 1
        start_s = stop_s = max(arrivals.values())
        for traffic in (self._handshake_traffic, *transfers):
            stop_s = self._link.reserve(stop_s, self._network.busy_s(traffic)) + self._network.delay_s(traffic)
            self.traffic[channel] = self.traffic[channel].add(traffic)
        received = sum(traffic.received for traffic in transfers)
        last = min(rank for rank, arrived_s in arrivals.items() if arrived_s == start_s)
        lane = "gather" if channel == "gather" else "reduce"
        self.events.append(Event(lane, kind, start_s, stop_s, block, nbytes=received, stalled_s=start_s - t, last=last))
        return stop_s
