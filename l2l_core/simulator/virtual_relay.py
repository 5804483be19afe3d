"""The schedule of a relay on a virtual clock, without computing or copying anything.

Repeats the training loop with numbers instead of tensors: it runs through the stays of a profile, issues loads ahead,
offloads and fetches the stash around every turn, and pushes gradients, on four serial lanes. A backend simulates other
workers or a shelf. The numbers [1] to [3] are those of `loop.py`. A test replays recorded steps and compares the events.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.plan import SlotChoice
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
from l2l_core.simulator.virtual_workers import VirtualLocalBackend
from l2l_core.trace import Event, MemorySample, Trace

_NO_MOVES = StashMoves()  # for stash stores that do not use it


@dataclass(slots=True)
class _QueuedJob:
    """Work of the EPS on one gradient."""

    ready_s: float  # end of the gradient's push; infinite until its last piece is issued
    jobs: list[EPSJob]


class VirtualRelay:
    """One replay of a profile."""

    def __init__(
        self,
        profile: Profile,
        config: RelayConfig,
        figures: Mapping[str, Any],
        backend: VirtualLocalBackend,
        stash_store: VirtualStashStore,
    ) -> None:
        self._backend, self._stash_store = backend, stash_store
        self._profile, self._config, self._figures = profile, config, figures
        self._layers, self._handover_s = profile.layers, profile.handover_s
        self._overlap, self._offloads = config.ahead > 0, config.stash != "device"
        self._itemsize = weight_itemsize(config.precision)
        self._events: list[Event] = []
        self._samples: list[MemorySample] = []
        chunks = chunks_per_copy(profile.micro_batches, config.ahead, config.stash)
        self._h2d, self._d2h = (
            VirtualLane(name, profile.copies.get(name, CopySpeed()), figures, chunks, self._events)
            for name in COPY_LANES
        )
        self._now_s = 0.0  # clock of compute and the host's main thread
        self._stalled_s = 0.0  # wait since the last compute event
        self._eps_s = 0.0  # time at which the EPS is free
        self._jobs: deque[_QueuedJob] = deque()  # not started, in order
        self._offloaded_s = self._fetched_s = 0.0  # end of the last offload and fetch
        slots, visits = weight_slots(config.ahead, config.resident), [stay.layer for stay in profile.stays]
        self._slot_choice = SlotChoice(config.ahead, slots, visits, announces=True)
        self._loaded_s: dict[str, float] = {}  # end of the load of each layer in a slot
        self._last_backward = {stay.layer: index for index, stay in enumerate(profile.stays) if stay.is_backward}
        self._trained_layers = profile.trained
        self._num_buffers = gradient_slots(config.ahead, config.schedule, len(self._layers) - 1)
        self._jobs_by_stay, self._closing = profile.jobs(config.update)
        self._pushed_s: deque[float] = deque()  # ends of the pushes of gradients that occupy a buffer
        self._updated_s: list[float] = []  # ends of updates

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
            is_backward = stay.is_backward  # a search through all events of the stay
            self._load(index)  # [1]
            if is_backward:
                self._acquire_buffer(stay.layer)
            if self._overlap and index == 0:
                self._start_fetch(*first)
            for position, turn in enumerate(stay.turns):
                self._fetch_stash(index, position, next(following, None))
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
        """Delay compute until a copy is done."""
        until_s += self._handover_s
        if until_s > self._now_s:
            self._stalled_s += until_s - self._now_s
            self._now_s = until_s

    def _load(self, index: int) -> None:
        """Wait for the weights of a stay, and issue loads for the next ones."""
        for kind, layer, *_, slot, _, layers, _ in self._slot_choice.begin_visit(self._profile.stays[index].layer):
            if kind == "A":
                self._backend.prefetch(self._now_s, layers)
            else:
                self._loaded_s[layer] = math.inf
                self._wait_until(self._backend.acquire(self._now_s, layer))
                nbytes, on_done = self._layers[layer].load_bytes, partial(self._loaded_s.__setitem__, layer)
                self._h2d.send_chunked(self._now_s, "load", layer, nbytes, self._itemsize, on_done, slot)
        self._slot_choice.end_visit()
        layer = self._profile.stays[index].layer
        if self._loaded_s[layer] == math.inf:  # pieces remain; they are sent at once, as in the loop
            self._h2d.flush(self._now_s)
        self._wait_until(self._loaded_s[layer])
        self._backend.release(layer)

    def _fetch_stash(self, index: int, position: int, following: tuple[StayCost, TurnCost] | None) -> None:
        """Wait for the stash of a turn, and start to fetch that of the following one."""
        if not self._offloads:
            return
        stay = self._profile.stays[index]
        if self._overlap:
            self._wait_until(self._fetched_s)
            if following is not None:
                self._start_fetch(*following)
            self._h2d.send_chunk(self._now_s)
            next_stays = self._profile.stays[index + 1 : index + 2 + READ_AHEAD]
            self._wait_until(self._stash_store.prefetch(self._now_s, stay, position, next_stays))
        else:
            self._start_fetch(stay, stay.turns[position])
            self._wait_until(self._fetched_s)

    def _start_fetch(self, stay: StayCost, turn: TurnCost) -> None:
        if turn.fetch_bytes:
            storages = (turn.moves or _NO_MOVES).fetched
            self._wait_until(self._stash_store.sources(self._now_s, stay.layer, turn.k, stay.visit, storages))
            self._fetched_s = self._h2d.send(self._now_s, "fetch", stay.layer, turn.fetch_bytes, turn.k, stay.visit)
            self._stash_store.read_started(self._fetched_s, turn.k, storages)

    def _compute_turn(self, turn: TurnCost, stay: int = -1) -> None:
        """Add the compute events of a turn in the stay of this index."""
        add, k = self._events.append, turn.k
        demanded = deque((turn.moves or _NO_MOVES).demanded)
        for number, (kind, layer, visit, seconds, overhead_s, demand_bytes, parts, memory) in enumerate(turn.ops):
            while demanded and demanded[0][0] == number:
                storages = demanded.popleft()[1]
                self._wait_until(self._stash_store.sources(self._now_s, SHELL, k, -1, storages))
                self._stash_store.read_started(self._now_s, k, storages)
            if demand_bytes:
                self._wait_until(self._h2d.send(self._now_s, "fetch", SHELL, demand_bytes, k))
            start_s = self._now_s + overhead_s
            self._now_s = stop_s = start_s + seconds
            add(Event("compute", kind, start_s, stop_s, layer, k, 0, visit, self._stalled_s, stay))
            self._stalled_s = 0.0
            for part in parts:
                pushed_s = self._d2h.send(stop_s, "push", part.layer, part.nbytes, k, part.visit)
                job = EPSJob("reduce", part.block, k, part.reduce_s, part.block_bytes)
                self._jobs.append(_QueuedJob(pushed_s, [job]))
                self._run_eps()
            if memory:
                self._record_memory(memory)

    def _offload(self, turn: TurnCost, visit: int) -> None:
        """Start to offload the stash of a turn, after that of the turn before."""
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
        self._d2h.send_chunk(self._now_s)  # after the stash, as in `Stash`

    def _acquire_buffer(self, layer: str) -> None:
        """Wait until a gradient buffer is free; frozen layers need none."""
        while layer in self._trained_layers and len(self._pushed_s) >= self._num_buffers:
            self._wait_until(self._pushed_s.popleft())

    def _push(self, layer: str) -> None:
        """Push a gradient and queue its EPS work."""
        cost = self._layers[layer]
        if not cost.push_bytes:
            return
        # First, since the end of an update is unknown until the last piece of its push is issued.
        self._d2h.flush(self._now_s)
        if self._config.update == "eager" and len(self._updated_s) >= MAX_PENDING_GRADIENTS:
            self._wait_until(self._updated_s[-MAX_PENDING_GRADIENTS])

        # Deferred updates are in the profile's `closing`.
        steps = [("reduce", cost.reduce_s), ("update", cost.update_s)][: 1 + (self._config.update == "eager")]
        job = _QueuedJob(math.inf, [EPSJob(kind, layer, -1, seconds, cost.block_bytes) for kind, seconds in steps])

        def on_pushed(pushed_s: float) -> None:
            self._pushed_s.append(pushed_s)
            job.ready_s = pushed_s
            self._run_eps()

        self._jobs.append(job)
        if self._config.update == "eager":
            self._backend.prefetch_update(self._now_s, layer)
        # 4: gradients are float32 in every precision.
        self._d2h.send_chunked(self._now_s, "push", layer, cost.push_bytes, 4, on_pushed)

    def _finish_blocks(self, index: int) -> None:
        """Queue EPS work on gradients that were pushed by micro-batch, once no later stay adds to them."""
        if not (jobs := self._jobs_by_stay.get(index)):
            return
        self._prefetch_updates(jobs)
        self._jobs.append(_QueuedJob(self._now_s, jobs))
        self._run_eps()
        if len(self._updated_s) > MAX_PENDING_GRADIENTS:
            self._wait_until(self._updated_s[-MAX_PENDING_GRADIENTS - 1])

    def _prefetch_updates(self, jobs: Sequence[EPSJob]) -> None:
        for job in jobs:
            if job.kind == "update":
                self._backend.prefetch_update(self._now_s, job.layer)

    def _run_eps(self) -> None:
        """Run queued EPS work, in order, as far as its gradients are issued."""
        # Only the first: the EPS is one thread, so a gradient with remaining pieces blocks those after it.
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
                if kind == "reduce" and k < 0:  # else it is added to those of this worker
                    self._eps_s = self._backend.exchange_gradients(self._eps_s, layer)
                if kind == "update":
                    self._updated_s.append(self._eps_s)
                    self._backend.store_block(self._eps_s, layer)
        if not self._overlap:
            self._wait_until(self._eps_s)

    def _finish(self) -> None:
        """Run the EPS work that waits for all gradients."""
        self._d2h.flush(self._now_s)
        updates = [job for job in self._closing if job.kind == "update"]
        self._jobs.append(_QueuedJob(self._now_s, [job for job in self._closing if job.kind != "update"]))
        self._run_eps()
        self._now_s = max(self._now_s, self._eps_s)  # the loop announces updates only then
        self._prefetch_updates(updates)
        self._jobs.append(_QueuedJob(self._now_s, updates))
        self._run_eps()
        self._backend.end_step(max(self._now_s, self._eps_s))

    def _record_memory(self, memory: MemorySamples) -> None:
        for place, nbytes in memory:
            self._samples.append(MemorySample(self._now_s, place, nbytes))
