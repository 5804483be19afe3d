"""Treatments of the stages of a pipeline: keep, recompute, offload or several, within a budget per rank.

The schedule decides how many micro-batches a rank holds between forward and backward, so what a stage keeps counts that
often, and what it makes again counts once. Candidates of a stage are Rotor's plans and a treatment of every layer by letter
(`fixed_plans.py`), found by a dynamic program over what no other choice beats in seconds, bytes kept and bytes copied. The
simulation of the whole pipeline, whose bytes are exact for the chain's figures, decides what fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from l2l_core.devices import DeviceOutOfMemory
from l2l_core.pipelines import PipelinePlan, PipelineSimulation, RankSpeeds, StageCost, simulate_pipeline
from l2l_core.strategies.fixed_plans import KEEP, OFFLOAD, OFFLOAD_INPUT, RECOMPUTE, mixed_plan
from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, RUN_KINDS, B, Operations
from l2l_core.strategies.rotor import Chain, round_up_to_units, solve

_UNITS = 200  # into which Rotor divides the bytes of a stage that keeps everything
_LINK_SHARES = (1.0, 0.7, 0.4, 0.2)  # of the link to the host; copies do not fill every gap
_MOST = 2000  # choices that the dynamic program carries from layer to layer; beyond, close ones are dropped


@dataclass(frozen=True)
class StageTreatment:
    """Activations of one pipeline stage that are kept, recomputed or offloaded.

    Attributes:
        name: letters of its layers, or "Rotor".
        operations: on the layers of the stage, and on an empty one at their end that stands for the wait.
        cost: for `simulate_pipeline`.

    Example:
        See `treat_pipeline`.
    """

    name: str
    operations: Operations
    cost: StageCost


@dataclass(frozen=True)
class TreatedPipeline:
    """Treatments of all stages, and the simulated step.

    Example:
        See `treat_pipeline`.
    """

    treatments: tuple[StageTreatment, ...]
    simulation: PipelineSimulation


def stage_chain(chain: Chain, start: int, stop: int) -> Chain:
    """Return layers `start` to `stop` as a chain that ends in an empty stage.

    Example:
        >>> from l2l_core.strategies import Lab, stage_chain
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, batch, loss=nn.CrossEntropyLoss())
        >>> stage_chain(lab.cost_model.chain(), 0, 3).stages  # three layers and the empty stage
        4
    """

    def cut(values: tuple, empty: float = 0) -> tuple:
        return (*values[start:stop], empty)

    return Chain(
        (*chain.inputs[start : stop + 1], 0),
        cut(chain.records),
        cut(chain.run_s, 0.0),
        cut(chain.keep_s, 0.0),
        cut(chain.backward_s, 0.0),
        cut(chain.run_extra),
        cut(chain.keep_extra),
        cut(chain.backward_extra),
    )


def treatment(chain: Chain, operations: Operations, name: str, weight_bytes: int = 0) -> StageTreatment:
    """Walk through a plan of a stage's chain, and return its cost in the pipeline.

    The input of each layer is held by its record, by the record before it, or kept for a rerun. Backward finds everything
    fetched that was offloaded.
    """
    last = chain.stages - 1
    wait = operations.index((B, last))  # forward is before it, backward after it
    kept, records, off = set[int](), set[int](), set[tuple[str, int]]()
    peaks, seconds, given = [0, 0], [0.0, 0.0], -1

    def held() -> int:
        boundaries = kept | records | {i + 1 for i in records} | ({given} if given >= 0 else set())
        return sum(chain.inputs[i] for i in boundaries) + sum(chain.records[i] - chain.inputs[i + 1] for i in records)

    total = 0
    for position, (kind, i) in enumerate(operations):
        phase = int(position > wait)
        if kind in RUN_KINDS:
            extra = chain.keep_extra[i] if kind == FALL else chain.run_extra[i]
            kept |= {i} if kind == FCK else set()
            records |= {i} if kind == FALL else set()
            kept -= {i} if kind == FALL else set()
            given = i + 1 if kind != FALL else -1
            seconds[phase] += chain.keep_s[i] if kind == FALL else chain.run_s[i]
            peaks[phase] = max(peaks[phase], held() + extra + (chain.inputs[i] if kind == F0 else 0))
        elif kind == B:
            peaks[phase] = max(peaks[phase], held() + chain.inputs[i + 1] + chain.backward_extra[i])
            seconds[phase] += chain.backward_s[i]
            records.discard(i)
            kept.discard(i)
            given = -1
        elif kind in (OFF, OFFX):
            off.add((kind, i))
        if position == wait:
            total = held()
    copied = sum(chain.inputs[i] + (chain.records[i] - chain.inputs[i + 1]) * (kind == OFF) for kind, i in off)
    cost = StageCost(
        forward_s=seconds[0],
        backward_s=seconds[1],
        record_bytes=total,
        host_bytes=copied,
        forward_extra_bytes=max(0, peaks[0] - total),
        backward_extra_bytes=max(0, peaks[1] - total),
        output_bytes=chain.inputs[last],
        weight_bytes=weight_bytes,
    )
    return StageTreatment(name, operations, cost)


def candidates(chain: Chain, letters: str, weight_bytes: int = 0) -> list[StageTreatment]:
    """Return the treatments of a stage that may be best for some budget and link.

    Args:
        chain: from `stage_chain`.
        letters: of `fixed_plans.py`, the treatments of a layer to choose from; with RECOMPUTE, Rotor's plans are added.
        weight_bytes: of the stage.
    """
    found = [treatment(chain, mixed_plan(choice), choice, weight_bytes) for choice in _choices(chain, letters)]
    if RECOMPUTE in letters:
        unit = max(1.0, (sum(chain.records) + sum(chain.inputs)) / _UNITS)
        sizes = ("inputs", "records", "run_extra", "keep_extra", "backward_extra")
        rounded = replace(chain, **{name: round_up_to_units(getattr(chain, name), unit) for name in sizes})
        solution = solve(rounded, 2 * _UNITS)
        plans = dict.fromkeys(solution.plan(m) for m in range(2 * _UNITS) if solution.seconds(m) < float("inf"))
        found += [treatment(chain, plan, "Rotor", weight_bytes) for plan in plans]
    return found


def _choices(chain: Chain, letters: str) -> list[str]:
    """Return the words of letters that no other beats in seconds, bytes kept and bytes copied: a dynamic program."""
    front: dict[tuple[float, int, int], str] = {(0.0, 0, 0): ""}
    for i in range(chain.stages - 1):
        inner = chain.records[i] - chain.inputs[i + 1]
        added = {
            KEEP: (0.0, inner + chain.inputs[i], 0),
            RECOMPUTE: (chain.keep_s[i], chain.inputs[i], 0),
            OFFLOAD: (0.0, 0, inner + chain.inputs[i]),
            OFFLOAD_INPUT: (chain.keep_s[i], 0, chain.inputs[i]),
        }
        grown: dict[tuple[float, int, int], str] = {}
        for (seconds, kept, copied), word in front.items():
            for letter in letters:
                s, k, c = added[letter]
                grown.setdefault((round(seconds + s, 12), kept + k, copied + c), word + letter)
        front = _unbeaten(grown)
    return list(front.values())


def _unbeaten(front: dict[tuple[float, int, int], str]) -> dict[tuple[float, int, int], str]:
    best: list[tuple[float, int, int]] = []
    for point in sorted(front):
        if not any(kept <= point[1] and copied <= point[2] for _, kept, copied in best):
            best.append(point)
    step = -(-len(best) // _MOST)
    return {point: front[point] for point in best[::step]}


def treat_pipeline(
    plan: PipelinePlan,
    chains: Sequence[Chain],
    budget_bytes: int,
    speeds: RankSpeeds,
    weight_bytes: Sequence[int],
    letters: str = KEEP + RECOMPUTE + OFFLOAD + OFFLOAD_INPUT,
) -> TreatedPipeline:
    """Choose a treatment for each stage with which every rank stays within the budget; return the fastest found.

    Each subset of the letters is tried, with the whole link to the host or a part of it, so more letters are never slower.

    Args:
        plan: of the pipeline.
        chains: of the stages, from `stage_chain`.
        budget_bytes: of each rank.
        speeds: of ranks and links; `host_bytes_per_s` None is a link to the host that takes no time.
        weight_bytes: of each stage.
        letters: as in `candidates`.

    Raises:
        DeviceOutOfMemory: no treatment was found that fits; states the smallest budget that would do.

    Example:
        >>> from l2l_core.pipelines import RankSpeeds, one_forward_one_backward
        >>> from l2l_core.strategies import Lab, stage_chain, treat_pipeline
        >>> relay.close()  # a model has one trainer at a time
        >>> chain = Lab(model, batch, loss=nn.CrossEntropyLoss()).cost_model.chain()
        >>> plan, chains = one_forward_one_backward(2, 4), [stage_chain(chain, 0, 3), stage_chain(chain, 3, 6)]
        >>> treated = treat_pipeline(plan, chains, 10**6, RankSpeeds(host_bytes_per_s=1e9), weight_bytes=[0, 0])
        >>> [each.name for each in treated.treatments]  # keep all: a budget of 1 MB suffices
        ['KKK', 'KKK']
    """
    subsets = [s for s in (KEEP, KEEP + RECOMPUTE, KEEP + OFFLOAD) if {*s} < {*letters}] + [letters]
    best: TreatedPipeline | None = None
    least: list[int] = []
    for subset in subsets:
        options = [candidates(chain, subset, size) for chain, size in zip(chains, weight_bytes, strict=True)]
        for share, ahead in product(_LINK_SHARES, (1, 2)):
            paces = [
                [
                    replace(one, cost=replace(one.cost, fetch_ahead=ahead))
                    for one in sorted(each, key=partial(_pace, speeds, share))
                ]
                for each in options
            ]
            found = _treat(plan, paces, budget_bytes, speeds)
            if isinstance(found, int):
                least.append(found)
            elif best is None or found.simulation.seconds < best.simulation.seconds:
                best = found
    if best is None:
        message = (
            f"{plan.name} has no treatment of its stages by {letters} within {budget_bytes} bytes per rank: the smallest budget "
            f"for which one was found is {min(least)} bytes"
        )
        error = DeviceOutOfMemory(message, min(least), budget_bytes, {})
        error.least_bytes = min(least)
        raise error
    return best


def _treat(
    plan: PipelinePlan, options: Sequence[list[StageTreatment]], budget_bytes: int, speeds: RankSpeeds
) -> TreatedPipeline | int:
    """Begin with the fastest treatments, and exchange them on ranks that do not fit; else return the least peak seen."""
    chosen, least = [each[0] for each in options], 0
    while True:
        simulation = simulate_pipeline(plan, [each.cost for each in chosen], speeds)
        least = min(least or max(simulation.peak_bytes), max(simulation.peak_bytes))
        over = [rank for rank, peak in enumerate(simulation.peak_bytes) if peak > budget_bytes]
        if not over:
            return TreatedPipeline(tuple(chosen), simulation)
        for rank in over:
            stages = plan.stages_of(rank)
            smaller = [
                (options[stage].index(each), stage, each)
                for stage in stages
                for each in options[stage]
                if _kept(each) < _kept(chosen[stage])
            ]
            if not smaller:
                return least
            _, stage, each = min(smaller, key=lambda one: one[0])
            chosen[stage] = each


def _kept(stage: StageTreatment) -> int:
    return stage.cost.record_bytes - stage.cost.host_bytes


def _pace(speeds: RankSpeeds, share: float, one: StageTreatment) -> tuple[float, int, int]:
    """Return the seconds of a micro-batch: compute, or copies over a share of the link."""
    cost = one.cost
    copy_s = cost.host_bytes / (share * speeds.host_bytes_per_s) if speeds.host_bytes_per_s else 0.0
    return max(cost.forward_s + cost.backward_s, copy_s), cost.host_bytes, cost.record_bytes
