"""Schedules of pipelines: the figures of Varuna and GPipe, torch's own orders, closed formulas, and the text form."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from l2l_core.pipelines import (
    SCHEDULES,
    PipelinePlan,
    check_pipeline,
    dual_pipe_v,
    gpipe,
    interleaved,
    looped_breadth_first,
    one_forward_one_backward,
    relay_over_ranks,
    simulate_pipeline,
    varuna,
    zero_bubble_h1,
    zero_bubble_v,
)

# The figure "Varuna schedule, GPipe schedule" of the seed on memory footprint (Varuna, arXiv 2111.04007), a cell per slot.
# Its row S3 of Varuna has no gap before R4 and so begins B4 in the slot in which S4 still runs it; with the gap, which S2's
# wait implies, the rows agree.
VARUNA = """
S4 .  .  .  F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  F4 B4 B4 F5 B5 B5 .  .  .  .  .  .
S3 .  .  F1 F2 F3 R1 B1 B1 R2 B2 B2 R3 B3 B3 F4 F5 .  R4 B4 B4 R5 B5 B5 .  .  .  .
S2 .  F1 F2 F3 F4 F5 .  R1 B1 B1 R2 B2 B2 R3 B3 B3 .  .  .  R4 B4 B4 R5 B5 B5 .  .
S1 F1 F2 F3 F4 F5 .  .  .  .  R1 B1 B1 R2 B2 B2 R3 B3 B3 .  .  .  R4 B4 B4 R5 B5 B5
"""
GPIPE = """
S4 .  .  .  F1 F2 F3 F4 F5 B5 B5 R4 B4 B4 R3 B3 B3 R2 B2 B2 R1 B1 B1 .  .  .  .  .  .
S3 .  .  F1 F2 F3 F4 F5 .  .  .  B5 B5 R4 B4 B4 R3 B3 B3 R2 B2 B2 R1 B1 B1 .  .  .  .
S2 .  F1 F2 F3 F4 F5 .  .  .  .  .  .  B5 B5 R4 B4 B4 R3 B3 B3 R2 B2 B2 R1 B1 B1 .  .
S1 F1 F2 F3 F4 F5 .  .  .  .  .  .  .  .  .  B5 B5 R4 B4 B4 R3 B3 B3 R2 B2 B2 R1 B1 B1
"""
SIZES = {"p": st.integers(1, 8), "m": st.integers(1, 16), "v": st.integers(1, 4)}


def rows_as_drawn(plan: PipelinePlan) -> dict[str, list[str]]:
    """Rows of the diagram in the words of the figure: stages and micro-batches from 1."""
    rows = {}
    for line in simulate_pipeline(plan).diagram().splitlines():
        rank, cells = line.split("|")
        rows[f"S{int(rank) + 1}"] = [re.sub(r"\d+([FRB])(\d+)", _from_one, cell) for cell in cells.split()]
    return rows


def _from_one(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1}"


@pytest.mark.parametrize(
    ("figure", "plan", "slots"), [(VARUNA, varuna(4, 5), 27), (GPIPE, gpipe(4, 5, recompute=True), 28)]
)
def test_figures_slot_for_slot(figure: str, plan: PipelinePlan, slots: int) -> None:
    drawn = {name: cells for name, *cells in (line.split() for line in figure.strip().splitlines())}
    assert rows_as_drawn(plan) == drawn and {len(cells) for cells in drawn.values()} == {slots}
    assert simulate_pipeline(plan).seconds == slots


def words_of_torch(name: str, p: int, m: int, v: int | None) -> list[list[str]] | str:
    """Actions of torch's schedule of that name, by rank; or its refusal."""
    try:
        ranks = get_schedule_ops(name, p, m, v)
    except ValueError as error:
        return str(error)
    return [[word for word in _words(actions) if "REDUCE" not in word] for actions in ranks]


def _words(actions: list) -> Iterator[str]:
    for action in actions:
        if action is not None:
            yield from map(str, action.sub_actions or [action])  # forward and backward that torch overlaps on a GPU


@pytest.mark.parametrize(
    ("mine", "name", "v"),
    [
        (lambda p, m, v: gpipe(p, m), "GPipe", None),
        (lambda p, m, v: one_forward_one_backward(p, m), "1F1B", None),
        (interleaved, "Interleaved1F1B", 3),
        (looped_breadth_first, "LoopedBFS", 2),
        (zero_bubble_h1, "InterleavedZeroBubble", 2),
        (lambda p, m, v: zero_bubble_v(p, m), "ZBVZeroBubble", 2),
        (lambda p, m, v: dual_pipe_v(p, m), "DualPipeV", 2),
    ],
)  # fmt: skip
@pytest.mark.all_cases
def test_orders_are_those_of_torch(mine: object, name: str, v: int | None) -> None:
    compared = 0
    for p in (2, 3, 4):
        for m in (2, 3, 5, 8, 9):
            if name == "1F1B" and m < p:
                continue  # torch's table names micro-batches that are not there; its runtime does not run them
            theirs = words_of_torch(name, p, m, v)
            if isinstance(theirs, str):
                with pytest.raises(ValueError, match="m="):
                    mine(p, m, v)
                continue
            ours = [[*map(str, actions)] for actions in mine(p, m, v).ranks]
            if name == "1F1B":  # torch's table begins with F1 on the last rank, its runtime with F0
                ours, theirs = ours[:-1], theirs[:-1]
            assert ours == theirs, (p, m)
            compared += 1
    assert compared > 4


@given(name=st.sampled_from(sorted(SCHEDULES)), **SIZES)
@settings(max_examples=150, deadline=None)
def test_every_plan_is_valid_and_survives_its_text(name: str, p: int, m: int, v: int) -> None:
    try:
        plan = SCHEDULES[name](p, m, v)
    except ValueError as error:  # a remedy that works
        number = int(re.findall(r"m=(\d+)", str(error))[-1])
        plan = SCHEDULES["ZBV" if name == "DualPipeV" else name](p, m if name == "DualPipeV" else number, v)
    check_pipeline(plan)
    assert PipelinePlan.parse(str(plan)) == plan
    simulated = simulate_pipeline(plan)
    work = sum(simulated.compute_s(rank) for rank in range(p))
    extra = sum(action.kind == "R" for actions in plan.ranks for action in actions)
    assert work == 3 * plan.stages * plan.micro_batches + extra
    assert simulated.peak_bytes == tuple(plan.in_flight(rank) for rank in range(p))  # a record is one byte


@given(**SIZES)
@settings(max_examples=60, deadline=None)
def test_closed_formulas(p: int, m: int, v: int) -> None:
    full = m * p  # a multiple of p

    def measured(plan: PipelinePlan) -> tuple[float, list[int]]:
        return simulate_pipeline(plan).bubble, [plan.in_flight(rank) for rank in range(p)]

    assert measured(gpipe(p, m)) == (pytest.approx((p - 1) / m), [m] * p)
    assert measured(one_forward_one_backward(p, m)) == (pytest.approx((p - 1) / m), [min(m, p - r) for r in range(p)])
    if full <= 32:
        bubble = pytest.approx((p - 1) / (v * full))
        assert measured(looped_breadth_first(p, full, v)) == (bubble, [v * full] * p)
        records = [min(v * full, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
        if v > 1:
            assert measured(interleaved(p, full, v)) == (bubble, records)
    if m >= p:
        assert measured(zero_bubble_h1(p, m)) == (pytest.approx((p - 1) / (3 * m)), [p] * p)
    if m >= 2 * p:
        assert measured(zero_bubble_v(p, m)) == (pytest.approx((p - 1) / (6 * m)), [2 * p] * p)
    for plan in (varuna(p, m), relay_over_ranks(p, m, p * v)):
        assert measured(plan)[1] == [1] * p if plan.name == "Varuna" else max(measured(plan)[1]) == 1


def test_varuna_beats_gpipe_with_recompute() -> None:
    for p in range(2, 9):
        for m in range(1, 17):
            assert simulate_pipeline(varuna(p, m)).seconds <= simulate_pipeline(gpipe(p, m, True)).seconds, (p, m)


def test_orders_for_torch_leave_recomputes_out() -> None:
    assert one_forward_one_backward(2, 2).csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert "R" not in varuna(3, 4).csv() and varuna(3, 4).csv().count("B") == 12
    with pytest.raises(ValueError, match="runs a stage on several ranks"):
        relay_over_ranks(2, 2, 4).csv()
