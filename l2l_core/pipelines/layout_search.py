"""Ways to train a large model over ranks, side by side, and the search for the fastest that fits.

Each way is a set of layouts: all divisions of the ranks over tensor x pipeline x data that its rules allow, with its choices of
recompute and offload. Layers are cut into stages by dynamic programming (`cut_stages`). Everything found is by formula and
simulated (`layout_cost.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from l2l_core.pipelines.layout_cost import cut_layout, layout_bounds, layout_cost
from l2l_core.pipelines.rank_layout import LayoutCost, Offload, RankCluster, RankLayout, Recompute, check_layout
from l2l_core.pipelines.transformer_shape import TransformerShape
from l2l_core.trace import format_bytes

RECOMPUTES: Sequence[Recompute] = ("nothing", "attention", "layers")
OFFLOADS: Sequence[Offload] = ("nothing", "activations")
SETTINGS = ("tensor", "pipeline", "data", "schedule", "zero", "recompute", "offload")  # that the finder chooses
_MICRO_BATCHES = (1, 2, 4, 8)  # rows; a pipeline takes one, since more lengthen the bubble and keep more
_ALIKE = 1e-6  # relative difference of seconds that are rounded
_MOST_RANKS = 16  # of a pipeline; longer ones take seconds to simulate

Candidates = Callable[[int], Iterable[RankLayout]]  # from a number of ranks


@dataclass(frozen=True)
class LayoutWay:
    """A way to train, and the layouts among which it may choose.

    Attributes:
        name: as in the table.
        method: row of the survey's table "Methods to train large networks" to which it belongs.
        explanation: a sentence.
        candidates: layouts for a number of ranks; those that do not divide model and batch are left out.

    Example:
        See `LAYOUT_WAYS`.
    """

    name: str
    method: str
    explanation: str
    candidates: Candidates


@dataclass(frozen=True)
class LayoutSearch:
    """Result of a search: layouts that were costed, those that fit first, in the order of their seconds.

    Attributes:
        cluster: figures of the ranks.
        costs: of the layouts that could be the best; if none fits, of the smallest.
        too_large: number of layouts that need more memory than there is, even with the fewest activations.
        too_slow: number of layouts that take longer than the best by a lower bound of their seconds.

    Example:
        See `find_layout`.
    """

    cluster: RankCluster
    costs: Sequence[LayoutCost]
    too_large: int = 0
    too_slow: int = 0

    def fits(self, cost: LayoutCost) -> bool:
        """Return whether every rank holds it."""
        return cost.device_bytes <= self.cluster.memory_bytes

    @property
    def best(self) -> LayoutCost | None:
        """The fastest that fits; None if none does."""
        return next(filter(self.fits, self.costs), None)

    def why(self, cost: LayoutCost) -> str:
        """Explain in words why a layout is not the best, or that it is."""
        if not self.fits(cost):
            lacking = format_bytes(cost.device_bytes - self.cluster.memory_bytes)
            most = max(cost.memory, key=lambda name: cost.memory[name])
            name = "optimizer state takes" if most == "optimizer" else f"{most} take"
            return f"does not fit by {lacking}: {name} {format_bytes(cost.memory[most])}"
        best = self.best
        assert best is not None  # this one fits
        if cost.step_s <= best.step_s * (1 + _ALIKE):
            return _praise(cost.layout) if cost.layout == best.layout else "fits; as fast as the fastest"
        more = {part: seconds - best.seconds[part] for part, seconds in cost.seconds.items()}
        part = max(more, key=lambda name: more[name])
        return f"fits; {_factor(cost.step_s / best.step_s)} as long: {_LONGER[part]} {_seconds(more[part])} more"


def _praise(layout: RankLayout) -> str:
    cut, p = layout.cut, layout.pipeline
    fewer = (
        ""
        if cut is None or sum(cut[p - 1 :: p]) >= max(sum(cut[rank::p]) for rank in range(p))
        else ("; the last rank has fewer layers, since it runs the output")
    )
    return f"the fastest that fits{fewer}"


_LONGER = {
    "compute": "each rank computes",
    "recompute": "recompute takes",
    "bubble": "ranks wait for one another (bubble)",
    "wire": "ranks wait for messages (wire)",
    "host": "ranks wait for copies to and from the host, or its updates,",
}


def _factor(factor: float) -> str:
    return f"{factor:.3g} times" if factor < 1000 else f"{factor:.0f} times"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def search_layouts(
    shape: TransformerShape, cluster: RankCluster, rows: int, candidates: Iterable[RankLayout]
) -> LayoutSearch:
    """Find the fastest layout that fits.

    Layers are cut into stages by `cut_layout`. A layout is left out only if no cut of it fits, by its bytes without most
    activations, or if a lower bound of its seconds is longer than a layout that fits takes.

    Args:
        shape: the model.
        cluster: figures of the ranks.
        rows: of the batch, over all ranks.
        candidates: layouts; those that do not divide model and batch, or need a tensor group beyond a node, are left out.

    Example:
        >>> from l2l_core.pipelines import RankCluster, RankLayout, TransformerShape, search_layouts
        >>> shape = TransformerShape(layers=8, width=1024, heads=16)
        >>> search = search_layouts(shape, RankCluster(4), 8, [RankLayout(data=4), RankLayout(pipeline=4)])
        >>> search.best.layout.data
        4
    """
    possible = [each for each in candidates if _is_possible(shape, cluster, each, rows)]
    bounds = {each: layout_bounds(shape, cluster, each, rows) for each in possible}
    left = sorted(
        (each for each in bounds if bounds[each][0] <= cluster.memory_bytes), key=lambda each: bounds[each][1]
    )
    costs, best_s = list[LayoutCost](), math.inf
    for at, layout in enumerate(left):
        if bounds[layout][1] >= best_s:
            return _sorted(cluster, costs, len(bounds) - len(left), len(left) - at)
        costs.append(_cost_of_cut(shape, cluster, layout, rows))
        if costs[-1].device_bytes <= cluster.memory_bytes:
            best_s = min(best_s, costs[-1].step_s)
    if best_s == math.inf and len(bounds) > len(left):
        smallest = min(bounds.keys() - {*left}, key=lambda each: (bounds[each][0], each.micro_batch))
        costs.append(_cost_of_cut(shape, cluster, smallest, rows))
    return _sorted(cluster, costs, len(bounds) - len(left))


@lru_cache(maxsize=4096)
def _cost_of_cut(shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> LayoutCost:
    return layout_cost(shape, cluster, cut_layout(shape, cluster, layout, rows), rows)


def _sorted(cluster: RankCluster, costs: Iterable[LayoutCost], too_large: int = 0, too_slow: int = 0) -> LayoutSearch:
    def order(cost: LayoutCost) -> tuple[bool, float]:
        fits = cost.device_bytes <= cluster.memory_bytes
        return not fits, cost.step_s if fits else cost.device_bytes

    return LayoutSearch(cluster, sorted(costs, key=order), too_large, too_slow)


def find_layout(shape: TransformerShape, cluster: RankCluster, rows: int) -> LayoutSearch:
    """Find the fastest layout of `all_layouts` that fits, and others to compare it with.

    `costs` has the best layout, also with stages as equal as may be, and the best with each other value of tensor, pipeline,
    data, schedule, zero, recompute and offload; `why` explains them.

    Example:
        >>> from l2l_core.pipelines import RankCluster, TransformerShape, find_layout
        >>> search = find_layout(TransformerShape(layers=4, width=1024, heads=16), RankCluster(4), rows=8)
        >>> search.best.layout.data, search.best.layout.pipeline
        (4, 1)
    """
    every = [*all_layouts(cluster.ranks)]
    found = search_layouts(shape, cluster, rows, every)
    if not found.costs:
        return found
    first = found.costs[0].layout
    others = dict.fromkeys(each.layout for each in found.costs[:1])
    if first.cut is not None:
        stages = len(first.cut)
        equal = tuple(shape.layers // stages + (stage < shape.layers % stages) for stage in range(stages))
        others[replace(first, cut=equal)] = None
    for name in SETTINGS:
        for value in dict.fromkeys(getattr(each, name) for each in every):
            if value != getattr(first, name):
                group = [each for each in every if getattr(each, name) == value]
                others |= dict.fromkeys(each.layout for each in search_layouts(shape, cluster, rows, group).costs[:1])
    costs = [layout_cost(shape, cluster, each, rows) for each in others]
    return _sorted(cluster, costs, found.too_large, found.too_slow)


def _is_possible(shape: TransformerShape, cluster: RankCluster, layout: RankLayout, rows: int) -> bool:
    try:
        count = check_layout(shape, layout, rows)
    except ValueError:
        return False
    p, v = layout.pipeline, layout.stages
    rounds = v == 1 or (count % p == 0 and shape.layers % (p * v) == 0)
    # Ranks that take the next layer in turn read one host's memory.
    most = cluster.node if layout.is_relay else _MOST_RANKS
    return layout.tensor <= cluster.node and rounds and p <= most


# -- candidates --------------------------------------------------------------------------------------------------------


def divisions(ranks: int, tensor: bool, pipeline: bool, data: bool = True) -> Iterator[tuple[int, int, int]]:
    """Yield all (tensor, pipeline, data) whose product is the number of ranks; those that may not be used are 1."""
    divisors = [count for count in range(1, ranks + 1) if ranks % count == 0]
    for t, p in product(divisors if tensor else [1], divisors if pipeline else [1]):
        if ranks % (t * p) == 0 and (data or t * p == ranks):
            yield t, p, ranks // (t * p)


def all_layouts(ranks: int) -> Iterator[RankLayout]:
    """Yield the layouts of the finder: tensor x pipeline x data x recompute x offload.

    With ZeRO 0, 1 and 3; pipelines are 1F1B, also interleaved with 2 or 4 stages per rank. Last are those with weights on the
    hosts: loaded for each micro-batch, or by relays, whose ranks may take layers in turn.

    Example:
        >>> from l2l_core.pipelines import all_layouts
        >>> next(all_layouts(8)).data, len(list(all_layouts(8)))
        (8, 472)
    """
    for (t, p, d), recompute, offload in product(divisions(ranks, True, True), RECOMPUTES, OFFLOADS):
        for zero in (0, 1, 3) if d > 1 else (0,):
            base = RankLayout(t, p, d, zero=zero, recompute=recompute, offload=offload)
            yield from _in_micro_batches(base) if p == 1 else _in_stages(base)
    for recompute in RECOMPUTES:
        yield from _over_data(ranks, zero=3, recompute=recompute, offload="weights")
    yield from (RankLayout(1, p, d, schedule="Relay") for _, p, d in divisions(ranks, False, True))


def _in_micro_batches(base: RankLayout) -> Iterator[RankLayout]:
    for rows in _MICRO_BATCHES:
        yield replace(base, micro_batch=rows)


def _in_stages(base: RankLayout) -> Iterator[RankLayout]:
    yield base
    for stages in (2, 4):
        yield replace(base, schedule="Interleaved1F1B", stages=stages)


def _over_data(ranks: int, **settings: Any) -> Iterator[RankLayout]:
    return _in_micro_batches(replace(RankLayout(data=ranks), **settings))


def _over_pipeline(ranks: int, schedule: str, recomputes: Sequence[Recompute]) -> Iterator[RankLayout]:
    for (_, p, d), recompute in product(divisions(ranks, False, True), recomputes):
        base = RankLayout(1, p, d, schedule=schedule, recompute=recompute)
        if p > 1:
            yield from (
                (each for each in _in_stages(base) if each.stages > 1) if schedule == "Interleaved1F1B" else (base,)
            )


def _over_tensor(ranks: int) -> Iterator[RankLayout]:
    for (t, _, d), recompute in product(divisions(ranks, True, False), RECOMPUTES):
        if t > 1:
            yield from _in_micro_batches(RankLayout(t, 1, d, recompute=recompute))


def _in_three(ranks: int) -> Iterator[RankLayout]:
    return (each for each in all_layouts(ranks) if min(each.tensor, each.pipeline, each.data) > 1)


def _data_way(name: str, method: str, explanation: str, **settings: Any) -> LayoutWay:
    return LayoutWay(name, method, explanation, lambda ranks: _over_data(ranks, **settings))


def _zero_way(zero: int, method: str, explanation: str) -> LayoutWay:
    def candidates(ranks: int) -> Iterator[RankLayout]:
        for recompute in RECOMPUTES if ranks > 1 else ():
            yield from _over_data(ranks, zero=zero, recompute=recompute)

    return LayoutWay(f"ZeRO {zero}", method, explanation, candidates)


def _pipeline_way(name: str, explanation: str, schedule: str, recomputes: Sequence[Recompute]) -> LayoutWay:
    return LayoutWay(
        name, "Pipeline parallelism", explanation, lambda ranks: _over_pipeline(ranks, schedule, recomputes)
    )


_APART: Sequence[Recompute] = ("nothing", "attention")  # of schedules that recompute whole stages

# The rows of "Methods to train large networks" (J. Gusak, 2022), in its order. Down to data parallelism each method is alone;
# ways below it may recompute too.
LAYOUT_WAYS: Sequence[LayoutWay] = (
    LayoutWay(
        "one rank",
        "No data parallelism",
        "One rank trains all rows, in micro-batches.",
        lambda ranks: _over_data(1),
    ),
    _data_way(
        "recompute",
        "Rematerialization",
        "Every layer keeps its input and runs again in backward.",
        recompute="layers",
    ),
    _data_way(
        "offload activations",
        "Offloading: activations",
        "Records of layers wait on the host between forward and backward.",
        offload="activations",
    ),
    _data_way(
        "offload weights",
        "Offloading: weights",
        "Weights, gradients and optimizer state are on the hosts, a shard on each; every micro-batch loads all layers twice.",
        zero=3,
        offload="weights",
    ),
    LayoutWay(
        "relay",
        "Offloading: tensors in GPU cache",
        "Planned, where a cache on the GPU decides by use: the device holds two layers, and all micro-batches visit one before "
        "the next is loaded (L2L-p).",
        lambda ranks: [RankLayout(data=ranks, schedule="Relay")],
    ),
    _data_way(
        "few-bit activations",
        "Approximate gradients: lower-bit activation gradients",
        "GELU keeps 3 bits per input, and backward reads a rounded derivative.",
        gelu_bits=3.0,
    ),
    _data_way(
        "randomized products",
        "Approximate gradients: matrix products",
        "Linear layers keep a random sketch of half of their rows; its own operations are not counted.",
        linear_share=0.5,
    ),
    _data_way(
        "8-bit gradients",
        "Approximate gradients: lower-bit weight gradients",
        "Gradients of weights are sent in 8 bits.",
        gradient_bits=8.0,
    ),
    _data_way("data parallel", "Data parallelism", "Every rank has the whole model and a part of the rows."),
    _zero_way(
        1, "Partitioning: optimizer state", "Each rank updates its shard, and weights are gathered once per step."
    ),
    _zero_way(2, "Partitioning: + gradients", "Gradients are reduced to shards after every micro-batch."),
    _zero_way(3, "Partitioning: + parameters", "Weights are gathered layer by layer, for forward and for backward."),
    LayoutWay(
        "tensor parallel",
        "Model parallelism",
        "Every layer's matrices are divided over ranks of a node (Megatron-LM).",
        _over_tensor,
    ),
    _pipeline_way("GPipe", "All forwards, then all backwards.", "GPipe", RECOMPUTES),
    _pipeline_way("1F1B", "Forward and backward in turn (PipeDream-Flush).", "1F1B", RECOMPUTES),
    _pipeline_way("interleaved 1F1B", "1F1B with 2 or 4 stages on each rank.", "Interleaved1F1B", RECOMPUTES),
    _pipeline_way(
        "Varuna",
        "Backward before recompute before forward; stages keep their input.",
        "Varuna",
        _APART,
    ),
    _pipeline_way(
        "relay over ranks",
        "Ranks take the next layer in turn, with weights and inputs on the hosts.",
        "Relay",
        ("nothing",),
    ),
    LayoutWay(
        "3D",
        "Pipeline parallelism",
        "Tensor x pipeline x data: tensor ranks in a node, 1F1B over nodes, ZeRO 1 over the rest if that is faster.",
        _in_three,
    ),
)


@dataclass(frozen=True)
class WayTable:
    """Every way with the fastest of its layouts that fits, or the smallest.

    Attributes:
        ways: in the order of the table.
        costs: of each way; None where no layout divides model and batch over the ranks.
        search: all layouts of the table, for `best` and `why`.

    Example:
        See `compare_ways`.
    """

    ways: Sequence[LayoutWay]
    costs: Sequence[LayoutCost | None]
    search: LayoutSearch

    def verdict(self, at: int) -> str:
        """Explain in words why the way at a position is not the best, or that it is."""
        cost = self.costs[at]
        if cost is None:
            ranks = self.search.cluster.ranks
            return "needs several ranks" if ranks == 1 else f"no layout of {ranks} ranks divides model and rows"
        return self.search.why(cost)


def compare_ways(
    shape: TransformerShape, cluster: RankCluster, rows: int, ways: Sequence[LayoutWay] = LAYOUT_WAYS
) -> WayTable:
    """Return all ways side by side, each with the fastest of its layouts that fits the ranks, or the smallest.

    Args:
        shape: the model.
        cluster: figures of the ranks.
        rows: of the batch, over all ranks.
        ways: rows of the table.

    Example:
        >>> from l2l_core.pipelines import LAYOUT_WAYS, RankCluster, TransformerShape, compare_ways
        >>> shape = TransformerShape(layers=8, width=1024, heads=16)
        >>> table = compare_ways(shape, RankCluster(8), rows=16, ways=LAYOUT_WAYS[:2])
        >>> [f"{way.name}: {cost.step_s:.2f} s" for way, cost in zip(table.ways, table.costs)]
        ['one rank: 0.22 s', 'recompute: 0.03 s']
    """
    searches = [search_layouts(shape, cluster, rows, way.candidates(cluster.ranks)) for way in ways]
    costs = [search.costs[0] if search.costs else None for search in searches]
    return WayTable(ways, costs, _sorted(cluster, [cost for cost in costs if cost is not None]))
