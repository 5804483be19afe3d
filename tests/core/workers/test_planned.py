"""What is planned for workers is what they do: bytes to the last one. Seconds are compared in `benchmarks/scale.py`."""

from dataclasses import replace
from typing import Any

import pytest
from crew import Crew
from crew_cases import Case, adafactor
from crew_network import made_and_planned, made_and_replayed, on_the_wire

SERIAL = {"ahead": 0}  # the EPS waits for each gradient: how many are under way at once is no matter of time
CASES = [
    Case("gpt2", reduce="sum", config=SERIAL, rows=(4, 4, 4, 4)),
    Case("lora_tied", reduce="sum", config=SERIAL | {"update": "deferred", "max_grad_norm": 0.1}, rows=(4, 4, 4, 4)),
    Case("gpt2_untied", reduce="sum", config={"stash": "host", "ahead": 2}, rows=(4, 4, 4, 4)),
    Case("chain", reduce="sum", config={"precision": "bf16"}, rows=(4, 4, 4, 4), optimizer=adafactor),
]
ORDERED = [
    Case("gpt2", config=SERIAL, rows=(4, 4, 4, 4)),
    Case("lora_tied", config=SERIAL | {"update": "deferred", "max_grad_norm": 0.1}, rows=(4, 4, 4, 4)),
    Case("chain", micro_batches=4, config={"stash": "host", "ahead": 2}, rows=(4, 4, 4, 4), optimizer=adafactor),
    *(Case(kind, config=SERIAL, rows=(4, 4, 4, 4)) for kind in ("bert", "tied_layers", "frozen_prefix", "t5")),
]
UNTIED = replace(CASES[2], reduce="ordered")
SLOW_CASES = [
    Case(kind, reduce="sum", config=config, rows=(4, 4, 4, 4))
    for kind in ("bert", "llama", "tied_layers", "frozen_prefix", "t5")
    for config in (SERIAL, {"resident": 1, "update": "deferred", "max_grad_norm": 0.1})
]


def assert_as_planned(answers: list[dict[str, Any]], case: Case) -> None:
    for rank, seen in enumerate(answers):
        for plan in seen["plans"]:
            names = {*seen["made"]} - ({"gradients"} if case.settings.ahead else set())
            unlike = {name: (seen["made"][name], plan[name]) for name in names if seen["made"][name] != plan[name]}
            assert not unlike, f"worker {rank}, made and planned: {unlike}"
        assert seen["made"]["sent"]["gather"][0] and seen["made"]["gradients"]


@pytest.mark.parametrize("case", [*CASES, ORDERED[0]], ids=str)
def test_two_workers_hold_gather_and_send_what_was_planned(case: Case, two: Crew) -> None:
    assert_as_planned(two.run(made_and_planned, case), case)


@pytest.mark.parametrize("case", [CASES[2], pytest.param(UNTIED, marks=pytest.mark.slow)], ids=str)
def test_a_step_of_two_workers_is_replayed(case: Case, two: Crew) -> None:
    """From the trace of one of them: it meets the other as often, over the same bytes, and updates its part as long."""
    for seen in two.run(made_and_replayed, case):
        assert seen["replayed"] == seen["made"]
        made_s, replayed_s = seen["update_s"]
        assert replayed_s == pytest.approx(made_s)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_CASES, *ORDERED[1:]], ids=str)
def test_two_workers_with_other_models(case: Case, two: Crew) -> None:
    assert_as_planned(two.run(made_and_planned, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[2], ORDERED[0], UNTIED], ids=str)
def test_four_workers_hold_gather_and_send_what_was_planned(case: Case, four: Crew) -> None:
    assert_as_planned(four.run(made_and_planned, case), case)


def assert_on_the_wire(answers: list[list[Any]]) -> None:
    for rank, seen in enumerate(answers):
        assert len(seen) == 2 + len(answers)
        for name, counted, planned in seen:
            assert counted == planned, (
                f"worker {rank}, {name}: the kernel has counted {counted}, the formula says {planned}"
            )


def test_the_formulas_of_collectives_count_what_the_kernel_counts(two: Crew) -> None:
    assert_on_the_wire(two.run(on_the_wire))


@pytest.mark.slow
def test_the_formulas_of_collectives_of_four(four: Crew) -> None:
    assert_on_the_wire(four.run(on_the_wire))
