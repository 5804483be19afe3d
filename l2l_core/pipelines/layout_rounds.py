"""Simulation of a step of many micro-batches from a few rounds of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from l2l_core.pipelines.pipeline_plan import PipelinePlan
from l2l_core.pipelines.pipeline_schedules import SCHEDULES, relay_over_ranks
from l2l_core.pipelines.pipeline_simulation import RankSpeeds, StageCost, simulate_pipeline


class SimulatedRounds(NamedTuple):
    """A simulated step: seconds, activations by rank, bytes sent by all ranks, numbers of actions by kind and stage."""

    seconds: float
    peak_bytes: tuple[float, ...]
    wire_bytes: float
    counts: Mapping[tuple[str, int], float]
    in_flight: float  # records of stages on the first rank
    stages_of: Sequence[Sequence[int]]  # stages of each rank

    def number_of(self, kind: str) -> float:
        """Return the number of actions of a kind."""
        return sum(count for (each, _), count in self.counts.items() if each == kind)


_STEADY = {"GPipe": 1, "GPipe-recompute": 1, "1F1B": 1, "Interleaved1F1B": 2}  # rounds of p after which all are alike
_MOST_ROUNDS = 6  # that may differ; with more, the whole step is simulated


@lru_cache(maxsize=4096)
def simulate_rounds(
    schedule: str, p: int, m: int, v: int, costs: Sequence[StageCost], link: float | None
) -> SimulatedRounds:
    """Simulate a step; where rounds of p micro-batches are alike, simulate a few and add the others."""

    def simulate(count: int) -> SimulatedRounds:
        plan = _make_plan(schedule, p, count, v, len(costs))
        simulation = simulate_pipeline(plan, costs, RankSpeeds(bytes_per_s=link))
        counts = Counter((action.kind, action.stage) for actions in plan.ranks for action in actions)
        stages_of = tuple(map(plan.stages_of, range(p)))
        wire_bytes = sum(simulation.wire_bytes)
        return SimulatedRounds(
            simulation.seconds, simulation.peak_bytes, wire_bytes, counts, plan.in_flight(0), stages_of
        )

    short = m % p + _STEADY.get(schedule, 1) * p
    if m <= short + 2 * p or (schedule not in _STEADY and p > 1):
        return simulate(m)
    few, more = simulate(short), simulate(short + p)
    # With slow messages or unequal stages, rounds may differ for longer.
    if (schedule == "Interleaved1F1B" and link) or len({each.forward_s for each in costs}) > 1:
        while abs((after := simulate(short + 2 * p)).seconds - 2 * more.seconds + few.seconds) > 1e-9 * after.seconds:
            few, more, short = more, after, short + p
            if m <= short + 2 * p or short > _MOST_ROUNDS * p:
                return simulate(m)
    rounds = (m - short) / p

    def beyond(a: float, b: float) -> float:
        return a + rounds * (b - a)

    return SimulatedRounds(
        beyond(few.seconds, more.seconds),
        tuple(map(beyond, few.peak_bytes, more.peak_bytes)),
        beyond(few.wire_bytes, more.wire_bytes),
        {kind: beyond(count, more.counts[kind]) for kind, count in few.counts.items()},
        beyond(few.in_flight, more.in_flight),
        few.stages_of,
    )


@lru_cache(maxsize=64)
def fullest_moments(schedule: str, p: int, m: int) -> tuple[set[tuple[str, int, int]], ...]:
    """Return by rank, of one stage each, the fullest moments: kind of action, records, and inputs to recompute from."""
    plan = _make_plan(schedule, p, m, 1, p)
    found: list[set[tuple[str, int, int]]] = []
    for actions in plan.ranks:
        most, records, inputs = dict[tuple[str, int], int](), 0, 0
        for stage, kind, k in actions:
            is_input = kind == "F" and plan.recomputes(stage, k)
            records += kind in "FR" and not is_input
            inputs += is_input - (kind == "R")
            most[kind, records] = max(inputs, most.get((kind, records), 0))
            records -= kind == "B"
        found.append({(*moment, inputs) for moment, inputs in most.items()})
    return tuple(found)


@lru_cache(maxsize=64)
def _make_plan(schedule: str, p: int, m: int, v: int, layers: int) -> PipelinePlan:
    return relay_over_ranks(p, m, layers) if schedule == "Relay" else SCHEDULES[schedule](p, m, v)
