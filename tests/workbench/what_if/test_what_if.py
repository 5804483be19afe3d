"""Simulated steps against measured ones, and properties that hold for all costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from deep_models import gpt2, padded_batch
from patience import HANG_S, wait_until
from sessions import make_batches, make_relay

from l2l_core import Drop, EmulatedDevice, Machine, Profile, Relay, RelayConfig, Shapes, Trace, simulate
from l2l_core.analysis.bounds import Bound
from workbench.session.session import Session
from workbench.what_if.answer import Answer, answer_question, measured_answer
from workbench.what_if.assumed_costs import AssumedCosts, assumed_answer
from workbench.what_if.differences import changed_settings, comparison_table, describe_differences, forecast_error
from workbench.what_if.forecast_margin import (
    DEVICE,
    NUM_FORECASTS,
    ComparedAnswer,
    ForecastRecord,
    compare_with_step,
)
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import Question
from workbench.what_if.rescale import MAX_EVENTS
from workbench.what_if.step_cache import StepCache
from workbench.what_if.what_if_picture import draw_what_if, pictured_steps

MACHINE = Machine(1e10, 1e9, 1e9, 1e9)


@cache
def traced(rows: int = 12, **settings: Any) -> Trace:
    """Return the trace of the third step of a small relay."""
    config = RelayConfig(**{"micro_batches": 4, **settings})
    with make_relay(config, EmulatedDevice()) as relay:
        generator = torch.Generator().manual_seed(0)
        batch = torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)
        return [relay.step(batch) for _ in range(3)][-1].trace


def answer(trace: Trace, **settings: Any) -> Answer:
    base = MeasuredStep.of(trace)
    return answer_question(base, replace(Question.of(base), **settings))


def formula(depth: int = 24, micro_batches: int = 4, stash: str = "device") -> Profile:
    """Return costs with a load that compute hides only with more micro-batches."""
    shapes = Shapes(
        layer_params=[1_000_000] * depth, shell_params=100_000, tokens=16, boundary_bytes=60_000,
        micro_batches=micro_batches, activation_bytes=500_000, stash=stash,
    )  # fmt: skip
    return Profile.of_shapes(shapes, MACHINE)


# -- against measured steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stash", ["device", "host"])
def test_measured_settings_give_the_same_trace_as_simulate(stash: str) -> None:
    trace = traced(stash=stash)
    found = answer(trace)
    replay = simulate(Profile.of(trace), RelayConfig(micro_batches=4, stash=stash), EmulatedDevice())
    assert found.trace.events == replay.events and found.trace.memory == replay.memory
    assert found.seconds == pytest.approx(replay.span_s) and found.overlap == pytest.approx(replay.overlap())
    assert found.by_formula == () and found.per_layer == 1
    assert (
        found.device_bytes == measured_answer(trace).device_bytes
        and found.host_bytes == measured_answer(trace).host_bytes
    )


def test_bytes_without_overlap_are_near() -> None:
    for stash in ("device", "host"):
        found, measured = answer(traced(stash=stash), ahead=0), measured_answer(traced(stash=stash, ahead=0))
        assert found.peak_device_bytes == pytest.approx(measured.peak_device_bytes, rel=0.01)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize(
    "settings, real",
    [
        ({"ahead": 3}, {"ahead": 3}),
        ({"micro_batches": 8, "same_batch": False}, {"micro_batches": 8, "rows": 24}),
        ({"micro_batches": 2, "same_batch": False}, {"micro_batches": 2, "rows": 6}),
        ({"h2d_bytes_per_s": 1e6}, {}),
    ],
    ids=str,
)
def test_bytes_on_the_device_are_exact_for(stash: str, settings: dict[str, Any], real: dict[str, Any]) -> None:
    assert (
        answer(traced(stash=stash), **settings).device_bytes
        == measured_answer(traced(stash=stash, **real)).device_bytes
    )


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_residuals_of_compression_are_exact(update: str) -> None:
    trace = traced(compress="int8", update=update)
    assert (
        answer(trace, ahead=3).device_bytes
        == measured_answer(traced(compress="int8", update=update, ahead=3)).device_bytes
    )
    now, deeper = answer(trace), answer(trace, depth=8)
    copies = {"eager": 1, "deferred": 2}[update]  # 4 more layers of 8 x 8 weights and a bias, times copies
    more = deeper.device_bytes["gradients"] - now.device_bytes["gradients"]
    assert more == pytest.approx(copies * 4 * 4 * 72, rel=0.15)


@pytest.mark.parametrize(
    "before, settings",
    [
        ({"stash": "device"}, {"stash": "host"}),
        ({"stash": "host"}, {"stash": "device"}),
        ({}, {"precision": "bf16"}),
        ({"precision": "bf16"}, {"precision": "fp32"}),
        ({}, {"micro_batches": 2}),
        ({"stash": "host"}, {"micro_batches": 2}),
    ],
    ids=str,
)
def test_bytes_by_formula_are_near(before: dict[str, Any], settings: dict[str, Any]) -> None:
    found, measured = answer(traced(**before), **settings), measured_answer(traced(**{**before, **settings}))
    assert found.peak_device_bytes == pytest.approx(measured.peak_device_bytes, rel=0.2)
    assert found.peak_host_bytes == pytest.approx(measured.peak_host_bytes, rel=0.2)
    for fixed in ("weights", "gradients"):
        assert found.device_bytes[fixed] == measured.device_bytes[fixed], "slots and buffers are exact"
    assert found.by_formula


@pytest.mark.parametrize("stash", ["device", "host"])
def test_copies_with_another_number_of_micro_batches_are_exact(stash: str) -> None:
    found, measured = (
        answer(traced(stash=stash), micro_batches=8, same_batch=False).trace,
        traced(24, stash=stash, micro_batches=8),
    )
    for lane in ("compute", "h2d", "d2h", "eps"):
        assert [(e.kind, e.layer, e.k, e.nbytes, e.visit) for e in found.lanes[lane]] == [
            (e.kind, e.layer, e.k, e.nbytes, e.visit) for e in measured.lanes[lane]
        ]


# -- resident weights and kept graphs ----------------------------------------------------------------------------------

RESIDENT_SETTINGS = [
    ({}, {"resident": 2}),
    ({}, {"resident": 1, "keep": 3}),
    ({}, {"resident": 9, "keep": 9}),
    ({"resident": 1, "keep": 3}, {"resident": 0, "keep": 0}),
    ({"resident": 9, "keep": 9}, {"keep": 2}),
    ({"resident": 1, "keep": 3}, {"ahead": 0}),  # room for fewer graphs
]


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("before, settings", RESIDENT_SETTINGS, ids=str)
def test_resident_weights_and_kept_graphs_are_near(
    before: dict[str, Any], settings: dict[str, Any], stash: str
) -> None:
    found, measured = (
        answer(traced(stash=stash, **before), **settings),
        measured_answer(traced(stash=stash, **{**before, **settings})),
    )
    assert found.question == measured.question
    loads = [[(e.layer, e.nbytes) for e in a.trace.lanes["h2d"] if e.kind == "load"] for a in (found, measured)]
    assert loads[0] == loads[1]
    assert found.device_bytes["weights"] == measured.device_bytes["weights"], "slots are exact"
    assert found.peak_device_bytes == pytest.approx(measured.peak_device_bytes, rel=0.02)
    kept = [MeasuredStep.of(a.trace).num_kept_graphs for a in (found, measured)]
    assert kept[0] == kept[1] and found.question.kept == kept[0]
    assert any("a recompute as long as forward" in words for words in found.by_formula) == (
        "resident" not in settings or "keep" in settings
    )


def test_graphs_of_a_transformer_are_exact_from_a_step_that_kept_none() -> None:
    def run(**settings: Any) -> Trace:
        config = RelayConfig(micro_batches=3, **settings)
        with Relay(gpt2(4), partial(torch.optim.AdamW, lr=1e-3), EmulatedDevice(), config=config) as relay:
            return [relay.step(padded_batch(3)) for _ in range(2)][-1].trace

    streams, keeps = run(), run(resident=2, keep=4)
    for trace, other, settings in (
        (streams, keeps, {"resident": 2, "keep": 4}),
        (keeps, streams, {"resident": 0, "keep": 0}),
    ):
        found, measured = answer(trace, **settings), measured_answer(other)
        assert found.peak_device_bytes == measured.peak_device_bytes
        assert found.device_bytes["activations"] == measured.device_bytes["activations"]
    deeper = answer(streams, resident=2, keep=4, depth=8), answer(keeps, depth=8)
    assert deeper[0].device_bytes == deeper[1].device_bytes


def test_a_kept_graph_saves_one_forward() -> None:
    profile, micro_batches = formula(depth=6), 4
    compute_s = [
        answer_question(profile, replace(Question.of(profile), resident=4, keep=n)).summary.busy_s["compute"]
        for n in (0, 1, 4, 6, 9)
    ]
    forward_s = [op.seconds for turn in profile.turns for op in turn.ops if op.kind == "forward"][0]
    saved = [(compute_s[0] - each) / (micro_batches * forward_s) for each in compute_s]
    assert saved == pytest.approx([0, 0, 3, 5, 5]), "the graph of the last layer is always kept"


@pytest.mark.parametrize("stash", ["device", "host"])
def test_merged_layers_keep_as_many_graphs(stash: str) -> None:
    trace = traced(stash=stash)
    plain, kept = answer(trace, depth=1000), answer(trace, depth=1000, resident=500, keep=400)
    assert kept.per_layer > 1 and kept.trace.settings["resident"] == 500
    graph = 96  # bytes per layer and micro-batch: three rows of eight numbers
    nbytes = kept.device_bytes["activations"] - plain.device_bytes["activations"]
    assert nbytes == pytest.approx(399 * 4 * graph, rel=0.02)
    assert kept.summary.busy_s["h2d"] < plain.summary.busy_s["h2d"]
    assert kept.summary.busy_s["compute"] < plain.summary.busy_s["compute"]


def test_a_guess_has_room_for_graphs_too(session: Session) -> None:
    now = session.snapshot()
    plain = assumed_answer(AssumedCosts.of(now), Question.next_of(now))
    kept = assumed_answer(AssumedCosts.of(now), replace(Question.next_of(now), resident=2, keep=4))
    assert kept.device_bytes["activations"] > plain.device_bytes.get("activations", 0)
    assert kept.summary.busy_s["compute"] < plain.summary.busy_s["compute"]


# -- depth, width, and sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("depth", [1, 5, 40])
def test_a_stack_by_repetition_is_that_of_the_shapes(stash: str, depth: int) -> None:
    found = answer_question(formula(stash=stash), Question(depth=depth, micro_batches=4, stash=stash))
    measured = simulate(formula(depth, stash=stash), RelayConfig(micro_batches=4, stash=stash))
    assert found.seconds == pytest.approx(measured.span_s)
    for lane in ("compute", "h2d", "d2h", "eps"):
        shapes = [[(e.kind, e.k, e.nbytes, e.visit) for e in t.lanes[lane]] for t in (found.trace, measured)]
        assert shapes[0] == shapes[1], lane


def test_a_deeper_measured_step_loads_and_updates_every_layer_once_more_and_visits_are_numbered() -> None:
    found = answer(traced(), depth=7).trace
    forward = [e for e in found.lanes["compute"] if e.kind == "forward"]
    assert len({e.layer for e in forward}) == 7 and sorted({e.visit for e in forward}) == list(range(7))
    backward = [e for e in found.lanes["compute"] if e.kind == "backward"]
    assert [*dict.fromkeys(e.layer for e in backward)] == [*dict.fromkeys(e.layer for e in forward)][::-1]
    assert sorted({e.visit for e in backward}) == list(range(7, 14))
    assert len({e.layer for e in found.lanes["eps"] if e.kind == "update"}) == 8, "with the shell"


def test_twice_the_width_is_four_times_the_weights_and_the_work() -> None:
    before, now = answer(traced()), answer(traced(), width=2.0)
    loads = [sum(e.nbytes for e in a.trace.lanes["h2d"] if e.layer.startswith("L")) for a in (before, now)]
    assert loads[1] == 4 * loads[0]
    compute_s = [
        sum(e.stop_s - e.start_s for e in a.trace.lanes["compute"] if e.kind == "forward") for a in (before, now)
    ]
    assert compute_s[1] == pytest.approx(4 * compute_s[0])
    assert now.device_bytes["stash"] == pytest.approx(2 * before.device_bytes["stash"], abs=2)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("depth, micro_batches", [(1000, 4), (1000, 32), (24, 64)])
def test_long_steps_are_simulated_with_few_events_and_similar_results(
    stash: str, depth: int, micro_batches: int
) -> None:
    question = Question(depth=depth, micro_batches=micro_batches, stash=stash, same_batch=False)
    found = answer_question(formula(stash=stash), question)
    assert found.trace.counts[0] < 1.5 * MAX_EVENTS
    measured = simulate(formula(depth, micro_batches, stash), RelayConfig(micro_batches=micro_batches, stash=stash))
    assert found.seconds == pytest.approx(measured.span_s, rel=0.05)
    assert found.trace.busy_s("compute") == pytest.approx(measured.busy_s("compute"))
    for lane in ("h2d", "d2h"):
        moved = [sum(e.nbytes for e in t.lanes[lane]) for t in (found.trace, measured)]
        assert moved[0] == pytest.approx(moved[1], rel=0.02)


def test_a_measured_step_of_a_thousand_layers_needs_as_much_memory_with_the_stash_on_the_host() -> None:
    trace = traced(stash="host")
    deep = answer(trace, depth=1000)
    assert deep.peak_device_bytes == measured_answer(trace).peak_device_bytes, "flat in depth"
    assert deep.per_layer > 1 and any("layers" in words for words in deep.by_formula)
    on_device = answer(traced(), depth=1000)
    grown = (on_device.device_bytes["stash"] - answer(traced(), depth=500).device_bytes["stash"]) / 500
    assert grown == pytest.approx(MeasuredStep.of(traced()).boundary_bytes * 4, rel=0.3), (
        "one input per layer and micro-batch"
    )


# -- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_faster_link_is_never_slower_and_moves_the_same(stash: str) -> None:
    trace = traced(stash=stash)
    found = [answer(trace, h2d_bytes_per_s=s, d2h_bytes_per_s=s) for s in (1e4, 1e5, 1e6, 1e7)]
    assert all(a.seconds >= b.seconds for a, b in zip(found, found[1:], strict=False))
    assert found[0].seconds > 2 * found[-1].seconds
    assert len({sum(e.nbytes for e in a.trace.lanes["h2d"]) for a in found}) == 1


def test_more_layers_ahead_need_one_more_slot_each() -> None:
    nbytes = [answer(traced(), ahead=n).device_bytes["weights"] for n in range(5)]
    steps = {b - a for a, b in zip(nbytes, nbytes[1:], strict=False)}
    assert steps == {int(MeasuredStep.of(traced()).largest_bytes)}


def test_a_link_without_limit_where_one_was_measured_takes_no_time() -> None:
    profile = replace(formula(), settings={**formula().settings, "h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9})
    found = answer_question(profile, replace(Question.of(profile), h2d_bytes_per_s=None))
    assert found.trace.busy_s("h2d") == 0 and found.trace.busy_s("d2h") > 0
    assert found.trace.settings["h2d_bytes_per_s"] is None and str(found.bound)


def test_a_budget_that_does_not_suffice_is_named() -> None:
    before = measured_answer(traced())
    found = answer(traced(), memory_bytes=float(before.peak_device_bytes - 1))
    assert not found.fits and "too much" in str(found)
    assert any("does not fit" in line for line in describe_differences(before, found))
    assert answer(traced(), memory_bytes=float(before.peak_device_bytes)).fits


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "settings, text",
    [
        ({"depth": 0}, "depth=0: must be an integer from 1"),
        ({"depth": 2.5}, "depth=2.5: must be an integer"),
        ({"micro_batches": 10**9}, "must be an integer from 1 to 4,096"),
        ({"width": 0.0}, "width=0.0: must be a positive factor"),
        ({"width": math.nan}, "width=nan"),
        ({"ahead": -1}, "ahead=-1"),
        ({"resident": -1}, "resident=-1"),
        ({"keep": 0.5}, "keep=0.5"),
        ({"stash": "tape"}, "stash='tape': must be one of 'device', 'host'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"h2d_bytes_per_s": 0.0}, "h2d_bytes_per_s=0.0: must be positive, or None"),
        ({"memory_bytes": -1.0}, "memory_bytes=-1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        Question(**{"depth": 4, **settings})


def test_values_that_are_not_steps_are_refused() -> None:
    with pytest.raises(TypeError, match="is not a step"):
        answer_question("step 3", Question(depth=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a whole training step"):
        answer_question(Trace(), Question(depth=1))


# -- sentences and figures -------------------------------------------------------------------------------------------


def test_sentences_describe_differences_and_causes() -> None:
    profile = formula()
    slow = answer_question(profile, replace(Question.of(profile), h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8))
    fast = answer_question(profile, replace(Question.of(profile), h2d_bytes_per_s=1e11, d2h_bytes_per_s=1e11))
    assert slow.seconds > fast.seconds
    assert "the link is hidden now" in describe_differences(slow, fast)[0]
    assert "the link is no longer hidden" in describe_differences(fast, slow)[0]
    assert describe_differences(slow, slow)[0].endswith("as long as before (0%).")
    assert changed_settings(slow.question, replace(slow.question, depth=30, micro_batches=8, same_batch=False)) == [
        "layers 24 → 30", "micro-batches 4 → 8", "of a batch that grows with them",
    ]  # fmt: skip
    moved = describe_differences(measured_answer(traced(stash="host")), answer(traced(stash="host"), stash="device"))
    assert any("the stash stays there" in line for line in moved)


def compared(trace: Trace, **settings: Any) -> ComparedAnswer:
    base = MeasuredStep.of(trace)
    return compare_with_step(base, replace(Question.of(base), **settings))


def test_figures_are_those_of_the_steps() -> None:
    found = compared(traced(), ahead=3)
    assert found.was is not None
    rows = {row[0]: row[1:] for row in comparison_table(found).rows}
    assert rows["· gradients"][3] == "=" and rows["· weights"][3].startswith("+")
    assert list(rows["device at its peak"][:2]) == [
        f"{n / 1000:.3g} kB" for n in (found.was.peak_device_bytes, found.now.peak_device_bytes)
    ]
    alone = comparison_table(ComparedAnswer(found.now))
    assert all(row[1] == "–" and not row[3] for row in alone.rows)


def test_nothing_changed_makes_no_difference() -> None:
    for settings in ({}, {"stash": "host"}, {"ahead": 0}):
        found = compared(traced(**settings))
        assert found.was is not None and found.measured is not None
        assert found.now.seconds == found.was.seconds and not found.measured.simulated
        assert describe_differences(found.was, found.now, found.margin)[0].endswith("as long as before (0%).")
        assert {row[-1] for row in comparison_table(found).rows[:-1]} == {"="}


def test_the_margin_is_the_error_of_the_last_forecasts() -> None:
    step, record = measured_answer(traced()), ForecastRecord()
    forecast = answer(traced())
    before = record.margin(forecast, step)
    assert before.source == "the simulation against step 3, measured"
    assert before.shares["step"] == pytest.approx(abs(forecast.seconds / step.seconds - 1))
    assert before.text(DEVICE, forecast) == "± 0", "bytes are exact"
    for _ in range(NUM_FORECASTS + 2):
        record.add(forecast, step)
    record.add(answer(traced(), ahead=2), step)  # of another step: left out
    after = record.margin(forecast, step)
    assert after.source == f"the last {NUM_FORECASTS} forecasts against the measured steps"
    assert after.shares == pytest.approx(before.shares)
    note = comparison_table(ComparedAnswer(forecast, forecast, step, after)).note
    assert f"±: mean error of the last {NUM_FORECASTS} forecasts" in note and "Step 3, measured: " in note


def test_a_forecast_is_compared_with_its_step_only() -> None:
    step = measured_answer(traced())
    assert "(exact)" in forecast_error(answer(traced()), step) and forecast_error(answer(traced()), step).startswith(
        "step 3"
    )
    assert forecast_error(answer(traced(), ahead=2), step) == "", "another step"


def test_the_picture_has_both_steps_on_one_axis() -> None:
    found = compared(traced(stash="host"), depth=1000, memory_bytes=1e4)
    for each in (found, ComparedAnswer(found.now)):
        drawn = draw_what_if(*pictured_steps(each))
        assert len(drawn.encode()) < 60_000 and "nan" not in drawn
        text = "".join(ElementTree.fromstring(drawn).itertext())
        assert "what if, simulated" in text and "budget 10 kB" in text
        assert ("settings of step 3, simulated" in text) == (each.was is not None)


# -- sessions --------------------------------------------------------------------------------------------------------


@pytest.fixture
def session() -> Iterator[Session]:
    with make_relay() as relay, Session(relay, make_batches()) as made:
        yield made


def test_graphs_kept_by_bytes_become_a_number_of_layers(session: Session) -> None:
    session.reconfigure(resident=2, keep="1 GB")
    assert Question.next_of(session.snapshot()).keep == 0, "unknown before the first step"
    session.step()
    wait_until(lambda: session.snapshot().step == 1)
    assert Question.next_of(session.snapshot()).keep == 4


def test_a_guess_before_the_first_step_is_marked(session: Session) -> None:
    now = session.snapshot()
    found = assumed_answer(AssumedCosts.of(now), Question.next_of(now))
    assert found.guessed and "assumed" in found.basis and found.seconds > 0 and found.question.depth == 4
    deeper = assumed_answer(AssumedCosts.of(now), replace(Question.next_of(now), depth=8))
    assert deeper.seconds > found.seconds


def test_measured_settings_need_no_formula(session: Session) -> None:
    cache = StepCache()

    def train(**settings: Any) -> Trace:
        session.reconfigure(**settings)
        session.step()
        now = session.wait(HANG_S)
        cache.add(now)
        assert now.last is not None
        return now.last

    first = train(stash="device")
    other = train(stash="host", micro_batches=3)
    question = replace(Question.of(first), h2d_bytes_per_s=1e6)
    assert cache.nearest(question).trace is first
    assert cache.nearest(Question.of(other)).trace is other and cache.last_step().measured.trace is other
    assert answer_question(cache.nearest(question), question).by_formula == ()
    session.edit(Drop("L001"))
    shorter = train()
    assert cache.nearest(question).trace is shorter, "steps of another stack are forgotten"


def test_bounds_are_those_of_the_trace() -> None:
    found = answer(traced(), h2d_bytes_per_s=1e5)
    assert found.bounds == found.trace.bound_by() and isinstance(found.bound, Bound)
    assert found.bound.exposed_s == max(b.exposed_s for b in found.bounds if b.lane != "compute")


def test_a_transformer_is_answered_to_the_byte() -> None:
    def run(depth: int, micro_batches: int) -> Trace:
        config = RelayConfig(micro_batches=micro_batches)
        with Relay(gpt2(depth), partial(torch.optim.AdamW, lr=1e-3), EmulatedDevice(), config=config) as relay:
            return [relay.step(padded_batch(micro_batches)) for _ in range(2)][-1].trace

    trace = run(3, 3)
    for settings, real in (({"depth": 7}, (7, 3)), ({"depth": 1}, (1, 3)), ({"micro_batches": 5}, (3, 5))):
        found = answer(trace, same_batch=False, **settings)
        assert found.device_bytes == measured_answer(run(*real)).device_bytes, settings
        assert min(n for sample in found.trace.memory for n in sample.bytes_by_category.values()) > 0


# -- adapters --------------------------------------------------------------------------------------------------------


@cache
def traced_adapters(rows: int = 12, **settings: Any) -> Trace:
    """Return the trace of the third step of a relay that trains one bias per layer and no shell parameter."""
    relay = make_relay(RelayConfig(**{"micro_batches": 4, **settings}), EmulatedDevice())
    with relay:
        for name, param in relay.model.named_parameters():
            param.requires_grad_(any(name.startswith(unit.name) for unit in relay.stack) and name.endswith("bias"))
        generator = torch.Generator().manual_seed(0)
        batch = torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)
        return [relay.step(batch) for _ in range(3)][-1].trace


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("settings", [{"ahead": 3}, {"ahead": 0}, {"precision": "bf16"}], ids=str)
def test_gradients_of_adapters_are_exact_with_other_settings(stash: str, settings: dict[str, Any]) -> None:
    found = answer_question(
        base := MeasuredStep.of(traced_adapters(stash=stash)), replace(Question.of(base), **settings)
    )
    measured = measured_answer(traced_adapters(stash=stash, **settings))
    assert found.device_bytes["gradients"] == measured.device_bytes["gradients"] < measured.device_bytes["weights"] / 3
    pushes = [sum(e.nbytes for e in a.trace.lanes["d2h"] if e.kind == "push") for a in (found, measured)]
    assert pushes[0] == pushes[1] > 0


def test_a_guess_uses_the_trained_shares() -> None:
    def pushed(costs: AssumedCosts, **settings: Any) -> tuple[int, int]:
        found = assumed_answer(costs, replace(Question.next_of(now), **settings))
        moved = sum(e.nbytes for e in found.trace.lanes["d2h"] if e.kind == "push")
        return moved, found.device_bytes["gradients"]

    with make_relay() as relay, Session(relay, make_batches()) as session:
        whole = AssumedCosts.of(now := session.snapshot())
        bytes_of_all, _ = pushed(whole)
        assert bytes_of_all == 4 * (4 * whole.layer_params[0] + whole.shell_params)
    with make_relay() as relay:
        relay.model.requires_grad_(False)
        relay.stack[1].params[0].requires_grad_(True)
        size = relay.stack[1].params[0].numel()
        with Session(relay, make_batches()) as session:
            costs = AssumedCosts.of(now := session.snapshot())
    assert costs.layer_trained == (0, size, 0, 0) and costs.shell_trained == 0
    assert pushed(costs) == (4 * size, 8 * size)
    assert pushed(costs, depth=8) == (2 * 4 * size, 8 * size)
    assert pushed(costs, depth=1)[0] == 4 * size, "something is trained at any depth"


def test_steps_that_train_other_weights_are_forgotten_and_need_other_bytes_in_core(session: Session) -> None:
    """Some parameters of each layer are frozen, so no layer is frozen as a whole."""
    cache = StepCache()

    def train() -> Any:
        session.step()
        cache.add(now := session.wait(HANG_S))
        return now

    session.reconfigure(stash="device")
    first = train()
    session.reconfigure(stash="host")
    second = train()
    assert cache.nearest(Question.of(first.last)).trace is first.last
    for unit in session.relay.stack:
        for param in unit.params:
            param.requires_grad_(param.dim() < 2)
    other = train()
    assert not any(row.frozen for row in other.layers)
    assert cache.nearest(Question.of(first.last)).trace is other.last, "the first trained other weights"
    assert 0 < other.in_core_bytes < second.in_core_bytes
