"""Costs of large models on many ranks: closed formulas, published tables, and the search against brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import numpy as np
import pytest

from l2l_core.pipelines import (
    LAYOUT_WAYS,
    MEGATRON_ROWS,
    MESSAGES,
    SCHEDULES,
    LayoutCost,
    LayoutSearch,
    MegatronRow,
    RankCluster,
    RankLayout,
    RankSpeeds,
    StageCost,
    TransformerShape,
    all_layouts,
    compare_ways,
    cut_layout,
    find_layout,
    interleaved,
    layout_cost,
    one_forward_one_backward,
    relay_over_ranks,
    search_layouts,
    simulate_pipeline,
    state_bytes,
)
from l2l_core.pipelines.layout_cost import _StepCost, cut_stages, layout_bounds
from l2l_core.pipelines.layout_rounds import simulate_rounds
from l2l_core.pipelines.layout_search import OFFLOADS, _is_possible
from l2l_core.pipelines.rank_layout import RECOMPUTING

SMALL = TransformerShape(layers=8, width=1024, heads=16, sequence=512, vocabulary=8192)
NO_LINK = RankCluster(
    8, node=8, link_bytes_per_s=None, node_bytes_per_s=1e30, host_bytes_per_s=1e30, update_params_per_s=1e30
)


def cost_of(layout: RankLayout, cluster: RankCluster = NO_LINK, rows: int = 32) -> LayoutCost:
    return layout_cost(SMALL, cluster, layout, rows)


# -- formulas ----------------------------------------------------------------------------------------------------------


def test_parameters_and_operations_are_those_of_megatron() -> None:
    """P = 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh), and F = 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    for row in MEGATRON_ROWS:
        s, L, h, V = row.shape.sequence, row.shape.layers, row.shape.width, row.shape.vocabulary
        assert row.shape.parameters == pytest.approx(12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h)))
        assert row.shape.step_flop == pytest.approx(96 * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h)))
        assert round(row.shape.parameters / 1e9, 1) == row.billions


def test_activations_are_those_of_korthikanti() -> None:
    """s b h (34 + 5 a s / h), (10 + 24 / t) over t ranks, and 34 with the attention recomputed."""
    s, h, a = SMALL.sequence, SMALL.width, SMALL.heads
    assert SMALL.record_bytes() == s * h * (34 + 5 * a * s / h)
    assert SMALL.record_bytes(tensor=4) == s * h * (10 + 24 / 4 + 5 * a * s / h / 4)
    assert SMALL.record_bytes(attention=False) == 34 * s * h
    assert SMALL.record_bytes(attention=False, gelu_bits=3) == s * h * (26 + 8 * 3 / 16)
    assert SMALL.record_bytes(attention=False, linear_share=0.5) == s * h * (34 - 7)


def test_the_figure_of_zero() -> None:
    """7.5 B parameters on 64 ranks (arXiv 1910.02054, figure 1)."""
    found = [sum(state_bytes(7.5e9, 64, stage).values()) / 1e9 for stage in range(4)]
    assert [round(each, 1) for each in found] == [120.0, 31.4, 16.6, 1.9]
    with pytest.raises(ValueError, match="stages of ZeRO are 1, 2 and 3"):
        state_bytes(1, 1, 4)


@pytest.mark.parametrize("row", MEGATRON_ROWS[:7], ids=lambda row: f"{row.billions:g}B")
def test_megatrons_table_is_simulated_as_stated(row: MegatronRow) -> None:
    """By other code: a cost per stage from two stated figures, and the pipeline simulated in full."""
    h, t = row.shape.width, min(8, row.model_ranks)
    p, v = row.model_ranks // t, 2 if row.model_ranks > 8 else 1
    m = row.rows * row.model_ranks // row.ranks
    compute_s = row.shape.step_flop / 4 / row.model_ranks / (0.53 * 312e12) / v
    reduce_s = 2 * 2 * 2048 * h * 2 * (t - 1) / t / 200e9 * row.shape.layers / p / v
    plan = interleaved(p, m, v) if p > 1 else one_forward_one_backward(p, m)
    cost = StageCost(forward_s=compute_s + reduce_s, backward_s=3 * compute_s + 2 * reduce_s)
    seconds = simulate_pipeline(plan, cost).seconds
    assert row.simulated_teraflop_per_s() == pytest.approx(row.shape.step_flop * row.rows / row.ranks / seconds / 1e12)


def test_megatrons_table_in_the_document() -> None:
    """`docs/STRATEGIES.md` has these digits; the two largest rows are simulated by the benchmark alone."""
    found = [f"{row.simulated_teraflop_per_s():.0f}" for row in MEGATRON_ROWS[:8]]
    assert found == "165 156 145 135 140 142 143 145".split()


@pytest.mark.parametrize(
    ("schedule", "stages", "bubble"),
    [("GPipe", 1, 3 / 8), ("1F1B", 1, 3 / 8), ("Interleaved1F1B", 2, 3 / 16)],
)
def test_bubbles_are_closed_formulas(schedule: str, stages: int, bubble: float) -> None:
    cost = cost_of(RankLayout(1, 4, 2, 2, schedule, stages), rows=32)  # 8 micro-batches
    assert cost.bubble == pytest.approx(bubble)
    busy_s = cost.seconds["compute"] + cost.seconds["wire"]
    assert cost.step_s == pytest.approx(busy_s * (1 + bubble))
    assert cost.tokens_per_s == pytest.approx(32 * SMALL.sequence / cost.step_s)


def test_seconds_without_waits_are_operations() -> None:
    flop = 3 * (8 * SMALL.layer_flop + SMALL.head_flop) * 32
    plain = cost_of(RankLayout(), rows=32)
    assert plain.seconds == pytest.approx(
        {"compute": flop / NO_LINK.flop_per_s} | dict.fromkeys(("recompute", "bubble", "wire", "host"), 0)
    )
    again = cost_of(RankLayout(recompute="layers"))
    assert again.seconds["recompute"] == pytest.approx(32 * 8 * SMALL.layer_flop / NO_LINK.flop_per_s)
    assert cost_of(RankLayout(data=8)).step_s == pytest.approx(plain.step_s / 8)
    assert cost_of(RankLayout(tensor=8)).step_s == pytest.approx(plain.step_s / 8)


def test_bytes_of_a_rank() -> None:
    record, loss = SMALL.record_bytes(), SMALL.loss_bytes
    plain = cost_of(RankLayout())
    assert plain.memory == {**state_bytes(SMALL.parameters), "activations": 8 * record + loss}
    first = cost_of(RankLayout(pipeline=4)).memory  # the first rank has 4 records of 2 layers, and the embedding
    params = 2 * SMALL.layer_parameters + SMALL.embedding_parameters
    assert first == {**state_bytes(params), "activations": 4 * 2 * record}
    assert cost_of(RankLayout(recompute="layers")).memory["activations"] == 8 * SMALL.boundary_bytes + loss + record
    offloaded = cost_of(RankLayout(offload="activations"))
    assert offloaded.memory["activations"] == 2 * record + loss and offloaded.host_bytes == 8 * record
    sharded = cost_of(RankLayout(data=8, zero=3)).memory
    assert sharded["optimizer"] == 12 * SMALL.parameters / 8
    assert sharded["weights"] == 2 * SMALL.parameters / 8 + 2 * 2 * SMALL.layer_parameters


def test_a_relay_holds_two_layers_whatever_the_depth() -> None:
    def memory(layers: int, pipeline: int) -> dict[str, float]:
        shape = replace(SMALL, layers=layers)
        return dict(layout_cost(shape, NO_LINK, RankLayout(1, pipeline, 1, schedule="Relay"), 8).memory)

    for ranks in (1, 4):
        flat = memory(8, ranks)
        assert flat == memory(32, ranks) and flat["optimizer"] == 0
        assert flat["weights"] == 2 * (2 * SMALL.layer_parameters + SMALL.embedding_parameters)


@pytest.mark.parametrize(("zero", "weights", "gradients"), [(0, 0, 2), (1, 1, 1), (2, 1, 1), (3, 2, 1)])
def test_bytes_on_the_wire_of_zero(zero: int, weights: int, gradients: int) -> None:
    """With one micro-batch: 2 (d-1)/d of the weights, and 3 with stage 3."""
    wire = cost_of(RankLayout(data=8, micro_batch=4, zero=zero)).wire
    each = 7 / 8 * 2 * SMALL.parameters
    assert wire["weights"] == pytest.approx(weights * each) and wire["weight gradients"] == pytest.approx(
        gradients * each
    )
    two = cost_of(RankLayout(data=8, micro_batch=2, zero=zero)).wire
    assert two["weights"] / (wire["weights"] or 1) == (0 if zero == 0 else 2 if zero == 3 else 1)
    assert two["weight gradients"] / wire["weight gradients"] == (2 if zero >= 2 else 1)


def test_bytes_on_the_wire_of_tensor_and_pipeline() -> None:
    boundary = SMALL.boundary_bytes
    wire = cost_of(RankLayout(pipeline=4)).wire
    assert wire["activations"] == wire["activation gradients"] == 32 * 3 * boundary / 4
    wire = cost_of(RankLayout(tensor=4)).wire  # two all-reduces per layer and direction
    assert wire["activations"] == wire["activation gradients"] == 32 * 8 * 2 * 2 * 3 / 4 * boundary
    assert wire["weights"] == wire["weight gradients"] == 0


def test_slow_links_are_waited_for() -> None:
    slow = replace(NO_LINK, node=1, link_bytes_per_s=1e9, host_bytes_per_s=1e9, update_params_per_s=1e9)
    gather_s = 7 / 8 * 2 * 8 * SMALL.layer_parameters / 1e9
    backward_s = 2 * cost_of(RankLayout(data=8)).step_s / 3 / 4
    assert cost_of(RankLayout(data=8), slow).seconds["wire"] == pytest.approx(2 * gather_s - backward_s)
    assert cost_of(RankLayout(data=8, zero=1), slow).seconds["wire"] == pytest.approx(2 * gather_s - backward_s)
    busy_s = cost_of(RankLayout(data=8)).step_s
    # two gathers and a reduction per micro-batch, behind its compute
    assert cost_of(RankLayout(data=8, zero=3), slow).step_s == pytest.approx(4 * 3 * gather_s)
    assert 4 * 3 * gather_s > busy_s
    moved_s = 2 * 32 * 8 * SMALL.record_bytes() / 1e9
    assert cost_of(RankLayout(offload="activations"), slow).step_s == pytest.approx(moved_s, rel=1e-3)
    update_s = SMALL.parameters / 1e9
    slow = replace(NO_LINK, update_params_per_s=1e9)
    plain, moved = cost_of(RankLayout()), cost_of(RankLayout(offload="weights", zero=3), slow)
    assert moved.step_s == pytest.approx(plain.step_s + update_s) and moved.seconds["host"] == pytest.approx(update_s)


# -- simulated steps ---------------------------------------------------------------------------------------------------


def test_rounds_that_are_added_are_those_of_a_whole_simulation() -> None:
    drawn = random.Random(0)
    for schedule, _ in product(("GPipe", "GPipe-recompute", "1F1B", "Interleaved1F1B", "Relay", "Varuna"), range(6)):
        p, v = drawn.randint(1, 4), 2 if schedule == "Interleaved1F1B" else 1
        m = p * drawn.randint(5, 7) + (drawn.randrange(p) if v == 1 else 0)
        forward_s, link = drawn.random() + 0.1, drawn.choice([None, 1.0, 10.0])
        cost = StageCost(forward_s, 2.5 * forward_s, forward_s, input_bytes=1, record_bytes=drawn.randint(2, 9))
        cost = replace(cost, output_bytes=drawn.randint(0, 2))
        plan = relay_over_ranks(p, m, p + drawn.randrange(3)) if schedule == "Relay" else SCHEDULES[schedule](p, m, v)
        slower = drawn.choice([1.0, 1.0, 1.5]) if schedule in ("1F1B", "Interleaved1F1B") else 1.0
        costs = [replace(cost, forward_s=forward_s * (slower if stage % 2 else 1.0)) for stage in range(plan.stages)]
        costs = (*costs[:-1], replace(costs[-1], record_bytes=cost.record_bytes + 5))
        found = simulate_rounds(schedule, p, m, v, costs, link)
        whole = simulate_pipeline(plan, costs, RankSpeeds(bytes_per_s=link))
        where = (schedule, p, m, link)
        assert found.seconds == pytest.approx(whole.seconds, rel=1e-9), where
        assert found.peak_bytes == whole.peak_bytes and found.wire_bytes == sum(whole.wire_bytes), where
        assert found.in_flight == plan.in_flight(0), where
        assert sum(found.counts.values()) == sum(map(len, plan.ranks)), where


@pytest.mark.parametrize(
    ("layout", "remedy", "mended"),
    [
        (RankLayout(data=3), "use a multiple of 3", RankLayout(data=4)),
        (RankLayout(tensor=3), "use a divisor", RankLayout(tensor=4)),
        (RankLayout(pipeline=16), "use fewer", RankLayout(pipeline=8)),
        (RankLayout(schedule="PipeDream"), "use one of GPipe", RankLayout(schedule="GPipe")),
        (RankLayout(1, 2, 2, zero=2), "use zero=1 or pipeline=1", RankLayout(1, 2, 2, zero=1)),
        (
            RankLayout(1, 2, schedule="Varuna", recompute="layers"),
            "recompute='nothing'",
            RankLayout(1, 2, schedule="Varuna"),
        ),
        (RankLayout(schedule="Relay", offload="activations"), "offload='nothing'", RankLayout(schedule="Relay")),
        (RankLayout(2, schedule="Relay"), "use tensor=1", RankLayout(schedule="Relay")),
        (RankLayout(data=2, offload="weights"), "use zero=3", RankLayout(data=2, offload="weights", zero=3)),
        (RankLayout(data=0), "1 or more", RankLayout()),
        (RankLayout(1, 2, cut=(4, 3)), "a count of 1 or more for each", RankLayout(1, 2, cut=(5, 3))),
        (RankLayout(schedule="Relay", cut=(8,)), "use cut=None", RankLayout(schedule="Relay")),
    ],
)
def test_layouts_that_do_not_divide_are_refused_with_a_remedy(
    layout: RankLayout, remedy: str, mended: RankLayout
) -> None:
    with pytest.raises(ValueError, match=remedy):
        cost_of(layout)
    assert cost_of(mended).step_s > 0


# -- the search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("gigabytes", [0.05, 0.3, 0.6, 2.0])
def test_the_search_equals_brute_force(ranks: int, gigabytes: float) -> None:
    cluster = RankCluster(ranks, gigabytes * 1e9, flop_per_s=5e12, node=4, link_bytes_per_s=4e9, host_bytes_per_s=4e9)
    every = [each for each in all_layouts(ranks) if _is_possible(SMALL, cluster, each, 32)]
    costs = [layout_cost(SMALL, cluster, cut_layout(SMALL, cluster, each, 32), 32) for each in every]
    fitting = [each.step_s for each in costs if each.device_bytes <= cluster.memory_bytes]
    found = search_layouts(SMALL, cluster, 32, all_layouts(ranks))
    assert len(every) > 50 and (found.best.step_s if found.best else None) == min(fitting, default=None)
    assert len(found.costs) + found.too_large + found.too_slow - (found.best is None) <= len(every)
    others = [each for way in LAYOUT_WAYS for each in way.candidates(ranks) if _is_possible(SMALL, cluster, each, 32)]
    costs += [layout_cost(SMALL, cluster, cut_layout(SMALL, cluster, each, 32), 32) for each in others]
    for layout, cost in zip([*every, *others], costs, strict=True):
        least_bytes, least_s = layout_bounds(SMALL, cluster, layout, 32)
        assert least_bytes <= cost.device_bytes * (1 + 1e-9) and least_s <= cost.step_s * (1 + 1e-9), str(layout)


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *inner, layers)))


def test_cuts_equal_brute_force_over_unlike_layers() -> None:
    """An embedding before the first layer, a head after the last, layers and records of all sizes, and a budget."""
    drawn = random.Random(1)
    feasible = 0
    for _ in range(60):
        n, p = drawn.randint(3, 8), drawn.randint(1, 3)
        seconds, nbytes = ([drawn.randint(1, 9) for _ in range(n)] for _ in range(2))
        first, last = drawn.randint(0, 9), drawn.randint(0, 9)
        tables = np.zeros((2, p, n + 1, n + 1))
        for rank, i, j in product(range(p), range(n + 1), range(n + 1)):
            ends = first * (rank == 0) + last * (rank == p - 1)
            tables[:, rank, i, j] = sum(seconds[i:j]) + ends, (p - rank) * sum(nbytes[i:j]) + ends
        budget = drawn.choice([30, 60, np.inf])

        def of(cut: tuple[int, ...], tables: Any = tables) -> tuple[float, float]:
            """Seconds of the slowest stage and bytes of the fullest."""
            edges = [0, *accumulate(cut)]
            return tuple(max(table[rank][edge] for rank, edge in enumerate(pairwise(edges))) for table in tables)

        fitting = [of(cut)[0] for cut in all_cuts(n, p) if of(cut)[1] <= budget]
        found = cut_stages(*tables, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            feasible += 1
            assert of(found)[0] == min(fitting) and of(found)[1] <= budget and sum(found) == n
    assert 20 < feasible < 60


TINY = TransformerShape(layers=6, width=256, heads=4, sequence=256, vocabulary=4096)  # the output counts for 1.3 layers


@pytest.mark.parametrize("link", [None, 1e8], ids=["no link", "slow link"])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_pipelines_are_cut_as_well_as_by_simulating_every_cut(schedule: str, link: float | None) -> None:
    """Within 1 % of the fastest that fits, and never worse than equal stages; what fits by any cut is found."""
    uneven = 0
    for megabytes, p, recompute in product((30, 50, 1000), (2, 3, 4), ("nothing", "layers")):
        cluster = RankCluster(4, megabytes * 1e6, 1e12, 4, 1e9, link, 1e9)
        layout = RankLayout(1, p, 1, schedule=schedule, recompute=recompute)
        found = layout_cost(TINY, cluster, cut_layout(TINY, cluster, layout, 12), 12)
        costs = [layout_cost(TINY, cluster, replace(layout, cut=cut), 12) for cut in all_cuts(6, p)]
        fitting = [cost.step_s for cost in costs if cost.device_bytes <= cluster.memory_bytes]
        if fitting:
            assert found.device_bytes <= cluster.memory_bytes and found.step_s <= 1.01 * min(fitting), str(found.layout)
            uneven += len({*found.layout.cut}) > 1
        least_bytes, least_s = layout_bounds(TINY, cluster, layout, 12)
        assert all(least_bytes <= cost.device_bytes * (1 + 1e-9) for cost in costs)
        assert all(least_s <= cost.step_s * (1 + 1e-9) for cost in costs)
    assert uneven >= 4


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "GPipe-recompute", "Varuna"])
@pytest.mark.all_cases
def test_the_bytes_by_which_layers_are_cut_are_those_that_are_simulated(schedule: str) -> None:
    """Of every cut, so that one within the budget is found whenever there is one."""
    for p, rows, recompute, offload in product((2, 3, 4), (1, 3, 12), ("nothing", "attention", "layers"), OFFLOADS):
        if schedule in RECOMPUTING and (recompute == "layers" or offload != "nothing"):
            continue  # refused
        layout = RankLayout(1, p, 1, schedule=schedule, recompute=recompute, offload=offload)
        table = _StepCost(TINY, RankCluster(4), layout, rows).stage_table()[1]
        needs = {}
        for cut in all_cuts(6, p):
            cost = layout_cost(TINY, RankCluster(4), replace(layout, cut=cut), rows)
            by_rank = [table[rank][edge] for rank, edge in enumerate(pairwise([0, *accumulate(cut)]))]
            assert max(by_rank) == pytest.approx(cost.device_bytes, rel=1e-12), str(cost.layout)
            needs[cut] = cost.device_bytes
        for budget in needs.values():
            cut = cut_layout(TINY, RankCluster(4, budget + 1), layout, rows).cut
            assert cut is not None and needs[cut] <= budget + 1


def test_the_finder_compares_cuts_and_relays() -> None:
    cluster = RankCluster(4, 1e9, 1e12, node=4, node_bytes_per_s=1e6, link_bytes_per_s=1e6, host_bytes_per_s=1e9)
    found = find_layout(TINY, cluster, 16)
    best = found.best
    assert best is not None and best.layout.pipeline == 4 and best.layout.cut == (2, 2, 1, 1)
    assert found.why(best) == "the fastest that fits; the last rank has fewer layers, since it runs the output"
    needs = cost_of(RankLayout(data=4, schedule="Relay")).device_bytes
    tight = find_layout(SMALL, RankCluster(4, needs, 5e12, 4, host_bytes_per_s=4e9), 32)
    assert tight.best is not None and tight.best.layout.is_relay
    assert any(cost.layout.is_relay and "times as long" in found.why(cost) for cost in found.costs)


def test_the_finder_explains_every_other_choice() -> None:
    cluster = RankCluster(8, 0.6e9, flop_per_s=5e12, node=4, link_bytes_per_s=4e9, host_bytes_per_s=4e9)
    found = find_layout(SMALL, cluster, 32)
    assert found.best is not None and found.why(found.best) == "the fastest that fits"
    reasons = {found.why(cost).partition(":")[0].split()[0] for cost in found.costs[1:]}
    assert {"fits;"} <= reasons and len(found.costs) > 6
    tight = find_layout(SMALL, replace(cluster, memory_bytes=0.05e9), 32)
    assert tight.best is None and all("does not fit by" in tight.why(cost) for cost in tight.costs)
    settings = {
        (cost.layout.tensor, cost.layout.pipeline, cost.layout.recompute, cost.layout.offload) for cost in found.costs
    }
    for at, values in enumerate(
        ((1, 2, 4), (1, 2, 4, 8), ("nothing", "attention", "layers"), ("nothing", "activations", "weights"))
    ):
        assert {each[at] for each in settings} == {*values}


def test_why_names_what_takes_longer() -> None:
    """Each part of the seconds, made the worst by one figure."""
    cluster = RankCluster(
        4, 1e12, flop_per_s=1e12, node=4, node_bytes_per_s=1e12, link_bytes_per_s=1e12, host_bytes_per_s=1e12
    )

    def why(layout: RankLayout, **figures: Any) -> str:
        changed = replace(cluster, **figures)
        best, other = (layout_cost(SMALL, changed, each, 32) for each in (RankLayout(data=4), layout))
        return LayoutSearch(changed, [best, other]).why(other)

    assert "each rank computes" in why(RankLayout())
    assert "recompute takes" in why(RankLayout(data=4, recompute="layers"))
    assert "bubble" in why(RankLayout(1, 4, 1, 8, "GPipe"))
    assert "wire" in why(RankLayout(tensor=4), node_bytes_per_s=1e9)
    assert "copies" in why(RankLayout(data=4, offload="activations"), host_bytes_per_s=1e8)
    assert "activations take 329 MB" in why(RankLayout(data=4, zero=2), memory_bytes=1e6)


# -- the table of methods ----------------------------------------------------------------------------------------------

# "Methods to Train Large Neural Networks" (J. Gusak, 2022): bytes of activations, weights, and their gradients that move per
# step, against data parallelism; +, =, - are its arrows. ?: not as here, where a reduction to shards is half an all-reduce.
ARROWS = {
    "recompute": "====",
    "few-bit activations": "====",
    "8-bit gradients": "===-",
    "ZeRO 1": "=+=?",
    "ZeRO 2": "=+=?",
    "ZeRO 3": "=+=?",
    "offload activations": "+?==",
    "offload weights": "=+=?",
    "relay": "++=?",
    "tensor parallel": "+=+-",
    "1F1B": "+=+-",
}


def test_ways_are_the_rows_of_the_table_and_move_what_it_says() -> None:
    row = MEGATRON_ROWS[2]
    table = compare_ways(row.shape, RankCluster(64), 128)
    methods = [*dict.fromkeys(way.method for way in LAYOUT_WAYS)]
    assert methods[:1] + methods[-2:] == ["No data parallelism", "Model parallelism", "Pipeline parallelism"]
    assert len(methods) == 14 and len({way.name for way in LAYOUT_WAYS}) == len(LAYOUT_WAYS) == 19
    moved = {
        way.name: [cost.wire[kind] + cost.copies[kind] for kind in MESSAGES]
        for way, cost in zip(table.ways, table.costs, strict=True)
        if cost is not None
    }
    assert len(moved) == 19
    for name, arrows in ARROWS.items():
        for arrow, found, base in zip(arrows, moved[name], moved["data parallel"], strict=True):
            assert arrow == "?" or {"+": found > base, "=": found == base, "-": found < base}[arrow], (name, arrows)


def test_every_way_has_a_verdict() -> None:
    row = MEGATRON_ROWS[2]
    table = compare_ways(row.shape, RankCluster(64), 128)
    verdicts = {way.name: table.verdict(at) for at, way in enumerate(table.ways)}
    assert [name for name, words in verdicts.items() if words == "the fastest that fits"] == ["tensor parallel"]
    assert verdicts["data parallel"] == "does not fit by 74.4 GB: optimizer state takes 89.6 GB"
    assert verdicts["1F1B"].startswith("fits; 1.35 times as long: ranks wait for one another (bubble)")
    alone = compare_ways(row.shape, RankCluster(1), 128)
    words = [alone.verdict(at) for at, way in enumerate(alone.ways) if way.name in ("ZeRO 3", "1F1B", "3D")]
    assert words == ["needs several ranks"] * 3
    odd = compare_ways(row.shape, RankCluster(7), 128)
    assert odd.verdict(8) == "no layout of 7 ranks divides model and rows"
