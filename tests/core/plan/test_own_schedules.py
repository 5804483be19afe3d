"""User-defined schedules in `RelayConfig`: plain training's bits, or a refusal before anything has changed."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from by_hand import stashes
from hypothesis import given, settings
from oracle import assert_equal, both
from patience import rarely
from random_plans import plans
from small import assert_same, make_batch, make_gpt, make_relay, whole
from zoo import BY_NAME

from l2l_core import DeviceOutOfMemory, Drop, EmulatedDevice, FileShelf, PlanError, Relay, RelayConfig, StepPlan, Trace
from l2l_core.plan import (
    KINDS,
    Action,
    ScheduleFunction,
    ScheduleSettings,
    SlotTable,
    check_plan,
    serial,
    visits_of_step,
)

LAYERS = ["L000", "L001", "L002"]


def ahead_of_visits(settings: ScheduleSettings, visits: Sequence[str]) -> Iterator[Action]:
    """Load layers `ahead` visits before their own, each in the place of the layer that was visited last."""
    slots, order, previous = SlotTable(settings.slots), visits_of_step(settings, visits), None
    for i, visit in enumerate(order):
        for later in order[i : i + settings.ahead + 1]:
            yield from slots.load(later.layer, instead_of=previous)
        yield from visit.actions
        previous = visit.layer


def test_a_slot_table_loads_no_layer_twice_and_names_what_it_holds() -> None:
    slots = SlotTable(2)
    loads = [action for layer in ("a", "b", "a") for action in slots.load(layer)]
    assert [(load.layer, load.slot) for load in loads] == [("a", 0), ("b", 1)]
    with pytest.raises(ValueError, match=r"c cannot be loaded instead of None: the slots hold a, b\. Name one"):
        list(slots.load("c"))
    assert [load.slot for load in slots.load("c", instead_of="b")] == [1]
    assert not [*slots.load("c", instead_of="a")] and [load.slot for load in slots.load("b", instead_of="a")] == [0]


# -- parts of schedules --------------------------------------------------------------------------------------------------


@given(plans())
@settings(max_examples=200, deadline=None)
def test_serial_keeps_all_rules_and_needs_one_slot(expected: StepPlan) -> None:
    order = [action.layer for action in expected.actions if action.kind == "V" and not action.is_backward]
    plan = StepPlan.of(serial, expected.settings, order)
    assert StepPlan.parse(str(plan)) == plan and plan.name == "serial"
    assert {action.slot for action in plan.actions if action.kind == "L"} <= {0}
    if order:
        check_plan(plan)
        without_loads = [action for action in expected.actions if action.kind not in "AL"]
        assert [action for action in plan.actions if action.kind != "L"] == without_loads


def test_serial_as_text() -> None:
    assert str(StepPlan.of(serial, ScheduleSettings(2, ahead=0, slots=1), LAYERS)) == (
        "plan micro_batches=2 ahead=0 slots=1\n"
        "-   -     L:L000>0\n"
        "-   -     I0 I1\n"
        "0   L000  | F0 F1\n"
        "1   L001  L:L001>0 | F0 F1\n"
        "2   L002  L:L002>0 | F0/turn X0 B0 F1/turn X1 B1 P U\n"
        "-   -     L:L001>0\n"
        "-   -     T\n"
        "1'  L001  | B0 B1 P U\n"
        "0'  L000  L:L000>0 | B0 B1 P U\n"
        "-   -     P:shell"
    )


# -- steps -----------------------------------------------------------------------------------------------------------------


@stashes
@pytest.mark.parametrize("schedule", [serial, ahead_of_visits])
@pytest.mark.parametrize("name", ["chain", "batch_norm", "gpt2", "tied_layers", rarely("t5"), rarely("vit")])
def test_steps_have_the_bits_of_plain_training(name: str, schedule: ScheduleFunction, stash: Any) -> None:
    """The third batch has fewer rows than the others."""
    kind = BY_NAME[name]
    config = RelayConfig(micro_batches=3, stash=stash, ahead=2, resident=1, keep=1, schedule=schedule)
    with both(kind, config) as pair:
        for step, rows in enumerate([6, 6, 5]):
            batch = kind.make_batch(rows, step)
            plan = pair.relay.plan(batch)
            compared = pair.step(batch)
            assert_equal([compared])
            trace = compared.result.trace
            assert compared.result.plan == plan and plan.name == schedule.__name__ == trace.settings["schedule_name"]
            loads = [event.layer for event in sorted(trace.lanes["h2d"]) if event.kind == "load"]
            assert [*dict.fromkeys(loads)] == ["shell", *dict.fromkeys(plan.loads)] and len(loads) >= len(plan.loads)
        assert pair.relay.config == pair.in_core.config


@pytest.mark.parametrize(
    "settings", [dict(update="deferred", max_grad_norm=0.1), dict(update="whole"), dict(ahead=0)], ids=str
)
def test_other_settings_stay_those_of_the_relay(settings: dict[str, Any]) -> None:
    kind = BY_NAME["gpt2"]
    with both(kind, RelayConfig(micro_batches=2, schedule=serial, verify="first", **settings)) as pair:
        for step in range(2):
            compared = pair.step(kind.make_batch(4, step))
            assert_equal([compared])
            assert compared.result.verified.startswith("equal to the step in core") == (step == 0)


def test_one_loss_of_the_batch() -> None:
    kind = replace(BY_NAME["chain"], loss_over="batch")
    with both(kind, RelayConfig(micro_batches=2, schedule=serial, verify=1)) as pair:
        result = pair.relay.step(kind.make_batch(4, 0))
        assert result.verified.startswith("equal to the step in core")
        assert result.plan is not None and any(action.kind == "X" and action.k == -1 for action in result.plan.actions)


def test_a_shelf_takes_a_schedule(tmp_path: Path) -> None:
    kind = BY_NAME["chain"]
    by_shelf: list[float] = []
    for schedule in ("breadth_first", ahead_of_visits):
        folder = tmp_path / str(schedule)[:9]
        config = RelayConfig(micro_batches=2, stash="disk", seed=0, schedule=schedule)
        shelf = FileShelf(folder=folder, memory_bytes="8 MB")
        with Relay(kind.make_model(), torch.optim.AdamW, "cpu", loss=kind.loss, config=config, shelf=shelf) as relay:
            by_shelf += [relay.step(kind.make_batch(4, step)).loss for step in range(3)]
    assert by_shelf[:3] == by_shelf[3:] and len({*by_shelf}) == 3


def test_a_plan_as_schedule_runs_each_step_and_names_the_way_back() -> None:
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=2)) as pair, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fewer rows than micro-batches
        plan = pair.relay.plan(kind.make_batch(4, 0), replace(pair.relay.config, schedule=serial))
        pair.relay.config = replace(pair.relay.config, schedule=plan)
        for step in range(2):
            compared = pair.step(kind.make_batch(4, step))
            assert_equal([compared])
            assert compared.result.plan == plan
        before = whole(pair.relay)
        with pytest.raises(
            ValueError, match=r"2 micro-batches, and the batch is split into 1.*schedule='breadth_first'"
        ):
            pair.relay.step(kind.make_batch(1, 2))
        assert_same(whole(pair.relay), before)
        own = pair.relay.plan(kind.make_batch(1, 2), replace(pair.relay.config, schedule="breadth_first"))
        pair.in_core.config = replace(pair.in_core.config, micro_batches=1)
        assert_equal([pair.step(kind.make_batch(1, 2), plan=own)])


def test_edits_give_the_function_other_layers() -> None:
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=2, schedule=serial, verify=1)) as relay:
        relay.step(make_batch(0))
        relay.apply(Drop(1))
        result = relay.step(make_batch(1))
        assert result.verified.startswith("equal") and result.plan is not None
        assert result.plan.loads == ["L000", "L002", "L003", "L002", "L000"]


def test_later_steps_by_the_same_plan_are_not_metered_again() -> None:
    """Peaks of a step that replays the record equal those of the metered step."""
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=2, schedule=ahead_of_visits)) as relay:
        metered, replayed = relay.step(make_batch(0)), relay.step(make_batch(1))
        assert replayed.peak_device_bytes == metered.peak_device_bytes
        kinds = [{event.kind for event in result.trace.events} for result in (metered, replayed)]
        assert kinds[0] == kinds[1]
        record = relay._runner.pass_cache.find_step(relay._runner.pass_cache.last_kind)  # type: ignore[arg-type]
        assert record is not None
        relay.config = replace(relay.config, schedule=serial)
        assert relay._runner.pass_cache.find_step(_kind_now(relay)) is None, "memory depends on the plan"
        assert relay.verify(make_batch(2)).equal and relay.verify(make_batch(2)).equal


def _kind_now(relay: Relay) -> Any:
    _, parts = relay._runner.split(make_batch(0))
    return relay._runner.kind_of(parts, relay._runner.resolve_config(relay.config, make_batch(0)))


def test_evaluation_and_looks_go_on_by_the_relays_order() -> None:
    with (
        make_relay(make_gpt()) as plain,
        make_relay(make_gpt(), config=RelayConfig(micro_batches=2, schedule=serial)) as own,
    ):
        for relay in (plain, own):
            relay.step(make_batch(0))
        assert plain.evaluate(make_batch(1)) == own.evaluate(make_batch(1))
        assert torch.equal(plain.forward(make_batch(1))["logits"], own.forward(make_batch(1))["logits"])
        assert own.look(make_batch(1)).seconds > 0


# -- refusals ------------------------------------------------------------------------------------------------------------


def unchanged_after(relay: Relay, act: Callable[[], object], error: type[Exception], match: str) -> None:
    """`act` raises, and weights, optimizer state, buffers, counters and random generators are as before."""
    before, generators = whole(relay), (random.getstate(), numpy.random.get_state()[1].tolist())  # type: ignore[union-attr]
    with pytest.raises(error, match=match):
        act()
    assert_same(whole(relay), before)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == generators  # type: ignore[union-attr]


def without_last_load(settings: ScheduleSettings, visits: Sequence[str]) -> Iterator[Action]:
    actions = list(serial(settings, visits))
    last = max(i for i, action in enumerate(actions) if action.kind == "L")
    yield from (action for i, action in enumerate(actions) if i != last)


def first_layers(settings: ScheduleSettings, visits: Sequence[str]) -> Iterable[Action]:
    return serial(settings, visits[:2])


def draws(settings: ScheduleSettings, visits: Sequence[str]) -> Iterator[Action]:
    raise KeyError(visits[0])
    yield


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (
        without_last_load,
        PlanError,
        r"\| of L000, visit 0 in backward\): its weights are in no slot. Remedy: load it before",
    ),
    (first_layers, PlanError, r"calls L002, where the plan has none. Nothing was trained"),
    (lambda settings, visits: [], PlanError, "append P:shell"),
    (lambda settings, visits: None, TypeError, "schedule=<lambda> returned None: write it with `yield`"),
    (lambda settings, visits: [serial(settings, visits)], TypeError, "yielded <generator .* write `yield from`"),
    (lambda settings, visits: [Action("Z")], PlanError, "there is no such kind of action. Remedy: write a letter of A"),
    (draws, KeyError, "L000"),
]


@pytest.mark.parametrize("schedule, error, match", REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_a_refused_schedule_changes_nothing(schedule: Any, error: type[Exception], match: str) -> None:
    config = RelayConfig(micro_batches=2, schedule=ahead_of_visits)
    kind = BY_NAME["batch_norm"]
    with both(kind, config) as pair:
        assert_equal([pair.step(kind.make_batch(4, 0))])
        relay = pair.relay
        relay.config = replace(relay.config, schedule=schedule)
        unchanged_after(relay, lambda: relay.step(kind.make_batch(4, 1)), error, match)
        if schedule is not first_layers:
            unchanged_after(relay, lambda: relay.plan(kind.make_batch(4, 1)), error, match)
        relay.config = replace(relay.config, schedule="breadth_first")
        assert_equal([pair.step(kind.make_batch(4, 1))])


def test_layers_in_another_order_than_the_stack_need_one_step_to_be_known() -> None:
    kind = BY_NAME["albert"]  # its only layer is called several times
    with both(kind, RelayConfig(micro_batches=2, schedule=serial)) as pair:
        relay, batch = pair.relay, kind.make_batch(4, 0)
        unchanged_after(relay, lambda: relay.step(batch), PlanError, "RelayConfig.schedule='breadth_first'.")
        relay.config = replace(relay.config, schedule="breadth_first")
        assert_equal([pair.step(batch)])
        relay.config = replace(relay.config, schedule=serial)
        assert_equal([pair.step(kind.make_batch(4, 1))])


@pytest.mark.parametrize(
    "settings, match",
    [
        (dict(schedule="sideways"), "schedule='sideways': must be one of 'breadth_first', 'depth_first', a function"),
        (dict(schedule=3), "schedule=3: must be one of"),
        (dict(schedule=serial, keep="1 MB"), "keep='1 MB' with schedule=serial: .*Give keep= as a number"),
        (dict(schedule="plan nonsense"), "'nonsense' is no setting of a plan"),
    ],
    ids=["name", "number", "bytes to keep", "text"],
)
def test_settings_that_are_no_schedule(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RelayConfig(**settings)


def test_steps_that_take_no_schedule_name_a_remedy() -> None:
    kind = BY_NAME["frozen_prefix"]
    with both(kind, RelayConfig(micro_batches=2, schedule=serial)) as pair:
        relay, batch = pair.relay, kind.make_batch(4, 0)
        unchanged_after(relay, lambda: relay.step(batch), PlanError, "needs no backward .*schedule='breadth_first'")
        unchanged_after(
            relay, lambda: relay.step(batch, skip=[1]), ValueError, "with `skip` .*schedule='breadth_first'"
        )
        unchanged_after(relay, lambda: relay.forecast(batch), ValueError, "forecast with schedule=serial")
        unchanged_after(relay, lambda: relay.fit(batch), ValueError, "fit with schedule=serial")
        assert relay.forecast(batch, replace(relay.config, schedule="breadth_first")).seconds > 0
        relay.config = replace(relay.config, schedule="breadth_first")
        assert relay.fit(batch).config.micro_batches
        relay.config = pair.in_core.config = replace(pair.in_core.config, schedule="breadth_first")
        assert_equal([pair.step(batch)])


def test_a_forecast_after_a_step_does_not_take_its_costs_for_those_of_the_relay() -> None:
    """The trace of a step with a longer time between loads would give other seconds; a rehearsal has no step."""
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=2, schedule=serial)) as relay:
        for step in range(2):
            relay.step(make_batch(step))
        own = replace(relay.config, schedule="breadth_first")
        assert relay.forecast(make_batch(2), own).basis.startswith("a rehearsal")


def test_a_device_that_is_too_small_gets_settings_that_fit() -> None:
    config = RelayConfig(micro_batches=2, resident=2, keep=3, schedule=ahead_of_visits)
    with make_relay(make_gpt(), config=config) as relay:
        most = relay.step(make_batch(0)).peak_device_bytes
        relay.config = replace(relay.config, schedule="breadth_first", resident=0, keep=0, ahead=0)
        least = relay.step(make_batch(0)).peak_device_bytes
    device = EmulatedDevice((least + most) // 2)
    with Relay(make_gpt(), torch.optim.AdamW, device, config=config) as relay:
        with pytest.raises(DeviceOutOfMemory, match=r"These settings are for schedule='breadth_first'") as refused:
            relay.step(make_batch(0))
        relay.config = replace(relay.config, **refused.value.settings)
        relay.step(make_batch(0))


# -- rules, at random ----------------------------------------------------------------------------------------------------


def mutated(actions: Sequence[Action], rng: random.Random) -> tuple[Action, ...]:
    """The actions after one to three random changes."""
    changed = list(actions)
    for _ in range(rng.choice([1, 1, 2, 3])):
        i, j = rng.randrange(len(changed)), rng.randrange(len(changed))
        field, value = rng.choice(
            [
                ("layer", rng.choice(["L000", "L001", "L099", "shell", ""])),
                ("k", rng.choice([-1, 0, 1, 2, 9])),
                ("visit", rng.choice([-1, 0, 1, 5, 99])),
                ("is_backward", rng.random() < 0.5),
                ("slot", rng.choice([-1, 0, 1, 7])),
                ("keep", rng.choice(["input", "turn", "graph"])),
                ("kind", rng.choice(KINDS)),
            ]
        )
        match rng.randrange(4):
            case 0:
                del changed[i]
            case 1:
                changed.insert(j, changed[i])
            case 2:
                changed.insert(j, changed.pop(i))
            case _:
                changed[i] = changed[i]._replace(**{field: value})
    return tuple(changed)


def keeps_rules(plan: StepPlan) -> bool:
    try:
        check_plan(plan)
    except PlanError as error:
        assert "Remedy: " in str(error)
        return False
    return True


@pytest.mark.parametrize("seed", [*range(8), *map(rarely, range(8, 200))])
def test_changed_plans_are_refused_or_train_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    kind = BY_NAME[rng.choice(["chain", "tied_layers", "batch_norm", "gpt2"])]
    config = RelayConfig(
        micro_batches=2,
        stash=rng.choice(["device", "host"]),
        ahead=rng.choice([0, 1]),
        resident=rng.choice([0, 1]),
        keep=rng.choice([0, 1]),
    )
    with both(kind, config) as pair:
        batch = kind.make_batch(4, 0)
        plan = pair.relay.plan(batch)
        others = (replace(plan, actions=mutated(plan.actions, rng)) for _ in range(300))
        kept = [other for other in others if keeps_rules(other) and other != plan]
        before = whole(pair.relay)
        for step, other in enumerate(kept[:3]):
            try:
                compared = pair.step(kind.make_batch(4, step), plan=other)
            except PlanError:  # the model does not call the layers of the plan
                assert_same(whole(pair.relay), before)
                return
            assert_equal([compared])


# -- files and names -----------------------------------------------------------------------------------------------------


def test_settings_as_text_and_in_files(tmp_path: Path) -> None:
    config = RelayConfig(micro_batches=2, schedule=serial)
    assert "schedule=serial" in repr(config) and "0x" not in repr(config)
    assert json.loads(json.dumps(config.to_plain()))["schedule"] == "serial"
    assert RelayConfig.from_plain(config.to_plain(), config) == config
    with pytest.warns(UserWarning, match=r"saved with schedule=serial, a function.*relay.config = dataclasses.replace"):
        assert RelayConfig.from_plain(config.to_plain()) == RelayConfig(micro_batches=2)
    with make_relay(make_gpt(), config=config) as relay:
        trace = relay.step(make_batch(0)).trace
        trace.to_jsonl(tmp_path / "step.jsonl")
        assert Trace.from_jsonl(tmp_path / "step.jsonl").settings == trace.settings
        assert trace.settings["schedule_name"] == "serial"
        plan = relay.plan(make_batch(0))
    held = replace(config, schedule=plan)
    assert RelayConfig.from_plain(json.loads(json.dumps(held.to_plain()))) == held
    assert "schedule=serial" in repr(held) and len(repr(held)) < 400


@pytest.mark.parametrize("stored", ["function", "plan"])
def test_saves_go_on_to_the_bit(tmp_path: Path, stored: str) -> None:
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=2, schedule=ahead_of_visits, seed=3)) as relay:
        relay.step(make_batch(0))
        if stored == "plan":
            relay.config = replace(relay.config, schedule=relay.plan(make_batch(0)))
        relay.fork("other")
        relay.step(make_batch(1))
        relay.save(tmp_path)
        config, schedule = relay.config, relay.config.schedule
        relay.step(make_batch(2))
        expected = whole(relay)

    def go_on(other: Relay, expects: Any) -> None:
        assert other.config.schedule == expects and replace(other.config, schedule=schedule) == config
        other.step(make_batch(2))
        assert_same(whole(other), expected)
        other.switch("main")
        assert other.config.schedule == expects

    with Relay.load(tmp_path, make_gpt(), device=EmulatedDevice(), config=config) as relay:  # the function is given
        go_on(relay, schedule)
    with make_relay(make_gpt(), config=config) as relay:
        relay.restore(tmp_path)
        go_on(relay, schedule)
    if stored == "plan":
        with Relay.load(tmp_path, make_gpt(), device=EmulatedDevice()) as relay:
            go_on(relay, schedule)
        return
    with pytest.warns(UserWarning, match="saved with schedule=ahead_of_visits") as warned:
        relay = Relay.load(tmp_path, make_gpt(), device=EmulatedDevice())
    assert [one.filename for one in warned][0] == __file__
    with relay:
        go_on(relay, "breadth_first")


def test_settings_are_copied_with_their_function() -> None:
    config = RelayConfig(schedule=serial)
    assert copy.deepcopy(config) == config and hash(copy.copy(config)) == hash(config)
