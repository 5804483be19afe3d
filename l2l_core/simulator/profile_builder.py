"""Costs of a step from its trace: assigns events to the turns of each stay."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

from l2l_core.simulator.step_costs import (
    COPY_LANES,
    ComputeOp,
    CopySpeed,
    EPSJob,
    GradientPartCost,
    LayerCost,
    MemorySamples,
    StayCost,
    TurnCost,
)
from l2l_core.trace import Event, Trace, group_by_visit


class ProfileBuilder:
    """Sorts the events of a trace into stays and turns."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._settings = trace, dict(trace.settings)
        self._lanes = {**trace.lanes, "eps": _merge_split_events(trace.lanes["eps"])}
        self._compute = self._lanes["compute"]
        self._visits = group_by_visit(self._compute)
        self._first_s = min((event.start_s for event in trace.events), default=0.0)
        # The first group has the events before the first layer.
        if not self._visits[1:] or not any(event.kind == "backward" for event in self._compute):
            raise ValueError(f"{trace!r} is not a whole training step: take the trace of relay.step(batch)")
        self._starts_by_micro_batch: dict[int, list[float]] = defaultdict(list)
        self._indices_by_micro_batch: dict[int, list[int]] = defaultdict(list)
        for index, event in enumerate(self._compute):
            self._starts_by_micro_batch[event.k].append(event.start_s)
            self._indices_by_micro_batch[event.k].append(index)
        self._pushed_bytes = _first_copy_bytes(self._lanes["d2h"], "push")
        self._demand_bytes: dict[int, int] = defaultdict(int)  # by index of compute event
        # By visit and micro-batch
        self._gradient_parts: dict[tuple[int, int], list[GradientPartCost]] = defaultdict(list)
        self._moved_bytes: dict[str, dict[tuple[int, int], int]] = {
            kind: defaultdict(int) for kind in ("batch", "fetch", "stash")
        }
        self._fetch_parts: dict[tuple[int, int], list[int]] = defaultdict(list)

    def profile_fields(self) -> dict[str, Any]:
        """Return the fields of a `Profile`."""
        self._collect_stash()
        jobs = self._collect_gradients()
        memory = self._memory()
        ops = [self._make_op(index, event, memory[index + 1]) for index, event in enumerate(self._compute)]
        remaining = iter(zip(self._compute, ops, strict=True))
        groups = [list(islice(remaining, len(visit))) for visit in self._visits]
        return {
            "layers": self._layers(),
            "start": self._turns(-1, groups[0]),
            "stays": tuple(StayCost(g[0][0].layer, g[0][0].visit, self._turns(g[0][0].visit, g)) for g in groups[1:]),
            "closing": tuple(jobs),
            "copies": {lane: _copy_speed(self._lanes[lane], self._settings) for lane in COPY_LANES},
            "handover_s": self._handover_s(),
            "settings": self._settings,
            "names": self._trace.names,
            "memory": memory[0],
        }

    def _next_compute(self, event: Event) -> int:
        """Return the index of the compute event that a copy was made for."""
        starts = self._starts_by_micro_batch[event.k]
        position = bisect_left(starts, event.stop_s - 1e-9)
        return self._indices_by_micro_batch[event.k][min(position, len(starts) - 1)]

    def _collect_stash(self) -> None:
        for event in (event for lane in COPY_LANES for event in self._lanes[lane]):
            if event.visit < 0 and (event.kind == "fetch" or (event.kind == "batch" and event.k < 0)):
                self._demand_bytes[self._next_compute(event)] += event.nbytes
            elif event.kind in self._moved_bytes:
                self._moved_bytes[event.kind][event.visit, event.k] += event.nbytes
                if event.kind == "fetch":
                    self._fetch_parts[event.visit, event.k].append(event.nbytes)

    def _collect_gradients(self) -> list[EPSJob]:
        """Collect gradients pushed by micro-batch with the events that compute them; return the EPS work for the end."""
        pushed = [event for event in self._lanes["d2h"] if event.kind == "push" and event.k >= 0]
        eps = self._lanes["eps"]
        reduced = [event for event in eps if event.kind == "reduce" and event.k >= 0]
        for push, reduce in zip(pushed, reduced, strict=False):
            seconds = reduce.stop_s - reduce.start_s
            part = GradientPartCost(push.layer, push.nbytes, reduce.layer, reduce.nbytes, seconds, push.visit)
            self._gradient_parts[push.visit, push.k].append(part)
        rest = [e for e in eps if not (e.kind == "reduce" and e.k >= 0) and not self._follows_push(e)]
        return [EPSJob(e.kind, e.layer, e.k, e.stop_s - e.start_s, e.nbytes) for e in rest]

    def _follows_push(self, event: Event) -> bool:
        """Return True for EPS work on one pushed gradient that does not wait for others."""
        kinds = ("reduce",) if self._settings.get("update", "eager") != "eager" else ("reduce", "update")
        return event.kind in kinds and event.k < 0 and event.layer in self._pushed_bytes

    def _layers(self) -> dict[str, LayerCost]:
        loads = _first_copy_bytes(self._lanes["h2d"], "load")
        layers = {key: LayerCost(nbytes, self._pushed_bytes.get(key, 0)) for key, nbytes in loads.items()}
        for event in filter(self._follows_push, self._lanes["eps"]):
            seconds = {f"{event.kind}_s": event.stop_s - event.start_s}
            layers[event.layer] = layers[event.layer]._replace(block_bytes=event.nbytes, **seconds)
        return layers

    def _make_op(self, index: int, event: Event, memory: MemorySamples) -> ComputeOp:
        ended_s = self._compute[index - 1].stop_s if index else self._first_s
        overhead_s = max(0.0, event.start_s - ended_s - event.stalled_s)
        seconds = event.stop_s - event.start_s
        return ComputeOp(
            event.kind, event.layer, event.visit, seconds, overhead_s, self._demand_bytes[index], (), memory
        )

    def _turns(self, visit: int, group: Sequence[tuple[Event, ComputeOp]]) -> tuple[TurnCost, ...]:
        # All rows are copied before the first layer runs, whenever they are used.
        by_k: dict[int, list[ComputeOp]] = {k: [] for of, k in self._moved_bytes["batch"] if of == visit}
        for event, op in group:
            by_k.setdefault(event.k, []).append(op)
        parts = {k: self._fetch_parts.get((visit, k), []) for k in by_k}
        return tuple(
            TurnCost(
                k,
                tuple(self._add_gradient_parts(visit, k, ops)),
                batch_bytes=self._moved_bytes["batch"].get((visit, k), 0),
                fetch_bytes=self._moved_bytes["fetch"].get((visit, k), 0),
                stash_bytes=self._moved_bytes["stash"].get((visit, k), 0),
                fetch_parts=tuple(parts[k] if len(parts[k]) > 1 else ()),
            )
            for k, ops in by_k.items()
        )

    def _add_gradient_parts(self, visit: int, k: int, ops: list[ComputeOp]) -> list[ComputeOp]:
        """Attach gradients pushed by micro-batch to the compute operations that complete them."""
        losses = [index for index, op in enumerate(ops) if op.kind == "loss"]
        numbers = {visit, *(op.visit for op in ops if op.kind == "backward")}
        for number in numbers if ops else ():
            index = losses[-1] if losses and number == visit else -1
            parts = ops[index].gradient_parts + tuple(self._gradient_parts.get((number, k), ()))
            ops[index] = ops[index]._replace(gradient_parts=parts)
        return ops

    def _memory(self) -> list[MemorySamples]:
        """Return the samples after each compute event; the first item has those before all."""
        stops = [event.stop_s for event in self._compute]
        groups: list[list[tuple[str, Mapping[str, int]]]] = [[] for _ in range(len(stops) + 1)]
        for sample in self._trace.memory:
            groups[bisect_right(stops, sample.t_s)].append((sample.place, dict(sample.bytes_by_category)))
        return [tuple(group) for group in groups]

    def _handover_s(self) -> float:
        """Return the seconds from the end of a copy to the start of work that waits for it."""
        stops_s = {event.k: event.stop_s for event in self._lanes["h2d"] if event.kind == "batch"}
        waits_s = [e.start_s - stops_s[e.k] for e in self._visits[0] if e.k in stops_s]
        return min((seconds for seconds in waits_s if seconds >= 0), default=0.0)


def _merge_split_events(events: Sequence[Event]) -> list[Event]:
    """Merge EPS work that was split in two because its thread exchanged data with other workers in between."""
    merged: list[Event] = []
    for event in events:
        before = merged[-1] if merged else event
        if merged and not before.nbytes and (before.kind, before.layer, before.k) == (event.kind, event.layer, event.k):
            merged.pop()
            event = event._replace(start_s=event.start_s - (before.stop_s - before.start_s))
        merged.append(event)
    return merged


def _first_copy_bytes(events: Sequence[Event], kind: str) -> dict[str, int]:
    """Return the bytes of every layer's first whole copy of a kind; its pieces are consecutive."""
    moved: dict[str, int] = {}
    current = ""
    for event in (e for e in events if e.kind == kind and e.k < 0):
        if event.layer == current:
            moved[current] += event.nbytes
        else:
            current = "" if event.layer in moved else event.layer
            moved.setdefault(event.layer, event.nbytes)
    return moved


def _copy_speed(events: Sequence[Event], settings: Mapping[str, Any]) -> CopySpeed:
    """Return the speed of copies: the link's if it was limited, otherwise that measured."""
    if not events:
        return CopySpeed()
    limit = settings.get(f"{events[0].lane}_bytes_per_s")
    if limit:
        return CopySpeed(median(max(0.0, e.stop_s - e.start_s - e.nbytes / limit) for e in events), limit)
    fixed_s = min(event.stop_s - event.start_s for event in events)
    rest_s = sum(event.stop_s - event.start_s - fixed_s for event in events)
    return CopySpeed(fixed_s, sum(event.nbytes for event in events) / rest_s if rest_s > 0 else float("inf"))
