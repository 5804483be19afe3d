"""Rotor's program against an independent search: Dijkstra over what is kept, one operation at a time."""

import heapq
import random
from collections.abc import Iterator
from itertools import count

import pytest

from l2l_core.strategies.plan import check_operations
from l2l_core.strategies.rotor import Chain, Solution

CHAINS = 500

Kept = frozenset[tuple[str, int]]
State = tuple[int, Kept, int | None]  # the next backward, what is kept, the stage whose input is at hand besides


def random_chain(rng: random.Random) -> Chain:
    n = rng.randint(2, 4)
    sizes = [rng.randint(1, 4) for _ in range(n)] + [0]

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(n))

    records = tuple(sizes[i + 1] + rng.randint(0, 5) for i in range(n))
    return Chain(
        tuple(sizes), records, numbers(1, 9), numbers(1, 9), numbers(1, 9), numbers(0, 6), numbers(0, 2), numbers(0, 4)
    )


def least_seconds(c: Chain, budget: int) -> float:
    """The least time of any sequence that drops what it keeps at its backward alone."""
    start = (c.stages - 1, frozenset([("input", 0)]), None)  # the next backward, what is kept, the input at hand
    queue, ticket, best = [(0.0, 0, start)], count(1), {start: 0.0}
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if seconds > best[state]:
            continue
        if state[0] < 0:
            return seconds
        for more_s, needed, following in moves(c, *state):
            if needed <= budget and seconds + more_s < best.get(following, float("inf")):
                best[following] = seconds + more_s
                heapq.heappush(queue, (seconds + more_s, next(ticket), following))
    return float("inf")


def moves(c: Chain, t: int, kept: Kept, at: int | None) -> Iterator[tuple[float, int, State]]:
    size = {
        "input": lambda i: c.inputs[i] if i else 0,
        "record": lambda i: c.records[i],
    }  # the first input is not counted
    held = sum(size[kind](i) for kind, i in kept) + c.inputs[t + 1]  # and the gradient that comes in
    for j in range(t + 1):
        is_kept = ("input", j) in kept or ("record", j - 1) in kept
        if not is_kept and at != j:
            continue
        own = 0 if is_kept else c.inputs[j]
        yield c.run_s[j], held + own + c.inputs[j + 1] + c.run_more[j], (t, kept, j + 1)
        if not is_kept:
            yield 0, held + own, (t, kept | {("input", j)}, None)
        elif ("record", j) not in kept:
            yield c.keep_s[j], held + c.records[j] + c.keep_more[j], (t, kept | {("record", j)}, None)
    if ("record", t) in kept:
        yield c.back_s[t], held + c.back_more[t], (t - 1, kept - {("record", t), ("input", t)}, None)


def test_equals_the_independent_search() -> None:
    rng, feasible = random.Random(5), 0
    for _ in range(CHAINS):
        chain = random_chain(rng)
        budget = rng.randint(4, 30)
        found = Solution(chain, budget).seconds(budget)
        assert found == least_seconds(chain, budget), (chain, budget)
        feasible += found < float("inf")
    assert 100 < feasible < CHAINS  # both kinds occur


def test_seconds_never_rise_with_the_budget_and_plans_take_them() -> None:
    rng = random.Random(6)
    for _ in range(40):
        chain = random_chain(rng)
        solution = Solution(chain, 60)
        seconds = [solution.seconds(m) for m in range(61)]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] == sum(chain.keep_s) + sum(chain.back_s) or min(chain.run_s) < max(chain.keep_s)
        for m in (m for m in range(61) if seconds[m] < float("inf")):
            plan = solution.plan(m)
            check_operations(plan, chain.stages)
            costs = {"F0": chain.run_s, "Fck": chain.run_s, "Fall": chain.keep_s, "B": chain.back_s}
            assert sum(costs[kind][i] for kind, i in plan) == pytest.approx(seconds[m])
