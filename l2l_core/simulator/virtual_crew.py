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

from l2l_core.rules import weight_itemsize
from l2l_core.simulator.fleet import Fleet, Share
from l2l_core.trace import Event, Worker
from l2l_core.workers import Traffic, meeting_traffic

T = TypeVar("T")


class Company(Protocol):
    """Is whoever trains along in a replay.

    Attributes:
        worker: that replays.
        events: of what it does together with others.
    """

    worker: Worker
    events: Sequence[Event]

    def expect(self, t: float, layers: Iterable[str]) -> None:
        """Hear at `t` which layers will be lent next."""

    def lend(self, t: float, layer: str) -> float:
        """Say when the weights of a layer, asked for at `t`, are in this host's memory."""

    def take_back(self, layer: str) -> None:
        """Hear that a layer that was lent has been loaded."""

    def expect_update(self, t: float, block: str) -> None:
        """Hear at `t` which block will be updated next."""

    def come(self, t: float, block: str) -> float:
        """Say when weights and state of a block, asked for at `t` for its update, are in this host's memory."""

    def go(self, t: float, block: str) -> None:
        """Hear that a block was updated at `t`."""

    def exchange(self, t: float, block: str) -> float:
        """Say when the gradients of a block, given at `t`, have come from everybody."""

    def clip(self, t: float) -> float:
        """Say when the norm of all gradients can be found, if that begins at `t`."""

    def end(self, t: float) -> float:
        """Say when all have ended the step, if this one does at `t`."""


class Alone:
    """Is the company of one worker, whose weights and gradients are there."""

    worker: Worker = Worker()
    events: Sequence[Event] = ()

    def expect(self, t: float, layers: Iterable[str]) -> None:
        pass

    def lend(self, t: float, layer: str) -> float:
        return -math.inf

    def take_back(self, layer: str) -> None:
        pass

    def expect_update(self, t: float, block: str) -> None:
        pass

    def come(self, t: float, block: str) -> float:
        return t

    def go(self, t: float, block: str) -> None:
        pass

    def exchange(self, t: float, block: str) -> float:
        return t

    def clip(self, t: float) -> float:
        return t

    def end(self, t: float) -> float:
        return t


class Meetings:
    """Where replays wait for one another."""

    def __init__(self) -> None:
        self._came: dict[tuple[str, int], dict[int, float]] = {}
        self._count = 0

    def run(self, replays: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run the replays of these workers; gives what they return."""
        self._count = len(replays)
        running = {rank: greenlet(replay) for rank, replay in replays.items()}
        results: dict[int, T] = {}
        while running:
            before = sum(map(len, self._came.values())), len(running)
            for rank, one in list(running.items()):
                result = one.switch()
                if one.dead:
                    results[rank] = result
                    del running[rank]
            assert before != (sum(map(len, self._came.values())), len(running)), f"workers {[*running]} wait for ever"
        return results

    def meet(self, channel: str, number: int, rank: int, t: float) -> dict[int, float]:
        """Come to a meeting of a channel at `t`; gives when everybody came."""
        came = self._came.setdefault((channel, number), {})
        came[rank] = t
        while len(came) < self._count:
            getcurrent().parent.switch()
        return came


class _Link:
    """A link that several channels share. What is ready first goes first, in whatever order it is told."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []  # from when to when, in order, without overlaps

    def take(self, t: float, seconds: float) -> float:
        """Fill the link for so many seconds from `t` on, whenever nothing else does; gives the end."""
        at = max(0, bisect_right(self._taken, (t, math.inf)) - 1)
        added = []
        for start_s, stop_s in [*self._taken[at:], (math.inf, math.inf)]:
            if seconds <= 0:
                break
            if t < start_s:
                used = min(seconds, start_s - t)
                added.append((t, t + used))
                seconds, t = seconds - used, t + used
            if seconds > 0:
                t = max(t, stop_s)
        for interval in added:
            insort(self._taken, interval)
        return t


class Sent(NamedTuple):
    """Bytes of a step between one worker and the others, gloo's own not counted."""

    sent: int = 0
    received: int = 0

    def plus(self, traffic: Traffic) -> Sent:
        """Add a collective."""
        return Sent(self.sent + traffic.sent, self.received + traffic.received)


class Along(Alone):
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
        fleet: Fleet,
        rank: int,
        shares: Mapping[str, Sequence[Share]],
        itemsize: int,
        meetings: Meetings,
        rounds: int = 1,
    ) -> None:
        self.worker, self.events = Worker(rank, fleet.count), list[Event]()
        self._rank, self._shares, self._itemsize, self._meetings = rank, shares, itemsize, meetings
        self._network, self._wire = fleet.network, weight_itemsize(fleet.wire)
        self._head, self._rounds = meeting_traffic(fleet.count), rounds
        self._blocks = {share.key: share for each in shares.values() for share in each if any(share.gradient)}
        self._link = _Link()
        self._met = Counter[str]()  # by channel
        self._asked: list[tuple[Share, float]] = []  # gathers in order, and when each was begun
        self._there_s: list[float] = []  # when they were over, of those that are
        self._coming: dict[str, int] = {}  # numbers of gathers that nobody has been lent, by block
        self._lent: set[str] = set()  # layers
        self._exchanged: list[str] = []  # blocks
        self._free = Counter[int]()
        self.buffers = Counter[int]()
        self.sent = {"gather": Sent(), "reduce": Sent(), "control": Sent()}

    def expect(self, t: float, layers: Iterable[str]) -> None:
        for share in (share for layer in layers for share in self._shares[layer]):
            if share.key not in self._coming:
                self._begin(t, share)

    def lend(self, t: float, layer: str) -> float:
        self._lent.add(layer)
        for share in self._shares[layer]:
            if share.key not in self._coming:
                self._begin(t, share)
            t = max(t, self._gathered(self._coming.pop(share.key)))
        return t

    def take_back(self, layer: str) -> None:
        if layer in self._lent:
            self._lent.remove(layer)
            self._free.update(share.cut.numel for share in self._shares[layer])

    def exchange(self, t: float, block: str) -> float:
        share = self._blocks[block]
        self._exchanged.append(block)
        exchanges = [share.exchange(self._wire, self._rank)] * self._rounds
        return self._collective("reduce", "exchange", t, block, exchanges)

    def clip(self, t: float) -> float:
        for share in [self._blocks[block] for block in self._exchanged]:
            t = self._collective("reduce", "clip", t, share.key, share.clipping(self._rank))
        return t

    def end(self, t: float) -> float:
        return self._collective("control", "end", t, "", [])

    def _begin(self, t: float, share: Share) -> None:
        self._coming[share.key] = len(self._asked)
        self._asked.append((share, t))
        numel = share.cut.numel
        self.buffers[numel] += not self._free[numel]
        self._free[numel] -= bool(self._free[numel])

    def _gathered(self, number: int) -> float:
        """Say when a gather is over: one thread makes them, one after another."""
        while len(self._there_s) <= number:
            share, asked_s = self._asked[len(self._there_s)]
            t = max([asked_s, *self._there_s[-1:]])
            there_s = self._collective("gather", "gather", t, share.key, share.gathering(self._itemsize, self._rank))
            self._there_s.append(there_s)
        return self._there_s[number]

    def _collective(self, channel: str, kind: str, t: float, block: str, parts: Sequence[Traffic]) -> float:
        """Meet, and move what there is to move; gives when that is over."""
        came = self._meetings.meet(channel, self._met[channel], self._rank, t)
        self._met[channel] += 1
        met_s = max(came.values())
        stop_s = met_s
        for traffic in (self._head, *parts):
            stop_s = self._link.take(stop_s, self._network.busy_s(traffic)) + self._network.delay_s(traffic)
            self.sent[channel] = self.sent[channel].plus(traffic)
        received = sum(traffic.received for traffic in parts)
        last = min(rank for rank, came_s in came.items() if came_s == met_s)
        lane = "gather" if channel == "gather" else "reduce"
        self.events.append(Event(lane, kind, met_s, stop_s, block, nbytes=received, stalled_s=met_s - t, last=last))
        return stop_s
