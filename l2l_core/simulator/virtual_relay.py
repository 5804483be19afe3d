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
from l2l_core.schedule_rules import (
    MAX_PENDING_GRADIENTS,
    chunks_per_copy,
    gradient_slots,
    weight_itemsize,
    weight_slots,
)
from l2l_core.shelf import READ_AHEAD
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.step_costs import (
    COPY_LANES,
    SHELL,
    CopySpeed,
    EPSJob,
    MemorySamples,
    StashMoves,
    StayCost,
    TurnCost,
)
from l2l_core.simulator.virtual_lane import VirtualLane
from l2l_core.simulator.virtual_stash import VirtualStashStore
from l2l_core.simulator.virtual_workers import VirtualBackend, VirtualLocalBackend
from l2l_core.trace import Event, MemorySample, Trace

_NO_MOVES = StashMoves()  # for waiting rooms that need not know


@dataclass(slots=True)
class _QueuedJob:
    """Work of the EPS on one gradient."""

    ready_s: float  # when the gradient is there; infinite until its last piece has been sent
    jobs: list[EPSJob]


class VirtualRelay:
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
        backend: VirtualBackend = VirtualLocalBackend(),  # noqa: B008 - without state
        stash_store: VirtualStashStore = VirtualStashStore(),  # noqa: B008 - without state
    ) -> None:
        self._backend, self._stash_store = backend, stash_store
        self._profile, self._config, self._figures = profile, config, figures
        self._layers, self._handover_s = profile.layers, profile.handover_s
        self._overlap, self._offloads = config.ahead > 0, config.stash != "device"
        self._itemsize = weight_itemsize(config.precision)
        self._events: list[Event] = []
        self._samples: list[MemorySample] = []
        pieces = chunks_per_copy(profile.micro_batches, config.ahead, config.stash)
        self._h2d, self._d2h = (
            VirtualLane(name, profile.copies.get(name, CopySpeed()), figures, pieces, self._events)
            for name in COPY_LANES
        )
        self._now_s = 0.0  # how far compute, and with it the host's main thread, has come
        self._stalled_s = 0.0  # of it, spent waiting since the last compute event
        self._eps_s = 0.0  # when the EPS is free
        self._jobs: deque[_QueuedJob] = deque()  # that it has not begun, in order
        self._offloaded_s = self._fetched_s = 0.0  # when the stash that moves has left, or is there
        slots = weight_slots(config.ahead, config.resident)
        self._slots = [""] * slots  # the layer in each, "" if there is none
        self._loaded_s: dict[str, float] = {}  # when the weights of a layer in a slot are there
        self._visits: dict[str, list[int]] = defaultdict(list)  # positions in the stays, by layer
        for index, stay in enumerate(profile.stays):
            self._visits[stay.layer].append(index)
        self._last_backward = {stay.layer: index for index, stay in enumerate(profile.stays) if stay.is_backward}
        self._trained_layers = profile.trained
        self._num_buffers = gradient_slots(config.ahead, config.schedule, len(self._layers) - 1)
        self._jobs_by_stay, self._closing = profile.jobs(config.update)
        self._pushed_s: deque[float] = deque()  # when the gradients that still fill a buffer have left
        self._updated_s: list[float] = []  # when pushed gradients have been used

    def run(self) -> Trace:
        stays = self._profile.stays
        self._record_memory(self._profile.memory)
        self._wait_until(self._backend.acquire(0.0, SHELL))
        self._wait_until(self._h2d.send(self._now_s, "load", SHELL, self._layers[SHELL].load_bytes))
        self._backend.release(SHELL)
        for turn in self._profile.start:
            if turn.batch_bytes:
                self._wait_until(self._h2d.send(self._now_s, "batch", "", turn.batch_bytes, turn.k))
            self._compute_turn(turn)
            self._offload(turn, -1)
        following = ((stay, turn) for stay in stays for turn in stay.turns)
        first = next(following)
        for index, stay in enumerate(stays):
            is_backward = stay.is_backward  # once: it looks through all events of the stay
            self._load(index)  # [1]
            if is_backward:
                self._acquire_buffer(stay.layer)
            if self._overlap and index == 0:
                self._start_fetch(*first)  # nobody came before it to expect it
            for at, turn in enumerate(stay.turns):
                self._fetch_stash(index, at, next(following, None))
                self._compute_turn(turn, index)  # [2]
                self._offload(turn, stay.visit)
            if self._last_backward.get(stay.layer) == index:
                self._push(stay.layer)  # [3]
            if is_backward:
                self._finish_blocks(index)
        self._push(SHELL)
        self._finish()
        return Trace.of(
            [*self._events, *self._backend.events],
            self._samples,
            worker=self._backend.worker,
            device="simulated",
            names=self._profile.names,
            settings={**asdict(self._config), **self._figures},
        )

    def _wait_until(self, until_s: float) -> None:
        """Let compute wait for a copy."""
        until_s += self._handover_s
        if until_s > self._now_s:
            self._stalled_s += until_s - self._now_s
            self._now_s = until_s

    def _load(self, index: int) -> None:
        """Have the weights of a stay in a slot, and those of the next ones on their way."""
        coming = [stay.layer for stay in self._profile.stays[index : index + self._config.ahead + 2]]
        self._backend.prefetch(self._now_s, [layer for layer in coming if layer not in self._slots])
        window = dict.fromkeys(coming[: self._config.ahead + 1])
        for layer in window:
            if layer not in self._slots:
                free = [slot for slot, other in enumerate(self._slots) if other not in window]
                # Of equals the first one, as `Prefetch` takes it: events hold the slot's number, and a test compares them.
                slot = max(free, key=lambda slot: self._next_use(self._slots[slot], index))
                self._slots[slot], self._loaded_s[layer] = layer, math.inf
                self._wait_until(self._backend.acquire(self._now_s, layer))
                nbytes, arrived = self._layers[layer].load_bytes, partial(self._loaded_s.__setitem__, layer)
                self._h2d.send_chunked(self._now_s, "load", layer, nbytes, self._itemsize, arrived, slot)
        layer = self._profile.stays[index].layer
        # It trickles still: whoever waits for a layer sends the rest of it, as in the loop.
        if self._loaded_s[layer] == math.inf:
            self._h2d.flush(self._now_s)
        self._wait_until(self._loaded_s[layer])
        self._backend.release(layer)

    def _next_use(self, layer: str, index: int) -> float:
        if not layer:  # empty, and before one whose layer does not come again, as in `Prefetch`
            return math.inf
        visits = self._visits[layer]
        at = bisect_left(visits, index)
        return visits[at] if at < len(visits) else len(self._profile.stays)

    def _fetch_stash(self, index: int, at: int, following: tuple[StayCost, TurnCost] | None) -> None:
        """The stash of a turn is there, and that of the following one begins to arrive."""
        if not self._offloads:
            return
        stay = self._profile.stays[index]
        if self._overlap:
            self._wait_until(self._fetched_s)
            if following is not None:
                self._start_fetch(*following)
            self._h2d.send_chunk(self._now_s)
            self._wait_until(
                self._stash_store.prefetch(
                    self._now_s, stay, at, self._profile.stays[index + 1 : index + 2 + READ_AHEAD]
                )
            )
        else:
            self._start_fetch(stay, stay.turns[at])
            self._wait_until(self._fetched_s)

    def _start_fetch(self, stay: StayCost, turn: TurnCost) -> None:
        if turn.fetch_bytes:
            wanted = (turn.moves or _NO_MOVES).fetched
            self._wait_until(self._stash_store.sources(self._now_s, stay.layer, turn.k, stay.visit, wanted))
            self._fetched_s = self._h2d.send(self._now_s, "fetch", stay.layer, turn.fetch_bytes, turn.k, stay.visit)
            self._stash_store.read_started(self._fetched_s, turn.k, wanted)

    def _compute_turn(self, turn: TurnCost, stay: int = -1) -> None:
        """The compute events of a turn in the stay with this number."""
        add, k = self._events.append, turn.k
        demanded = deque((turn.moves or _NO_MOVES).demanded)
        for number, (kind, layer, visit, seconds, overhead_s, demand_bytes, parts, memory) in enumerate(turn.ops):
            while demanded and demanded[0][0] == number:
                wanted = demanded.popleft()[1]
                self._wait_until(self._stash_store.sources(self._now_s, SHELL, k, -1, wanted))
                self._stash_store.read_started(self._now_s, k, wanted)
            if demand_bytes:
                self._wait_until(self._h2d.send(self._now_s, "fetch", SHELL, demand_bytes, k))
            start_s = self._now_s + overhead_s
            self._now_s = stop_s = start_s + seconds
            add(Event("compute", kind, start_s, stop_s, layer, k, 0, visit, self._stalled_s, stay))
            self._stalled_s = 0.0
            for part in parts:
                pushed_s = self._d2h.send(stop_s, "push", part.layer, part.nbytes, k, part.visit)
                self._jobs.append(
                    _QueuedJob(pushed_s, [EPSJob("reduce", part.block, k, part.reduce_s, part.block_bytes)])
                )
                self._run_eps()
            if memory:
                self._record_memory(memory)

    def _offload(self, turn: TurnCost, visit: int) -> None:
        """The stash of a turn begins to leave, when that of the turn before has left."""
        if not self._offloads:
            return
        moves = turn.moves or _NO_MOVES
        self._wait_until(self._offloaded_s)
        self._wait_until(self._stash_store.targets(turn.k, moves))
        if turn.stash_bytes:
            self._offloaded_s = self._d2h.send(self._now_s, "stash", "", turn.stash_bytes, turn.k, visit)
            self._stash_store.write_started(self._offloaded_s, turn.k, visit, moves)
        if not self._overlap:
            self._wait_until(self._offloaded_s)
        self._d2h.send_chunk(self._now_s)  # behind the stash, as in `Stash.park`

    def _acquire_buffer(self, layer: str) -> None:
        """Wait until a gradient buffer is free; frozen layers need none."""
        while layer in self._trained_layers and len(self._pushed_s) >= self._num_buffers:
            self._wait_until(self._pushed_s.popleft())

    def _push(self, layer: str) -> None:
        """Let a gradient leave; the EPS goes on with it."""
        cost = self._layers[layer]
        if not cost.push_bytes:
            return
        # First: only when the last piece of the push before is sent is it known when that gradient has been used.
        self._d2h.flush(self._now_s)
        if self._config.update == "eager" and len(self._updated_s) >= MAX_PENDING_GRADIENTS:
            self._wait_until(self._updated_s[-MAX_PENDING_GRADIENTS])

        # Deferred updates wait for all gradients: the profile has them in `closing`.
        works = [("reduce", cost.reduce_s), ("update", cost.update_s)][: 1 + (self._config.update == "eager")]
        job = _QueuedJob(math.inf, [EPSJob(kind, layer, -1, seconds, cost.block_bytes) for kind, seconds in works])

        def then(pushed_s: float) -> None:
            self._pushed_s.append(pushed_s)
            job.ready_s = pushed_s
            self._run_eps()

        self._jobs.append(job)
        if self._config.update == "eager":
            self._backend.prefetch_update(self._now_s, layer)
        # 4: a gradient is float32 in either precision.
        self._d2h.send_chunked(self._now_s, "push", layer, cost.push_bytes, 4, then)

    def _finish_blocks(self, index: int) -> None:
        """Let the EPS put together what came by micro-batch, if no later stay brings more of it."""
        if not (works := self._jobs_by_stay.get(index)):
            return
        self._prefetch_updates(works)
        self._jobs.append(_QueuedJob(self._now_s, works))
        self._run_eps()
        if len(self._updated_s) > MAX_PENDING_GRADIENTS:
            self._wait_until(self._updated_s[-MAX_PENDING_GRADIENTS - 1])

    def _prefetch_updates(self, jobs: Sequence[EPSJob]) -> None:
        for job in jobs:
            if job.kind == "update":
                self._backend.prefetch_update(self._now_s, job.layer)

    def _run_eps(self) -> None:
        """Let the EPS do, in order, what can be begun."""
        # The first one alone is asked: the EPS is one thread, so a gradient that still trickles holds up those behind it.
        while self._jobs and self._jobs[0].ready_s < math.inf:
            job = self._jobs.popleft()
            self._eps_s = max(self._eps_s, job.ready_s)
            for kind, layer, k, seconds, nbytes in job.jobs:
                if kind == "clip":
                    self._eps_s = self._backend.gather_for_clip(self._eps_s)
                if kind == "update":
                    self._eps_s = self._backend.load_block(self._eps_s, layer)
                start_s, self._eps_s = self._eps_s, self._eps_s + seconds
                self._events.append(Event("eps", kind, start_s, self._eps_s, layer, k, nbytes))
                if kind == "reduce" and k < 0:  # that of a micro-batch is added to the others of this worker
                    self._eps_s = self._backend.exchange_gradients(self._eps_s, layer)
                if kind == "update":
                    self._updated_s.append(self._eps_s)
                    self._backend.store_block(self._eps_s, layer)
        if not self._overlap:
            self._wait_until(self._eps_s)

    def _finish(self) -> None:
        """What the EPS does when all gradients have come."""
        self._d2h.flush(self._now_s)
        updates = [job for job in self._closing if job.kind == "update"]
        self._jobs.append(_QueuedJob(self._now_s, [job for job in self._closing if job.kind != "update"]))
        self._run_eps()
        self._now_s = max(self._now_s, self._eps_s)  # until then nobody knows what will be updated
        self._prefetch_updates(updates)
        self._jobs.append(_QueuedJob(self._now_s, updates))
        self._run_eps()
        self._backend.end_step(max(self._now_s, self._eps_s))

    def _record_memory(self, memory: MemorySamples) -> None:
        for place, nbytes in memory:
            self._samples.append(MemorySample(self._now_s, place, nbytes))
