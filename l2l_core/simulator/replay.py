"""The schedule of a relay on a virtual clock: nothing is computed, nothing is copied.

It does with numbers what the loop does with tensors: it walks the stays of a profile in order, issues loads ahead, lets
stash leave and arrive around every turn, pushes gradients, and keeps four lanes on which work starts when it was issued and
its lane is free. What other workers have to say, it asks its company. The numbers [1] to [3] are those of `loop.py`. A test
replays recorded steps and insists on the same events.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.rules import MAX_UNDER_WAY, gradient_slots, pieces_of_copy, weight_itemsize, weight_slots
from l2l_core.shelf import READ_AHEAD
from l2l_core.simulator.costs import COPY_LANES, SHELL, CopySpeed, Job, Memory, Moves, Stay, TurnCost
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.virtual_crew import Alone, Company
from l2l_core.simulator.virtual_lane import VirtualLane
from l2l_core.simulator.virtual_stash import InMemory
from l2l_core.trace import Event, MemorySample, Trace

_UNKNOWN = Moves()  # for waiting rooms that need not know


@dataclass(slots=True)
class _Job:
    """Work of the EPS on one gradient."""

    ready_s: float  # when the gradient is there; infinite until its last piece has been sent
    works: list[Job]


class Replay:
    """One run over a profile.

    Args:
        profile: costs.
        config: how the relay runs.
        figures: of the link, as in `Device.figures`.
        company: whoever trains along.
        room: where the stash waits, if not on the device.
    """

    def __init__(
        self,
        profile: Profile,
        config: RelayConfig,
        figures: Mapping[str, Any],
        company: Company = Alone(),  # noqa: B008 - without state
        room: InMemory = InMemory(),  # noqa: B008 - without state
    ) -> None:
        self._company, self._room = company, room
        self._profile, self._config, self._figures = profile, config, figures
        self._layers, self._handover_s = profile.layers, profile.handover_s
        self._overlap, self._moves = config.ahead > 0, config.stash != "device"
        self._itemsize = weight_itemsize(config.precision)
        self._events: list[Event] = []
        self._samples: list[MemorySample] = []
        pieces = pieces_of_copy(profile.micro_batches, config.ahead, config.stash)
        self._h2d, self._d2h = (
            VirtualLane(name, profile.copies.get(name, CopySpeed()), figures, pieces, self._events)
            for name in COPY_LANES
        )
        self._t = 0.0  # how far compute, and with it the host's main thread, has come
        self._stalled_s = 0.0  # of it, spent waiting since the last compute event
        self._eps_s = 0.0  # when the EPS is free
        self._jobs: deque[_Job] = deque()  # that it has not begun, in order
        self._left_s = self._arrives_s = 0.0  # when the stash that moves has left, or is there
        slots = weight_slots(config.ahead, config.resident)
        self._slots = [""] * slots  # the layer in each, "" if there is none
        self._there_s: dict[str, float] = {}  # when the weights of a layer in a slot are there
        self._visits: dict[str, list[int]] = defaultdict(list)  # positions in the stays, by layer
        for index, stay in enumerate(profile.stays):
            self._visits[stay.layer].append(index)
        self._last = {stay.layer: index for index, stay in enumerate(profile.stays) if stay.is_backward}
        self._trained = profile.trained
        self._buffers = gradient_slots(config.ahead, config.schedule, len(self._layers) - 1)
        self._due, self._closing = profile.jobs(config.update)
        self._pushed_s: deque[float] = deque()  # when the gradients that still fill a buffer have left
        self._updated_s: list[float] = []  # when pushed gradients have been used

    def run(self) -> Trace:
        stays = self._profile.stays
        self._remember(self._profile.memory)
        self._wait(self._company.lend(0.0, SHELL))
        self._wait(self._h2d.send(self._t, "load", SHELL, self._layers[SHELL].load_bytes))
        self._company.take_back(SHELL)
        for turn in self._profile.start:
            if turn.batch_bytes:
                self._wait(self._h2d.send(self._t, "batch", "", turn.batch_bytes, turn.k))
            self._work(turn)
            self._park(turn, -1)
        following = ((stay, turn) for stay in stays for turn in stay.turns)
        first = next(following)
        for index, stay in enumerate(stays):
            is_backward = stay.is_backward  # once: it looks through all events of the stay
            self._load(index)  # [1]
            if is_backward:
                self._take_buffer(stay.layer)
            if self._overlap and index == 0:
                self._fetch(*first)  # nobody came before it to expect it
            for at, turn in enumerate(stay.turns):
                self._relay(index, at, next(following, None))
                self._work(turn, index)  # [2]
                self._park(turn, stay.visit)
            if self._last.get(stay.layer) == index:
                self._push(stay.layer)  # [3]
            if is_backward:
                self._complete(index)
        self._push(SHELL)
        self._finish()
        return Trace.of(
            [*self._events, *self._company.events],
            self._samples,
            worker=self._company.worker,
            device="simulated",
            names=self._profile.names,
            settings={**asdict(self._config), **self._figures},
        )

    def _wait(self, until_s: float) -> None:
        """Let compute wait for a copy."""
        until_s += self._handover_s
        if until_s > self._t:
            self._stalled_s += until_s - self._t
            self._t = until_s

    def _load(self, index: int) -> None:
        """Have the weights of a stay in a slot, and those of the next ones on their way."""
        coming = [stay.layer for stay in self._profile.stays[index : index + self._config.ahead + 2]]
        self._company.expect(self._t, [layer for layer in coming if layer not in self._slots])
        window = dict.fromkeys(coming[: self._config.ahead + 1])
        for layer in window:
            if layer not in self._slots:
                free = [slot for slot, other in enumerate(self._slots) if other not in window]
                # Of equals the first one, as `Prefetch` takes it: events hold the slot's number, and a test compares them.
                slot = max(free, key=lambda slot: self._next_use(self._slots[slot], index))
                self._slots[slot], self._there_s[layer] = layer, math.inf
                self._wait(self._company.lend(self._t, layer))
                nbytes, arrived = self._layers[layer].load_bytes, partial(self._there_s.__setitem__, layer)
                self._h2d.trickle(self._t, "load", layer, nbytes, self._itemsize, arrived, slot)
        layer = self._profile.stays[index].layer
        # It trickles still: whoever waits for a layer sends the rest of it, as in the loop.
        if self._there_s[layer] == math.inf:
            self._h2d.flush(self._t)
        self._wait(self._there_s[layer])
        self._company.take_back(layer)

    def _next_use(self, layer: str, index: int) -> float:
        if not layer:  # empty, and before one whose layer does not come again, as in `Prefetch`
            return math.inf
        visits = self._visits[layer]
        at = bisect_left(visits, index)
        return visits[at] if at < len(visits) else len(self._profile.stays)

    def _relay(self, index: int, at: int, following: tuple[Stay, TurnCost] | None) -> None:
        """The stash of a turn is there, and that of the following one begins to arrive."""
        if not self._moves:
            return
        stay = self._profile.stays[index]
        if self._overlap:
            self._wait(self._arrives_s)
            if following is not None:
                self._fetch(*following)
            self._h2d.turn(self._t)
            self._wait(self._room.expect(self._t, stay, at, self._profile.stays[index + 1 : index + 2 + READ_AHEAD]))
        else:
            self._fetch(stay, stay.turns[at])
            self._wait(self._arrives_s)

    def _fetch(self, stay: Stay, turn: TurnCost) -> None:
        if turn.fetch_bytes:
            wanted = (turn.moves or _UNKNOWN).fetched
            self._wait(self._room.sources(self._t, stay.layer, turn.k, stay.visit, wanted))
            self._arrives_s = self._h2d.send(self._t, "fetch", stay.layer, turn.fetch_bytes, turn.k, stay.visit)
            self._room.lent(self._arrives_s, turn.k, wanted)

    def _work(self, turn: TurnCost, stay: int = -1) -> None:
        """The compute events of a turn in the stay with this number."""
        add, k = self._events.append, turn.k
        demanded = deque((turn.moves or _UNKNOWN).demanded)
        for number, (kind, layer, visit, seconds, overhead_s, demand_bytes, parts, memory) in enumerate(turn.ops):
            while demanded and demanded[0][0] == number:
                wanted = demanded.popleft()[1]
                self._wait(self._room.sources(self._t, SHELL, k, -1, wanted))
                self._room.lent(self._t, k, wanted)
            if demand_bytes:
                self._wait(self._h2d.send(self._t, "fetch", SHELL, demand_bytes, k))
            start_s = self._t + overhead_s
            self._t = stop_s = start_s + seconds
            add(Event("compute", kind, start_s, stop_s, layer, k, 0, visit, self._stalled_s, stay))
            self._stalled_s = 0.0
            for part in parts:
                pushed_s = self._d2h.send(stop_s, "push", part.layer, part.nbytes, k, part.visit)
                self._jobs.append(_Job(pushed_s, [Job("reduce", part.block, k, part.reduce_s, part.block_bytes)]))
                self._run_eps()
            if memory:
                self._remember(memory)

    def _park(self, turn: TurnCost, visit: int) -> None:
        """The stash of a turn begins to leave, when that of the turn before has left."""
        if not self._moves:
            return
        moves = turn.moves or _UNKNOWN
        self._wait(self._left_s)
        self._wait(self._room.targets(turn.k, moves))
        if turn.stash_bytes:
            self._left_s = self._d2h.send(self._t, "stash", "", turn.stash_bytes, turn.k, visit)
            self._room.left(self._left_s, turn.k, visit, moves)
        if not self._overlap:
            self._wait(self._left_s)
        self._d2h.turn(self._t)  # behind the stash, as in `Stash.park`

    def _take_buffer(self, layer: str) -> None:
        """Wait until a gradient buffer is free; frozen layers need none."""
        while layer in self._trained and len(self._pushed_s) >= self._buffers:
            self._wait(self._pushed_s.popleft())

    def _push(self, layer: str) -> None:
        """Let a gradient leave; the EPS goes on with it."""
        cost = self._layers[layer]
        if not cost.push_bytes:
            return
        # First: only when the last piece of the push before is sent is it known when that gradient has been used.
        self._d2h.flush(self._t)
        if self._config.update == "eager" and len(self._updated_s) >= MAX_UNDER_WAY:
            self._wait(self._updated_s[-MAX_UNDER_WAY])

        # Deferred updates wait for all gradients: the profile has them in `closing`.
        works = [("reduce", cost.reduce_s), ("update", cost.update_s)][: 1 + (self._config.update == "eager")]
        job = _Job(math.inf, [Job(kind, layer, -1, seconds, cost.block_bytes) for kind, seconds in works])

        def then(pushed_s: float) -> None:
            self._pushed_s.append(pushed_s)
            job.ready_s = pushed_s
            self._run_eps()

        self._jobs.append(job)
        if self._config.update == "eager":
            self._company.expect_update(self._t, layer)
        # 4: a gradient is float32 in either precision.
        self._d2h.trickle(self._t, "push", layer, cost.push_bytes, 4, then)

    def _complete(self, index: int) -> None:
        """Let the EPS put together what came by micro-batch, if no later stay brings more of it."""
        if not (works := self._due.get(index)):
            return
        self._expect_updates(works)
        self._jobs.append(_Job(self._t, works))
        self._run_eps()
        if len(self._updated_s) > MAX_UNDER_WAY:
            self._wait(self._updated_s[-MAX_UNDER_WAY - 1])

    def _expect_updates(self, works: Sequence[Job]) -> None:
        for job in works:
            if job.kind == "update":
                self._company.expect_update(self._t, job.layer)

    def _run_eps(self) -> None:
        """Let the EPS do, in order, what can be begun."""
        # The first one alone is asked: the EPS is one thread, so a gradient that still trickles holds up those behind it.
        while self._jobs and self._jobs[0].ready_s < math.inf:
            job = self._jobs.popleft()
            self._eps_s = max(self._eps_s, job.ready_s)
            for kind, layer, k, seconds, nbytes in job.works:
                if kind == "clip":
                    self._eps_s = self._company.clip(self._eps_s)
                if kind == "update":
                    self._eps_s = self._company.come(self._eps_s, layer)
                start_s, self._eps_s = self._eps_s, self._eps_s + seconds
                self._events.append(Event("eps", kind, start_s, self._eps_s, layer, k, nbytes))
                if kind == "reduce" and k < 0:  # that of a micro-batch is added to the others of this worker
                    self._eps_s = self._company.exchange(self._eps_s, layer)
                if kind == "update":
                    self._updated_s.append(self._eps_s)
                    self._company.go(self._eps_s, layer)
        if not self._overlap:
            self._wait(self._eps_s)

    def _finish(self) -> None:
        """What the EPS does when all gradients have come."""
        self._d2h.flush(self._t)
        updates = [job for job in self._closing if job.kind == "update"]
        self._jobs.append(_Job(self._t, [job for job in self._closing if job.kind != "update"]))
        self._run_eps()
        self._t = max(self._t, self._eps_s)  # until then nobody knows what will be updated
        self._expect_updates(updates)
        self._jobs.append(_Job(self._t, updates))
        self._run_eps()
        self._company.end(max(self._t, self._eps_s))

    def _remember(self, memory: Memory) -> None:
        for place, nbytes in memory:
            self._samples.append(MemorySample(self._t, place, nbytes))
