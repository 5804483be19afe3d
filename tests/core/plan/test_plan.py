"""Plans: their text, the check of their rules, and the plans of real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from textwrap import indent
from typing import Any

import pytest
from by_hand import stashes
from hypothesis import given, settings
from oracle import both
from random_plans import plans
from zoo import BY_NAME

from l2l_core import RelayConfig
from l2l_core.plan import Action, PlanError, ScheduleSettings, StepPlan, check_plan, relay_schedule

TEXT = """
plan micro_batches=2 ahead=1 slots=2
-   -     I0 I1
0   L000  L:L000>0 L:L001>1 | F0 F1
1   L001  L:L002>0 | F0 F1
2   L002  | F0/turn X0 B0 F1/turn X1 B1 P U
-   -     T
1'  L001  L:L000>0 | B0 B1 P U
0'  L000  | B0 B1 P U
-   -     P:shell
""".strip()
LAYERS = ["L000", "L001", "L002"]


def test_the_text_of_a_plan_is_the_one_in_the_docstring() -> None:
    assert str(StepPlan.expected(ScheduleSettings(2), LAYERS, LAYERS)) == TEXT
    assert indent(TEXT, "    ") in (relay_schedule.__doc__ or "")


@given(plans())
@settings(max_examples=300, deadline=None)
def test_plans_are_read_back_and_keep_all_rules(plan: StepPlan) -> None:
    assert StepPlan.parse(str(plan)) == plan
    check_plan(plan)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "line, message",
    [
        ("0   L000  F0", "has one `|`"),
        ("0   L000  | Y0", "'Y0' in '0   L000  | Y0' is no action"),
        ("0   L000  | F0/all", "keeps its input, or `turn` or `graph`"),
        ("zero L000 | F0", "begins with the number of a visit"),
        ("0   L000  | H:0.L001", "turns are written as"),
        ("0   L000  A | F0", "'A' in '0   L000  A | F0' lacks its layer, slot or visit: write it as in `A:L001,L002`"),
        ("0   L000  L | F0", "as in `L:L001>0`"),
        ("0   L000  L:L000 | F0", "as in `L:L001>0`"),
        ("-   -     F0", "as in `F0:L001@1`"),
        ("-   -     S0:L001", "as in `S0:L001@1`"),
    ],
)
def test_a_text_that_is_no_plan_is_refused_with_the_word(line: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        StepPlan.parse(f"plan micro_batches=1 ahead=1 slots=2\n{line}")
    assert message in str(refused.value)


@pytest.mark.all_cases
@pytest.mark.parametrize("head", ["plan depth=3", "schedule ahead=1"])
def test_a_head_that_is_no_head_is_refused(head: str) -> None:
    with pytest.raises(ValueError, match="plan"):
        StepPlan.parse(head)


# -- broken plans --------------------------------------------------------------------------------------------------------


def broken(old: str, new: str, text: str = TEXT) -> PlanError:
    """The error of a plan in whose text `old` was replaced."""
    assert text.count(old) == 1, text.count(old)
    with pytest.raises(PlanError) as refused:
        check_plan(StepPlan.parse(text.replace(old, new)))
    return refused.value


OFFLOADING = str(StepPlan.expected(ScheduleSettings(2, offloads=True), LAYERS, LAYERS))
BROKEN: list[tuple[str, str, str, str]] = [
    ("L:L002>0 |", "| L:L002>1", "L of L002", "slot 1 holds L001"),
    ("L:L002>0", "L:L002>1", "| of L001", "its weights are in no slot"),
    ("L:L002>0 |", "|", "| of L002", "its weights are in no slot"),
    ("L:L002>0", "L:L002>2", "L of L002", "there are 2 weight slots"),
    ("L:L002>0", "L:L007>0", "L of L007", "no visit of that layer follows"),
    ("L:L002>0", "L:L001>0", "L of L001", "is in a slot already"),
    ("I0 I1", "I0", "F of L000, micro-batch 1", "was not started"),
    ("I0 I1", "I0 I0 I1", "I of shell, micro-batch 0", "was started before"),
    ("I0 I1", "I0 I1 I2", "I of shell, micro-batch 2", "there are 2 micro-batches"),
    (
        "1   L001  L:L002>0 | F0 F1",
        "1   L001  L:L002>0 | F0",
        "F of L002, micro-batch 1",
        "the next visit of the micro-batch is 1",
    ),
    ("L:L002>0 | F0 F1", "L:L002>0 | F1 F0", "F of L001, micro-batch 1", "ascending order, since buffers"),
    ("2   L002  |", "3   L002  |", "| of L002, visit 3", "numbered in their order, and 2 is next"),
    ("1'  L001", "0'  L001", "| of L001, visit 0 in backward", "visit 0 is of L000"),
    (
        "1'  L001  L:L000>0 | B0 B1 P U\n",
        "1'  L001  | B0 B1 P U\n1'  L001  L:L000>0 | P\n",
        "| of L001",
        "this visit has been",
    ),
    ("F0/turn X0", "X0 F0/turn", "X of shell, micro-batch 0", "its forward is not finished"),
    (
        "F0/turn X0 B0 F1/turn X1 B1",
        "F0/turn F1/turn X1 B1 X0 B0",
        "X of shell, micro-batch 1",
        "losses run in ascending order",
    ),
    ("F0/turn X0 B0", "F0/turn B0 X0", "B of L002, micro-batch 0", "its loss has not run"),
    ("X1 B1 P U", "X1 P U B1", "P of L002", "1 of 2 micro-batches were back-propagated"),
    ("1'  L001  L:L000>0 | B0 B1", "1'  L001  L:L000>0 | B1 B0", "B of L001, micro-batch 1", "in ascending order"),
    ("X1 B1 P U", "X1 B1 U P", "U of L002", "the gradient was not pushed"),
    ("X1 B1 P U", "X1 B1 P P U", "P of L002", "was pushed before"),
    ("X1 B1 P U", "X1 B1 P U U", "U of L002", "was updated before"),
    ("-   -     T\n", "", "| of L001", "visits of backward after it"),
    ("1'  L001  L:L000>0 | B0 B1 P U\n", "", "| of L000", "its weights are in no slot"),
    ("1'  L001  L:L000>0 | B0 B1 P U\n", "1'  L001  L:L000>0 | B0 B1\n", "end of L001", "was not pushed"),
    ("X0 B0 F1", "X0 T B0 F1", "T", "a loss is missing"),
    ("-   -     P:shell", "", "at the end of the plan", "append P:shell"),
    ("P:shell", "P:shell T", "T", "ends the step"),
]


@pytest.mark.all_cases
@pytest.mark.parametrize("old, new, action, rule", BROKEN, ids=[f"{i}-{row[3][:20]}" for i, row in enumerate(BROKEN)])
def test_a_broken_rule_is_named_with_its_action(old: str, new: str, action: str, rule: str) -> None:
    error = broken(old, new)
    assert action in str(error) and rule in str(error) and "Remedy: " in str(error)


def test_a_turn_waits_for_its_stash() -> None:
    error = broken("1   L001  L:L002>0 | W0 ", "1   L001  L:L002>0 | ", OFFLOADING)
    assert "F of L001, micro-batch 0" in str(error) and "W0" in str(error)


def test_the_remedy_of_a_missing_wait_works() -> None:
    text = OFFLOADING.replace("1'  L001  L:L000>0 | W0 G1 B0", "1'  L001  L:L000>0 | G1 B0")
    with pytest.raises(PlanError, match="Remedy: wait for them before: W0") as refused:
        check_plan(plan := StepPlan.parse(text))
    fixed = list(plan.actions)
    missing = fixed[refused.value.index]
    fixed.insert(refused.value.index, missing._replace(kind="W"))
    check_plan(replace(plan, actions=tuple(fixed)))


# -- real steps ----------------------------------------------------------------------------------------------------------


def expected_to_run(kind_name: str, config: RelayConfig) -> tuple[StepPlan, StepPlan]:
    """The plan before the third step, and the plan that ran."""
    kind = BY_NAME[kind_name]
    with both(kind, config) as pair:
        for seed in range(2):
            pair.step(kind.make_batch(6, seed))
        batch = kind.make_batch(6, 2)
        planned = pair.relay.plan(batch)
        ran = pair.step(batch).result.plan
    assert ran is not None
    return planned, ran


@stashes
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("kind", ["chain", "gpt2", "tied_layers"])
def test_the_plan_of_a_regular_step_is_the_one_that_runs(kind: str, micro_batches: int, stash: Any) -> None:
    planned, ran = expected_to_run(kind, RelayConfig(micro_batches=micro_batches, stash=stash, ahead=2, keep=2))
    assert planned == ran
    check_plan(ran)


def test_frozen_layers_run_no_backward() -> None:
    """The model decides: a plan is made for layers that all train."""
    planned, ran = expected_to_run("frozen_prefix", RelayConfig(micro_batches=2))
    undone = {plan: [a.layer for a in plan.actions if a.kind == "B"] for plan in (planned, ran)}
    assert set(undone[ran]) < set(undone[planned])


def test_depth_first_has_no_plan() -> None:
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(schedule="depth_first", micro_batches=2)) as pair:
        batch = kind.make_batch(4, 0)
        assert pair.step(batch).result.plan is None
        with pytest.raises(ValueError, match="autograd decides"):
            pair.relay.plan(batch)
        remedy = pair.relay.plan(batch, RelayConfig(schedule="breadth_first", micro_batches=2))
        assert remedy.loads and repr(remedy) == str(remedy)


def actions_of(plan: StepPlan, wanted: Callable[[Action], bool]) -> list[Action]:
    return [action for action in plan.actions if wanted(action)]


def test_a_plan_loads_as_often_as_the_step() -> None:
    kind = BY_NAME["gpt2"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        result = pair.step(kind.make_batch(4, 0)).result
        assert result.plan is not None
        loaded = [e.layer for e in result.trace.events if e.kind == "load" and e.layer != "shell" and e.piece < 1]
        assert sorted(loaded) == sorted(result.plan.loads)
        computed = [e for e in result.trace.events if e.kind == "forward"]
        assert len(actions_of(result.plan, lambda a: a.kind == "F")) == len(computed)
