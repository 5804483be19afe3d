"""Schedules of pipelines, as functions of ranks and micro-batches that return plans.

Where torch has the schedule, the actions are torch's (`tests/core/pipelines` compares them). `p` is the number of ranks,
`m` of micro-batches, `v` of stages on each rank. `bubble` is the time in which ranks wait, in compute time, for equal stages
with B twice as long as F, m a multiple of p; records are counted in stages.

schedule                    bubble                records on rank r          source
gpipe                       (p-1)/m               m                          arXiv 1811.06965
one_forward_one_backward    (p-1)/m               min(m, p-r)                arXiv 2006.09503
interleaved                 (p-1)/(v m)           (v-1) p + 2 (p-1-r) + 1    arXiv 2104.04473
looped_breadth_first        (p-1)/(v m)           v m                        arXiv 2211.05953
zero_bubble_h1              (p-1)/(3 m)           p                          arXiv 2401.10241
zero_bubble_v, dual_pipe_v  smaller                                          arXiv 2405.15362, 2412.19437
varuna                                            1, the last stage          arXiv 2111.04007
relay_over_ranks                                  1                          arXiv 2002.05645, 2604.27085
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from l2l_core.pipelines.pipeline_plan import PipelineAction, PipelinePlan


class _RankActions(list[PipelineAction]):
    """Actions of one rank; micro-batches of every stage and kind are numbered in order."""

    def __init__(self) -> None:
        super().__init__()
        self._next: Counter[tuple[int, str]] = Counter()
        self._waiting: list[PipelineAction] = []  # each W whose I is there

    def add(self, kinds: str, *stages: int) -> None:
        """Append one action of each kind, in this order, for each of these stages."""
        for stage in stages:
            for kind in kinds:
                k = self._next[stage, kind]
                for counted in "BI" if kind in "BI" else kind:  # both run the backward of a micro-batch
                    self._next[stage, counted] += 1
                self.append(PipelineAction(stage, kind, k))
                if kind == "I":
                    self._waiting.append(PipelineAction(stage, "W", k))

    def add_weights(self, count: int | None = None) -> None:
        """Append the oldest W that are still to do: so many, or all."""
        count = len(self._waiting) if count is None else count
        self += self._waiting[:count]
        del self._waiting[:count]


def _plan(name: str, m: int, ranks: list[_RankActions]) -> PipelinePlan:
    return PipelinePlan(name, m, tuple(map(tuple, ranks)))


def _sizes(p: int, m: int, v: int = 1) -> None:
    if min(p, m, v) < 1:
        raise ValueError(f"p={p}, m={m}, v={v}: a pipeline has at least one rank, one micro-batch, one stage per rank")


def gpipe(p: int, m: int, recompute: bool = False) -> PipelinePlan:
    """Run all forwards, then all backwards.

    With `recompute`, backward begins with the last micro-batch, whose records are still there; the others are recomputed.
    Without, micro-batches are in ascending order, so that gradients are added as in plain training.

    Example:
        >>> from l2l_core.pipelines import gpipe
        >>> print(gpipe(2, 2))
        pipeline GPipe micro_batches=2
          0 | 0F0 0F1 0B0 0B1
          1 | 1F0 1F1 1B0 1B1
    """
    _sizes(p, m)
    if not recompute:
        return PipelinePlan("GPipe", m, looped_breadth_first(p, m, 1, ascending=True).ranks)
    ranks: list[_RankActions] = []
    for stage in range(p):
        ranks.append(actions := _RankActions())
        actions += [PipelineAction(stage, "F", k) for k in range(m)]
        for k in reversed(range(m)):
            kinds = "B" if k == m - 1 else "RB"
            actions += [PipelineAction(stage, kind, k) for kind in kinds]
    return _plan("GPipe-recompute", m, ranks)


def looped_breadth_first(p: int, m: int, v: int, ascending: bool = False) -> PipelinePlan:
    """Run all micro-batches through a stage before the rank's next stage; backward in reverse.

    Args:
        p, m, v: numbers of ranks, micro-batches, and stages per rank.
        ascending: order of micro-batches in backward; torch's is descending.

    Example:
        >>> from l2l_core.pipelines import looped_breadth_first
        >>> plan = looped_breadth_first(2, 4, v=2)
        >>> [str(action) for action in plan.ranks[0]][:5]
        ['0F0', '0F1', '0F2', '0F3', '2F0']
    """
    _sizes(p, m, v)
    ranks: list[_RankActions] = []
    for rank in range(p):
        ranks.append(actions := _RankActions())
        stages = range(rank, p * v, p)
        actions += [PipelineAction(stage, "F", k) for stage in stages for k in range(m)]
        back = range(m) if ascending else range(m - 1, -1, -1)
        actions += [PipelineAction(stage, "B", k) for stage in reversed(stages) for k in back]
    return _plan("LoopedBFS", m, ranks)


def one_forward_one_backward(p: int, m: int) -> PipelinePlan:
    """Run forward and backward in turn as soon as the first gradient can arrive (1F1B, PipeDream-Flush).

    Example:
        >>> from l2l_core.pipelines import one_forward_one_backward
        >>> plan = one_forward_one_backward(2, 4)  # 2 ranks, 4 micro-batches
        >>> plan.name, len(plan.ranks), plan.stages
        ('1F1B', 2, 2)
    """
    _sizes(p, m)
    return _alternate("1F1B", p, m, lambda rank: p - 1 - rank)


def interleaved(p: int, m: int, v: int) -> PipelinePlan:
    """Run 1F1B with v stages on each rank, p micro-batches at a time through each.

    Raises:
        ValueError: m must be a multiple of its number of rounds, m // p.

    Example:
        >>> from l2l_core.pipelines import interleaved
        >>> plan = interleaved(2, 4, v=2)
        >>> plan.stages_of(0), plan.stages_of(1)
        ([0, 2], [1, 3])
    """
    per_round = _per_round(p, m, v)
    return _alternate("Interleaved1F1B", p, m, lambda rank: (v - 1) * per_round + 2 * (p - 1 - rank), v)


def zero_bubble_h1(p: int, m: int, v: int = 1) -> PipelinePlan:
    """Run 1F1B with backward in two parts: rank r does its W r micro-batches later, where it would wait (ZB-H1).

    With v > 1 stages on each rank it is torch's InterleavedZeroBubble.

    Example:
        >>> from l2l_core.pipelines import one_forward_one_backward, simulate_pipeline, zero_bubble_h1
        >>> plans = one_forward_one_backward(4, 8), zero_bubble_h1(4, 8)
        >>> [round(simulate_pipeline(plan).bubble, 2) for plan in plans]
        [0.38, 0.12]
    """
    per_round = _per_round(p, m, v)
    return _alternate("ZB-H1", p, m, lambda rank: (v - 1) * per_round + p - 1 - rank, v, is_split=True)


def _per_round(p: int, m: int, v: int) -> int:
    _sizes(p, m, v)
    rounds = max(1, m // p) if v > 1 else 1
    if m % rounds:
        raise ValueError(
            f"m={m} micro-batches on p={p} ranks run in {rounds} rounds, and {m} is no multiple of {rounds}: use m={m // p * p}"
        )
    return m // rounds


def _alternate(
    name: str, p: int, m: int, warm_up_of: Callable[[int], int], v: int = 1, is_split: bool = False
) -> PipelinePlan:
    """Build the plan of ranks that run so many forwards first, then forward and backward in turn."""
    per_round = _per_round(p, m, v)
    ranks: list[_RankActions] = []
    for rank in range(p):
        ranks.append(actions := _RankActions())
        warm_up = min(m * v, warm_up_of(rank))
        for step in range(m * v + warm_up):
            if step < m * v:
                actions.add("F", step // per_round % v * p + rank)
            if step >= warm_up:
                done = step - warm_up
                actions.add("I" if is_split else "B", (v - 1 - done // per_round % v) * p + rank)
                if is_split and done >= rank:
                    actions.add_weights(1)
        actions.add_weights()
    return _plan(name, m, ranks)


def zero_bubble_v(p: int, m: int) -> PipelinePlan:
    """Run two stages per rank, placed as a V, with backward in two parts (ZBV).

    Rank 0 has the first stage and the last.

    Example:
        >>> from l2l_core.pipelines import zero_bubble_v
        >>> zero_bubble_v(4, 8).stages_of(0)  # the first stage and the last
        [0, 7]
    """
    _sizes(p, m)
    ranks: list[_RankActions] = []
    count = max(2 * p - 1, m)
    for rank in range(p):
        ranks.append(actions := _RankActions())
        first, last = rank, 2 * p - 1 - rank
        actions.add("F", *[first] * (2 * (p - rank) - 1))
        actions.add("F", *[last, first] * rank)
        actions.add("FIW", *[last] * (p - rank))
        of_first, of_last = 2 * p - 1 - rank, p  # forwards so far
        while of_last < of_first or of_first < count:
            actions.add("FIW" if of_first < count else "IW", first)
            actions.add("FIW", last)
            of_first, of_last = min(count, of_first + 1), of_last + 1
        actions.add("I", *[first, last] * rank)
        actions.add("IW", *[first] * (p - rank))
        actions.add("W", *[last] * rank, *[first] * rank)
    # With few micro-batches the plan is that of 2p - 1, and the ones that are not there are left out.
    there = tuple(tuple(action for action in actions if action.k < m) for actions in ranks)
    return PipelinePlan("ZBV", m, there)


def dual_pipe_v(p: int, m: int) -> PipelinePlan:
    """Run two stages per rank, placed as a V, with forward of one and backward of the other in turn.

    Raises:
        ValueError: m is less than 2 p.

    Example:
        >>> from l2l_core.pipelines import dual_pipe_v
        >>> dual_pipe_v(2, 4).stages_of(0)
        [0, 3]
        >>> dual_pipe_v(2, 3)
        Traceback (most recent call last):
        ValueError: DualPipeV on p=2 ranks needs m=4 micro-batches or more, and has 3: use zero_bubble_v
    """
    _sizes(p, m)
    if m < 2 * p:
        raise ValueError(
            f"DualPipeV on p={p} ranks needs m={2 * p} micro-batches or more, and has {m}: use zero_bubble_v"
        )
    ranks: list[_RankActions] = []
    for rank in range(p):
        ranks.append(actions := _RankActions())
        first, last = rank, 2 * p - 1 - rank
        actions.add("F", *[first] * (2 * (p - rank - 1)))
        actions.add("F", *[first, last] * (rank + 1))
        for _ in range(p - rank - 1):
            actions.add("I", last)
            actions.add_weights(1)
            actions.add("F", last)
        for _ in range(m - 2 * p + rank + 1):
            actions.add("F", first)
            actions.add("B", last)
            actions.add("F", last)
            actions.add("B", first)
        for _ in range(p - rank - 1):
            actions.add("B", last)
            actions.add("F", last)
            actions.add("B", first)
        for i in range(2 * (rank + 1)):
            actions.add("B" if i <= rank else "I", first if i % 2 else last)
        for _ in range(p - rank - 1):
            actions.add_weights(1)
            actions.add("I", first)
        actions.add_weights()
    return _plan("DualPipeV", m, ranks)


def varuna(p: int, m: int) -> PipelinePlan:
    """Prefer backward to recompute, and recompute to forward, in every slot of a rank (Varuna).

    Slots of one F or R; B takes two. R waits until the backward of the stage after has begun. The last stage keeps its
    records.

    Example:
        >>> from l2l_core.pipelines import varuna
        >>> print(varuna(2, 3))
        pipeline Varuna micro_batches=3
          0 | 0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2
          1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """
    _sizes(p, m)
    ranks = [_RankActions() for _ in range(p)]
    free = [0] * p  # slot from which a rank is free
    done: dict[PipelineAction, int] = {}  # slot after the action
    count: Counter[tuple[int, str]] = Counter()  # of actions begun, by stage and kind
    slot = 0
    while any(len(actions) < m * (2 if stage == p - 1 else 3) for stage, actions in enumerate(ranks)):
        begun = dict(done)
        for stage, actions in enumerate(ranks):
            action = _varuna_choice(stage, p, m, slot, begun, count) if free[stage] <= slot else None
            if action:
                actions.append(action)
                count[stage, action.kind] += 1
                free[stage] = done[action] = slot + (2 if action.kind == "B" else 1)
        slot += 1
    return _plan("Varuna", m, ranks)


def _varuna_choice(
    stage: int, p: int, m: int, slot: int, begun: dict[PipelineAction, int], count: Counter[tuple[int, str]]
) -> PipelineAction | None:
    def ended(kind: str, at: int, k: int) -> bool:
        return begun.get(PipelineAction(at, kind, k), slot + 1) <= slot

    for kind in "BRF":
        k = count[stage, kind]  # micro-batches pass a stage in order
        is_last = stage == p - 1
        ready = {
            "B": ended("F" if is_last else "R", stage, k) and (is_last or ended("B", stage + 1, k)),
            "R": not is_last and PipelineAction(stage + 1, "B", k) in begun,
            "F": stage == 0 or ended("F", stage - 1, k),
        }
        if k < m and ready[kind]:
            return PipelineAction(stage, kind, k)
    return None


def relay_over_ranks(p: int, m: int, stages: int) -> PipelinePlan:
    """Run a relay on several ranks: each takes the next visit in turn, with all micro-batches.

    Weights and kept inputs are on the host. The last stage runs backward at once; the others are recomputed in backward, on
    the rank that has the turn.

    Example:
        >>> from l2l_core.pipelines import relay_over_ranks
        >>> print(relay_over_ranks(2, 2, stages=4))
        pipeline Relay micro_batches=2 weights=host
          0 | 0F0 0F1 2F0 2F1 2R0 2B0 2R1 2B1 0R0 0B0 0R1 0B1
          1 | 1F0 1F1 3F0 3B0 3F1 3B1 1R0 1B0 1R1 1B1
    """
    _sizes(p, m, stages)
    ranks = [_RankActions() for _ in range(p)]
    visits = [(stage, "F") for stage in range(stages - 1)]
    visits += [(stages - 1, "FB"), *((stage, "RB") for stage in reversed(range(stages - 1)))]
    for visit, (stage, kinds) in enumerate(visits):
        ranks[visit % p] += [PipelineAction(stage, kind, k) for k in range(m) for kind in kinds]
    return PipelinePlan("Relay", m, tuple(map(tuple, ranks)), weights_on_host=True)


# Schedules of p ranks and m micro-batches, with v stages on each rank where they loop.
SCHEDULES: dict[str, Callable[[int, int, int], PipelinePlan]] = {
    "GPipe": lambda p, m, v: gpipe(p, m),
    "GPipe-recompute": lambda p, m, v: gpipe(p, m, recompute=True),
    "1F1B": lambda p, m, v: one_forward_one_backward(p, m),
    "Interleaved1F1B": interleaved,
    "LoopedBFS": looped_breadth_first,
    "ZB-H1": zero_bubble_h1,
    "ZBV": lambda p, m, v: zero_bubble_v(p, m),
    "DualPipeV": lambda p, m, v: dual_pipe_v(p, m),
    "Varuna": lambda p, m, v: varuna(p, m),
    "Relay": lambda p, m, v: relay_over_ranks(p, m, p * v),
}
