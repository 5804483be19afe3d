"""Rotor's solver against an independent search, and the gain of plans that drop kept tensors."""

import random

import pytest

from benchmarks._exhaustive_search import DROP_KINDS, INPUT, RECORD, find_fastest
from l2l_core.strategies.plan import check_operations
from l2l_core.strategies.rotor import Chain, RotorSolution

CHAINS = 500


def random_chain(rng: random.Random, most: int = 4) -> Chain:
    n = rng.randint(2, most)
    sizes = [rng.randint(1, 4) for _ in range(n)] + [0]

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(n))

    records = tuple(sizes[i + 1] + rng.randint(0, 5) for i in range(n))
    return Chain(
        tuple(sizes), records, numbers(1, 9), numbers(1, 9), numbers(1, 9), numbers(0, 6), numbers(0, 2), numbers(0, 4)
    )


def test_equals_the_independent_search() -> None:
    rng, feasible = random.Random(5), 0
    for _ in range(CHAINS):
        chain = random_chain(rng)
        budget = rng.randint(4, 30)
        found = RotorSolution(chain, budget).seconds(budget)
        assert found == find_fastest(chain, budget, drops=False).seconds, (chain, budget)
        feasible += found < float("inf")
    assert 100 < feasible < CHAINS  # both kinds occur


def test_seconds_never_rise_with_the_budget_and_plans_take_them() -> None:
    rng = random.Random(6)
    for _ in range(40):
        chain = random_chain(rng)
        solution = RotorSolution(chain, 60)
        seconds = [solution.seconds(m) for m in range(61)]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] == sum(chain.keep_s) + sum(chain.backward_s) or min(chain.run_s) < max(chain.keep_s)
        for m in (m for m in range(61) if seconds[m] < float("inf")):
            plan = solution.plan(m)
            check_operations(plan, chain.stages)
            costs = {"F0": chain.run_s, "Fck": chain.run_s, "Fall": chain.keep_s, "B": chain.backward_s}
            assert sum(costs[kind][i] for kind, i in plan) == pytest.approx(seconds[m])


def in_use(c: Chain, kept: set[tuple[str, int]], at: int | None, backward: int) -> int:
    """Count the units in use between two moves, including the pending gradient."""
    total = c.inputs[backward + 1] + sum(c.records[i] for kind, i in kept if kind == RECORD)
    total += sum(c.inputs[i] for kind, i in kept if kind == INPUT and i)
    if at is None or (INPUT, at) in kept or (RECORD, at - 1) in kept:
        return total
    return total + c.inputs[at]


def test_dropping_kept_tensors_is_never_slower_and_sometimes_faster() -> None:
    rng, faster, feasible, only = random.Random(8), 0, 0, 0
    for _ in range(50):
        chain = random_chain(rng, 5)
        budget = rng.randint(6, 24)
        free, kept = find_fastest(chain, budget), find_fastest(chain, budget, drops=False)
        assert free.seconds <= kept.seconds
        if free.moves:
            feasible += 1
            faster += free.seconds < kept.seconds < float("inf")
            only += kept.seconds == float("inf")
            follow(chain, budget, free.moves, free.seconds)
    assert feasible > 15 and faster + only > 0, (feasible, faster, only)


def follow(chain: Chain, budget: int, moves: tuple, seconds: float) -> None:
    """Replay the moves of the search, and check that inputs exist and that the budget is never exceeded."""
    kept, at, backward, seconds_used = {(INPUT, 0)}, None, chain.stages - 1, 0.0
    for kind, i, *_ in moves:
        is_kept = (INPUT, i) in kept or (RECORD, i - 1) in kept
        used = in_use(chain, kept, at if kind in ("F0", "Fck") and at == i else None, backward)
        if kind in DROP_KINDS.values():
            kept -= {(kind.removeprefix("drop "), i)}
            continue
        if kind == "B":
            assert i == backward and (RECORD, i) in kept and used + chain.backward_extra[i] <= budget
            kept -= {(RECORD, i), (INPUT, i)}
            seconds_used, at, backward = seconds_used + chain.backward_s[i], None, backward - 1
        elif kind == "F0":
            assert is_kept or at == i
            assert used + chain.inputs[i + 1] + chain.run_extra[i] <= budget
            seconds_used, at = seconds_used + chain.run_s[i], i + 1
        elif kind == "Fck":
            assert at == i
            kept, at = kept | {(INPUT, i)}, None
        else:
            assert is_kept and used + chain.records[i] + chain.keep_extra[i] <= budget
            seconds_used, at, kept = seconds_used + chain.keep_s[i], None, kept | {(RECORD, i)}
    assert backward == -1 and seconds_used == pytest.approx(seconds)


def test_long_chains_are_refused() -> None:
    ones = (1,) * 7
    with pytest.raises(ValueError, match="7 stages"):
        find_fastest(Chain((*ones, 0), ones, ones, ones, ones, ones, ones, ones), 50)
