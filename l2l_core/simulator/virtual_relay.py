"""Execution of a step's actions on a virtual clock, without computing or copying anything.

The mirror of `l2l_core/step/loop.py`: one method for each kind of action, with numbers instead of tensors, on four serial lanes.
A backend simulates other workers or a shelf. The numbers [1] to [4] are those of `loop.py`. Tests compare the events with those
of recorded steps.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS, chunks_per_copy, gradient_slots, weight_itemsize
from l2l_core.simulator.action_costs import CostedAction, CostPlace
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.step_costs import (
    BEFORE_FIRST_STAY,
    COPY_LANES,
    SHELL,
    CopySpeed,
    EPSJob,
    MemorySamples,
    StashMoves,
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


# By name: bound methods would refer to their relay in a circle.
_METHODS = {
    "A": "_announce_loads",
    "L": "_load",
    "V": "_begin_visit",
    "I": "_start_forward",
    "W": "_wait_for_stash",
    "G": "_prefetch_stash",
    "H": "_announce_turns",
    "F": "_compute",
    "X": "_compute",
    "B": "_backward",
    "S": "_offload",
    "P": "_push",
    "U": "_finish",
}


class VirtualRelay:
    """One run of a step's actions with the costs of a profile."""

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
        self._layers, self._handover_s, self._turns = profile.layers, profile.handover_s, profile.turns
        self._overlap = config.ahead > 0
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
        self._stay = BEFORE_FIRST_STAY  # index of the present visit
        self._offloaded_s = 0.0  # end of the last offload
        self._fetched_s: dict[int, float] = {}  # end of the fetch for each turn
        self._prefetches = defaultdict[int, int](int)  # fetches that ran ahead, by turn
        self._turn = TurnCost(-1, ())  # whose stash was waited for last
        self._loaded_s: dict[str, float] = {}  # end of the load of each layer in a slot
        self._has_buffer = False  # whether the present visit has a gradient buffer
        self._trained_layers = profile.trained
        self._num_buffers = gradient_slots(config.ahead, config.schedule, len(self._layers) - 1)
        self._layer_jobs, self._closing = profile.jobs(config.update)
        self._pushed_s: deque[float] = deque()  # ends of the pushes of gradients that occupy a buffer
        self._updated_s: list[float] = []  # ends of updates

    def run(self, actions: Sequence[CostedAction]) -> Trace:
        """Run the actions in order, each with its costs."""
        self._record_memory(self._profile.memory)
        self._wait_until(self._backend.acquire(0.0, SHELL))
        self._wait_until(self._h2d.send(self._now_s, "load", SHELL, self._layers[SHELL].load_bytes))
        self._backend.release(SHELL)
        methods = {kind: getattr(self, name) for kind, name in _METHODS.items()}
        for action in actions:
            methods[action.kind](action)
        self._end_step()
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

    # -- visits --------------------------------------------------------------------------------------------------------

    def _announce_loads(self, costed: CostedAction) -> None:
        self._backend.prefetch(self._now_s, costed.layers)

    def _load(self, costed: CostedAction) -> None:  # [1]
        layer = costed.layer
        self._loaded_s[layer] = math.inf
        self._wait_until(self._backend.acquire(self._now_s, layer))
        nbytes, on_done = self._layers[layer].load_bytes, partial(self._loaded_s.__setitem__, layer)
        self._h2d.send_chunked(self._now_s, "load", layer, nbytes, self._itemsize, on_done, costed.slot)

    def _begin_visit(self, costed: CostedAction) -> None:
        layer = costed.layer
        if self._loaded_s[layer] == math.inf:  # pieces remain; they are sent at once, as in the loop
            self._h2d.flush(self._now_s)
        self._wait_until(self._loaded_s[layer])
        self._backend.release(layer)
        self._stay += 1
        self._has_buffer = False
        if costed.is_backward:
            self._acquire_buffer(layer)

    # -- stash ---------------------------------------------------------------------------------------------------------

    def _wait_for_stash(self, costed: CostedAction) -> None:
        place = costed.place
        assert place is not None
        number = place.turn
        self._turn = turn = self._turns[number]
        if number not in self._fetched_s:
            self._start_fetch(place, turn.fetch_bytes if costed.nbytes < 0 else costed.nbytes)
        elif turn.fetch_parts:
            for nbytes in turn.fetch_parts[self._prefetches[number] :]:
                self._start_fetch(place, nbytes)
        self._wait_until(self._fetched_s[number])

    def _prefetch_stash(self, costed: CostedAction) -> None:
        if self._overlap:
            place, is_given = costed.place, costed.nbytes >= 0
            assert place is not None
            if is_given:
                self._fetched_s.clear()  # another fetch ahead cancels the one before
            turn, count = self._turns[place.turn], self._prefetches[place.turn]
            self._prefetches[place.turn] = count + 1
            parts = turn.fetch_parts or (turn.fetch_bytes,)
            if is_given or count < len(parts):  # after a wrong guess, the bytes of a turn move once
                self._start_fetch(place, parts[min(count, len(parts) - 1)] if costed.nbytes else 0)
            self._h2d.send_chunk(self._now_s)

    def _announce_turns(self, costed: CostedAction) -> None:
        later = [(place.layer, place.visit, self._turns[place.turn]) for place in costed.later]
        self._wait_until(self._stash_store.prefetch(self._now_s, self._turn, later))

    def _start_fetch(self, place: CostPlace, nbytes: int) -> None:
        turn, fetched_s = self._turns[place.turn], -math.inf
        if nbytes:
            k, storages = turn.k, (turn.moves or _NO_MOVES).fetched
            self._wait_until(self._stash_store.sources(self._now_s, place.layer, k, place.visit, storages))
            fetched_s = self._h2d.send(self._now_s, "fetch", place.layer, nbytes, k, place.visit)
            self._stash_store.read_started(fetched_s, k, storages)
        self._fetched_s[place.turn] = fetched_s

    def _offload(self, costed: CostedAction) -> None:
        """Start to offload the stash of a turn, after that of the turn before."""
        self._wait_until(self._offloaded_s)
        if costed.place is not None:
            turn, visit = self._turns[costed.place.turn], costed.place.visit
            moves = turn.moves or _NO_MOVES
            self._wait_until(self._stash_store.targets(turn.k, moves))
            if nbytes := turn.stash_bytes if costed.nbytes < 0 else costed.nbytes:
                self._offloaded_s = self._d2h.send(self._now_s, "stash", "", nbytes, turn.k, visit)
                self._stash_store.write_started(self._offloaded_s, turn.k, visit, moves)
        if not self._overlap:
            self._wait_until(self._offloaded_s)
        self._d2h.send_chunk(self._now_s)  # after the stash, as in `Stash`

    # -- compute -------------------------------------------------------------------------------------------------------

    def _start_forward(self, costed: CostedAction) -> None:
        if costed.place is not None:
            turn = self._turns[costed.place.turn]
            if turn.batch_bytes:
                self._wait_until(self._h2d.send(self._now_s, "batch", "", turn.batch_bytes, turn.k))
            self._compute(costed)

    def _compute(self, costed: CostedAction) -> None:  # [2]
        """Add the compute events of an action."""
        if costed.place is None:
            return
        number, first, stop, *_ = costed.place
        turn, add, stay = self._turns[number], self._events.append, self._stay
        k, ops, demanded = turn.k, turn.ops, turn.moves.demanded if turn.moves else ()
        for index in range(first, stop):
            kind, layer, visit, seconds, overhead_s, demand_bytes, parts, memory = ops[index]
            if demanded:
                self._demand_storages(k, [each for number, each in demanded if number == index])
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

    def _demand_storages(self, k: int, moves: Sequence[Sequence[int]]) -> None:
        for storages in moves:
            self._wait_until(self._stash_store.sources(self._now_s, SHELL, k, -1, storages))
            self._stash_store.read_started(self._now_s, k, storages)

    def _backward(self, costed: CostedAction) -> None:  # [3]
        if not self._has_buffer:
            self._acquire_buffer(costed.layer)
        self._compute(costed)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _acquire_buffer(self, layer: str) -> None:
        """Wait until a gradient buffer is free; frozen layers need none."""
        self._has_buffer = True
        while layer in self._trained_layers and len(self._pushed_s) >= self._num_buffers:
            self._wait_until(self._pushed_s.popleft())

    def _push(self, costed: CostedAction) -> None:  # [4]
        """Push a gradient and queue its EPS work."""
        layer = costed.layer
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

    def _finish(self, costed: CostedAction) -> None:
        """Queue EPS work on gradients of a layer that were pushed by micro-batch: no later visit adds to them."""
        if not (jobs := self._layer_jobs.get(costed.layer)):
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

    def _end_step(self) -> None:
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
