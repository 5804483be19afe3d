"""Steps by edited plans: plain training's bits, or a refusal before anything is trained."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import stashes
from oracle import assert_equal, both
from patience import rarely
from zoo import BY_NAME

from l2l_core import PlanError, Relay, RelayConfig, StepPlan
from l2l_core.plan import Action, ScheduleSettings, check_plan


def shuffled(plan: StepPlan, rng: random.Random, swaps: int = 300) -> StepPlan:
    """A plan whose actions are in another order, which keeps all rules."""
    actions = list(plan.actions)
    for _ in range(swaps):
        i = rng.randrange(len(actions) - 1)
        actions[i], actions[i + 1] = actions[i + 1], actions[i]
        try:
            check_plan(replace(plan, actions=tuple(actions)))
        except PlanError:
            actions[i], actions[i + 1] = actions[i + 1], actions[i]
    return replace(plan, actions=tuple(actions))


@stashes
@pytest.mark.parametrize("seed", [*range(3), *map(rarely, range(3, 20))])
@pytest.mark.parametrize("name", ["chain", "gpt2", "tied_layers", "batch_norm"])
def test_any_order_that_keeps_the_rules_trains_the_same_bits(name: str, seed: int, stash: Any) -> None:
    kind, rng = BY_NAME[name], random.Random(seed)
    ahead = rng.choice([0, 1, 2])
    config = RelayConfig(
        micro_batches=rng.choice([1, 2, 3]), stash=stash, ahead=ahead, resident=rng.choice([0, 1]), keep=1
    )
    with both(kind, config) as pair:
        for step in range(2):
            batch = kind.make_batch(6, step)
            plan = shuffled(pair.relay.plan(batch), rng)
            compared = pair.step(batch, plan=plan)
            assert compared.result.plan == plan
            assert_equal([compared])


def serial(plan: StepPlan) -> StepPlan:
    """The simplest relay: one slot, every layer is loaded when it is visited."""
    actions: list[Action] = []
    for action in plan.actions:
        if action.kind == "V":
            actions.append(Action("L", action.layer, slot=0))
        if action.kind != "L":
            actions.append(action)
    turn = next(i for i, a in enumerate(actions) if a.kind == "T")
    last = next(a.layer for a in reversed(actions[:turn]) if a.kind == "V")
    assert last not in {a.layer for a in actions[turn:] if a.kind == "L"}
    return replace(plan, settings=replace(plan.settings, ahead=0, slots=1), actions=tuple(actions))


def test_a_schedule_written_by_hand_is_checked_run_and_traced() -> None:
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=2, verify="first")) as pair:
        batch = kind.make_batch(4, 0)
        plan = StepPlan.parse(str(serial(pair.relay.plan(batch))))
        compared = pair.step(batch, plan=plan)
        assert_equal([compared])
        assert compared.result.verified.startswith("equal to the step in core")
        loads = [e.layer for e in compared.result.trace.events if e.kind == "load" and e.layer != "shell"]
        assert loads == plan.loads
        assert pair.relay.config.ahead == 1, "the relay's own settings are as before"
        assert_equal([pair.step(kind.make_batch(4, 1))])


# -- refusals ------------------------------------------------------------------------------------------------------------


def weights_of(relay: Relay) -> list[torch.Tensor]:
    return [param.detach().clone() for param in relay.model.parameters()]


def refusal(plan: StepPlan | None, **given: Any) -> str:
    """The message of a step that raises ValueError and changes nothing; a step by the relay's own plan then works."""
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        batch = kind.make_batch(4, 0)
        own = pair.relay.plan(batch)
        before = weights_of(pair.relay)
        with pytest.raises(ValueError) as error:
            pair.relay.step(batch, plan=own if plan is None else plan, **given)
        assert all(map(torch.equal, before, weights_of(pair.relay)))
        assert_equal([pair.step(batch, plan=own)])  # the remedy
        return str(error.value)


def expected(settings: ScheduleSettings, layers: str = "012345") -> StepPlan:
    return StepPlan.expected(settings, [f"L00{i}" for i in layers], [f"L00{i}" for i in layers])


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "plan, message",
    [
        (expected(ScheduleSettings(3)), "3 micro-batches, and the batch is split into 2"),
        (expected(ScheduleSettings(2), "0189"), "L008, L009, which the model does not have"),
        (expected(ScheduleSettings(2, offloads=True), "01"), "offloads=True, and the relay has stash='device'"),
        (expected(ScheduleSettings(2, loss_per_micro_batch=False), "01"), "loss_per_micro_batch=False"),
        (replace(expected(ScheduleSettings(2), "01"), actions=()), "append P:shell"),
    ],
)
def test_a_plan_for_something_else_is_refused(plan: StepPlan, message: str) -> None:
    assert message in refusal(plan)


def test_a_plan_with_skipped_layers_is_refused() -> None:
    assert "with `skip`" in refusal(None, skip=[0])


def test_a_model_that_calls_other_layers_than_the_plan_stops_before_it_trains() -> None:
    """The plan visits the first two layers alone."""
    assert "calls L002, where the plan has none" in refusal(expected(ScheduleSettings(2), "01"))


def test_layers_that_need_no_backward_are_refused() -> None:
    kind = BY_NAME["frozen_prefix"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        batch = kind.make_batch(4, 0)
        before = weights_of(pair.relay)
        with pytest.raises(PlanError, match="needs no backward"):
            pair.relay.step(batch, plan=pair.relay.plan(batch))
        assert all(map(torch.equal, before, weights_of(pair.relay)))
        assert_equal([pair.step(batch)])


def test_depth_first_takes_no_plan() -> None:
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        batch = kind.make_batch(4, 0)
        plan = pair.relay.plan(batch)
        pair.relay.config = replace(pair.relay.config, schedule="depth_first")
        with pytest.raises(ValueError, match="leave out the plan"):
            pair.relay.step(batch, plan=plan)
        pair.relay.step(batch)


def test_the_programs_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "PLANS.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(program, "PLANS.md", "exec"), names)
    printed = capsys.readouterr().out
    [shown] = re.findall(r"```\n(plan .*?)```", text, re.DOTALL)
    assert printed.startswith(shown)
    assert printed.count("equal to the step in core") == 2
    assert "['shell', 'L000', 'L001', 'L002', 'L001', 'L000']" in printed
    assert "['L000', 'L001', 'L002', 'L001', 'L000']" in printed and printed.endswith("one_by_one\n")
