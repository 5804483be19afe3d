"""The probe measures the effect of edits on the losses of fixed batches, without an effect on training."""

from __future__ import annotations

import copy
import json
import math
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from patience import HANG_S
from sessions import Batch, changes_of, held, make_batches, make_relay, mse, train, wait_until
from torch import nn

from l2l_core import Depth, Drop, Edit, EmulatedDevice, Insert, Interpolate, LayerDrop, Move, Relay, RelayConfig, Swap
from workbench.session.loggers import JsonLines, TensorBoard
from workbench.session.probe_verdict import (
    NOT_MEASURED,
    PENDING,
    LossChange,
    ProbeLosses,
    describe_change,
    describe_loss_change,
)
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import Change

HELD_OUT = make_batches(8)[5:]  # not used for training here


def judged(now: Snapshot) -> list[LossChange]:
    """Return the effect of every change; all must be measured."""
    assert not [change.why_not for change in now.changes if change.judged is None]
    return [change.judged for change in now.changes if change.judged is not None]


def in_core(model: nn.Sequential, batch: Batch, micro_batches: int = 2) -> float:
    """Return the loss of a batch in plain torch: the mean of equal micro-batches."""
    model = copy.deepcopy(model).eval()
    parts = zip(batch[0].chunk(micro_batches), batch[1].chunk(micro_batches), strict=True)
    with torch.no_grad():
        return float(sum(mse(model(x), (x, y)) / micro_batches for x, y in parts))


# Results --------------------------------------------------------------------------------------------------------------


def test_an_identity_and_its_undo_change_nothing_to_the_bit(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 2)
        session.edit(Insert(2))
        session.undo()
        now = session.wait(HANG_S)
    assert [one.change for one in judged(now)] == [0.0, 0.0]
    assert all(one.is_same and one.verdict == "same" for one in judged(now))
    assert len(judged(now)[0].after.losses) == 3 and "0 exactly" in now.changes[0].verdict


def test_losses_equal_plain_evaluation(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 3)
        model: Any = relay.model
        layers = list(model)
        before = [in_core(model, batch) for batch in HELD_OUT]
        after = [in_core(nn.Sequential(*layers[:2], *layers[3:]), batch) for batch in HELD_OUT]
        session.edit(Drop(1))
        (found,) = judged(session.wait(HANG_S))
    assert found.before.losses == tuple(before) and found.after.losses == tuple(after)
    changes = [b - a for a, b in zip(before, after, strict=True)]
    assert found.change == pytest.approx(sum(changes) / 3)
    assert found.spread == pytest.approx(float(numpy.std(changes, ddof=1)))


def test_edits_between_two_steps_are_measured_separately(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 2)
        for edit in (Insert(2), Drop(0), Swap(0, 2)):
            session.edit(edit)
        session.undo()
        found = judged(session.wait(HANG_S))
    assert len({one.change for one in found}) == 4 and found[0].change == 0
    assert found[3].change == -found[2].change and found[3].after.losses == found[2].before.losses
    for one, next_one in zip(found, found[1:], strict=False):
        assert one.after is next_one.before, "the last measurement is reused"


def test_changed_state_is_measured_again(relay: Relay) -> None:
    """Change it by a step, settings, a function, another branch, and a write in another cell."""

    def by_hand() -> None:
        with torch.no_grad():
            relay.stack[0].params[0].add_(0.1)

    others = [
        lambda session: train(session, 1),
        lambda session: session.edit(lambda _: by_hand()),
        lambda session: session.reconfigure(micro_batches=3),
        lambda session: session.edit(lambda relay: relay.apply(Drop(0))),
        lambda session: by_hand(),
    ]
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 1)
        for number, other in enumerate(others):
            session.edit(Move(0, 1)).result(HANG_S)
            last = session.wait(HANG_S).changes[-1].judged
            other(session)
            session.wait(HANG_S)
            session.edit(Move(0, 1)).result(HANG_S)
            now = session.wait(HANG_S).changes[-1].judged
            assert now is not None and last is not None and now.before is not last.after, number
        session.fork("aside"), train(session, 1), session.switch("main"), session.discard("aside")
        assert session.edit(Swap(0, 1)).result(HANG_S)
        expected = [in_core(relay.model, batch, 3) for batch in HELD_OUT]  # type: ignore[arg-type]
        found = session.wait(HANG_S).changes[-1].judged
        assert found is not None and found.after.losses == pytest.approx(tuple(expected), abs=0)


def test_edits_of_a_schedule_are_measured(relay: Relay) -> None:
    schedule = Depth({0: 4, 1: 5, 2: 3}, grow="identity", shrink="top") + LayerDrop(0.0)
    with Session(relay, make_batches(), schedule=schedule, probe=HELD_OUT) as session:
        train(session, 3)
        now = session.wait(HANG_S)
    assert [change.step for change in now.changes] == [1, 2]
    grown, shrunk = judged(now)
    assert grown.change == 0 and grown.is_same and shrunk.change != 0
    assert [change.entry for change in now.changes] == [0, 1] == [entry.number for entry in now.journal]


def test_other_changes_are_not_measured(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 1)
        session.reconfigure(micro_batches=3)
        session.edit(lambda relay: relay.apply(Drop(0)), what="by hand")
        session.fork("aside")
        now = session.wait(HANG_S)
    assert [(change.entry, change.judged, change.verdict) for change in now.changes] == [(None, None, NOT_MEASURED)] * 3


def test_measured_edits_are_reverted(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session, make_relay() as twin:
        with Session(twin, make_batches(), probe=False) as alone:
            train(session, 2), train(alone, 2)
            effect = session.measure(Drop(1), Insert(0, init="copy")).result(HANG_S)
            number = session.snapshot().number
            assert isinstance(session.measure(Drop(slice(None))).exception(HANG_S), ValueError)
            now = session.wait(HANG_S)
            assert now.refusal is None and now.failure is None, "only the future gets the error"
            assert now.number > number and not now.busy
            assert not now.journal and not now.changes and len(now.layers) == 4 and not now.can_redo
            session.edit(Drop(1), Insert(0, init="copy"))
            assert judged(session.wait(HANG_S))[0].after.losses == effect.after.losses
            alone.edit(Drop(1), Insert(0, init="copy"))
            train(session, 2), train(alone, 2)
            assert [row.key for row in session.snapshot().layers] == [row.key for row in alone.snapshot().layers]
            assert_same_state(relay, twin)


# No effect on training ------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Layer with dropout, running statistics, and draws from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:  # like a model that draws samples in evaluation
            torch.rand(1), random.random(), numpy.random.rand()
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


def make_noisy() -> Relay:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *(Noisy() for _ in range(4)), nn.Linear(8, 1))
    config = RelayConfig(micro_batches=2)
    return Relay(model, partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), list(model)[1:5], mse, config=config)


def assert_same_state(a: Relay, b: Relay) -> None:
    """Compare every weight, buffer and optimizer state, to the bit."""
    for x, y in zip(
        [*a.model.parameters(), *a.model.buffers()], [*b.model.parameters(), *b.model.buffers()], strict=True
    ):
        assert torch.equal(x, y)
    mine, theirs = a.optimizer.state_dict(), b.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for number, state in mine["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs["state"][number][name])), (number, name)
    assert [unit.version for unit in a.stack] == [unit.version for unit in b.stack]
    assert [unit.stats for unit in a.stack] == [unit.stats for unit in b.stack] and a.steps == b.steps


def trained(probe: Any) -> tuple[Relay, Snapshot, list[Any]]:
    """Train with edits of all kinds; return the relay, the last snapshot, and draws of the generators."""
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    relay = make_noisy()
    schedule = Depth({0: 4, 3: 5}, grow="identity") + LayerDrop(0.2)
    with Session(relay, make_batches(), schedule=schedule, probe=probe) as session:
        for edit in (Insert(1, init="copy"), Drop(0), Interpolate(0, 1), Swap(0, 1)):
            train(session, 2)
            session.edit(edit).result(HANG_S)
        session.undo().result(HANG_S)
        train(session, 2)
        session.redo().result(HANG_S)
        train(session, 1)
        now = session.wait(HANG_S)
    draws = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
    return relay, now, draws


def test_training_with_a_probe_equals_training_without() -> None:
    without, seen, draws = trained(False)
    for probe in (None, HELD_OUT):
        relay, now, its_draws = trained(probe)
        with relay:
            assert len(judged(now)) == len(now.journal) > 6
            assert_same_state(relay, without)
            assert [row.loss for row in now.steps] == [row.loss for row in seen.steps]
            assert now.last is not None and now.last.step == now.step - 1, "the trace is that of the last step"
            assert changes_of(now) == changes_of(seen) and its_draws == draws
            assert all(module.training for module in relay.model.modules())
    assert {change.why_not for change in seen.changes} == {"the probe is off"}
    without.close()


# Time of the measurement ----------------------------------------------------------------------------------------------


def test_callers_do_not_wait_for_the_measurement(relay: Relay) -> None:
    """The future of an edit is resolved before the losses after it are measured; later commands run after that."""
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 1)
        order: list[int] = []
        with held(relay):  # the probe waits in the first layer
            edit = session.edit(Drop("L003"))
            session.edit(lambda relay: order.append(len(session.snapshot().changes)))
            assert not edit.done()
            assert session.snapshot().queued, "commands wait, callers do not"
        edit.result(HANG_S)
        now = session.wait(HANG_S)
        assert order == [1] and now.changes[0].judged is not None
        session.edit(Swap(0, 1))
        session.wait(HANG_S)
        measure, go_on = relay.probe, threading.Event()
        relay.probe = lambda *args: measure(*args) if go_on.wait(HANG_S) else []  # type: ignore[method-assign]
        session.edit(Drop("L002")).result(HANG_S)
        wait_until(lambda: session.snapshot().changes[-1].why_not == PENDING)
        assert session.snapshot().changes[-1].verdict == "measuring…" and len(session.snapshot().layers) == 2
        go_on.set()
        assert judged(session.wait(HANG_S))[2].change != 0


def test_a_call_of_the_relay_during_the_measurement_is_refused_and_the_remedies_work(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 1)
        session.edit(Drop("L003"))
        session.wait(HANG_S)
        measure, began, go_on = relay._runner.evaluate, threading.Event(), threading.Event()

        def measure_later(*args: Any) -> float:
            began.set()
            assert go_on.wait(HANG_S)
            return measure(*args)

        relay._runner.evaluate = measure_later  # type: ignore[method-assign]
        session.undo().result(HANG_S)
        assert began.wait(HANG_S)
        with pytest.raises(
            RuntimeError, match=r"session's measurement.* as with session\.wait\(\).*session\.edit\(lambda"
        ):
            relay.evaluate(HELD_OUT[0])
        between = session.edit(lambda relay: relay.evaluate(HELD_OUT[0]))
        go_on.set()
        loss = between.result(HANG_S)
        session.wait(HANG_S)
        assert relay.evaluate(HELD_OUT[0]) == loss


def test_a_refused_edit_costs_no_measurement_after_it(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 1)
        counted = count(relay)
        session.edit(Drop(slice(None)))
        now = session.wait(HANG_S)
        assert now.refusal is not None and not now.changes and counted == [3]
        session.edit(Drop(0)).result(HANG_S)
        assert len(judged(session.wait(HANG_S))) == 1 and counted == [3, 3], "the state before it was measured already"


def count(relay: Relay) -> list[int]:
    """Record the number of batches of each measurement from now on."""
    counted, measure = list[int](), relay.probe

    def probe(batches: Any, *edits: Edit) -> list[float]:
        counted.append(len(batches))
        return measure(batches, *edits)

    relay.probe = probe  # type: ignore[method-assign]
    return counted


def test_probe_can_be_switched_off_and_on(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 1)
        counted = count(relay)
        session.probe_on = False
        session.edit(Drop(0)).result(HANG_S)
        now = session.wait(HANG_S)
        assert now.probe is not None and not now.probe.is_on and not counted
        assert now.changes[0].verdict == "not measured: the probe is off"
        assert isinstance(session.measure(Drop(0)).exception(HANG_S), ValueError)
        session.probe_on = True
        session.edit(Drop(0)).result(HANG_S)
        assert session.wait(HANG_S).changes[1].judged is not None and counted == [3, 3]


def test_edit_is_logged_if_the_session_closes_before_its_measurement(relay: Relay) -> None:
    log = Log()
    session = Session(relay, make_batches(), probe=HELD_OUT, loggers=[log])
    train(session, 1)
    measure, times = relay.probe, list[int]()

    def probe(*args: Any) -> list[float]:
        times.append(1)
        if len(times) == 1:
            session.close(wait=False)
        return measure(*args)

    relay.probe = probe  # type: ignore[method-assign]
    session.edit(Drop(0)).result(HANG_S)
    session.close()
    (change,) = log.changes
    assert len(times) == 1 and change.why_not == "the session was closed first" and change.entry == 0
    assert session.snapshot().changes == (change,)


class Log:
    def __init__(self) -> None:
        self.changes: list[Change] = []

    def log_step(self, row: object) -> None: ...

    def log_change(self, change: Change) -> None:
        self.changes.append(change)

    def close(self) -> None: ...


# Its batches ----------------------------------------------------------------------------------------------------------


def test_first_training_batches_are_kept_by_default(relay: Relay) -> None:
    source = make_batches(6)
    expected = [tuple(part.clone() for part in batch) for batch in source]

    def refill(relay: Relay) -> None:  # like a source that reuses its memory
        for batch in source:
            batch[0].zero_()

    with Session(relay, source) as session:
        train(session, 5)
        session.edit(refill)
        session.edit(Drop(0)).result(HANG_S)
        now = session.wait(HANG_S)
    (found,) = judged(now)
    assert found.after.losses == tuple(in_core(relay.model, batch) for batch in expected[:4])  # type: ignore[arg-type]
    assert now.probe is not None and (now.probe.batches, now.probe.first_step, now.probe.is_given) == (4, 1, False)
    assert now.probe.seconds is not None and now.probe.seconds > 0


def test_repeated_batch_is_kept_once(relay: Relay) -> None:
    """Copies of one batch would have no spread, and mark a small effect as significant."""
    batch = make_batches(1)[0]
    again = tuple(part.clone() for part in batch)
    with Session(relay, [batch, again, *make_batches(2)]) as session:
        train(session, 9)
        session.edit(Drop(0)).result(HANG_S)
        now = session.wait(HANG_S)
    (found,) = judged(now)
    assert (
        len(found.after.losses) == len({*found.after.losses}) == 2 and now.probe is not None and now.probe.batches == 2
    )


def test_probe_takes_no_batch_from_the_source(relay: Relay) -> None:
    taken: list[int] = []

    def source() -> Batch:
        taken.append(relay.steps)
        return make_batches(1)[0]

    with Session(relay, source) as session:
        session.edit(Drop(0)).result(HANG_S)
        now = session.wait(HANG_S)
        assert not taken and "no batch has been trained on yet" in now.changes[0].verdict
        session.forecast().result(HANG_S)
        session.edit(Swap(0, 1)).result(HANG_S)
        now = session.wait(HANG_S)
        assert taken == [0] and now.changes[1].judged is not None and len(now.changes[1].judged.after.losses) == 1
        train(session, 2)
    assert taken == [0, 1]


def test_numpy_arrays_are_copied() -> None:
    array = numpy.ones((4, 4), dtype=numpy.float32)
    with make_relay() as relay:
        model = relay.model

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return model(torch.as_tensor(batch["x"])).square().mean()

    with Relay(model, device=EmulatedDevice(), layers=[f"{i}" for i in range(1, 5)], objective=loss) as again:
        with Session(again, [{"x": array}]) as session:
            train(session, 1)
            array[:] = 0
            session.edit(Drop(0)).result(HANG_S)
            (found,) = judged(session.wait(HANG_S))
            before = found.before.losses[0]
    with torch.no_grad():
        assert before != float(model(torch.zeros(4, 4)).square().mean())


@pytest.mark.parametrize(
    ("probe", "error", "message"),
    [
        ([], ValueError, "probe holds no batch"),
        (True, TypeError, "probe is a bool: give a list"),
        ({"x": torch.ones(2, 4)}, TypeError, r"probe is a dict: .*probe=\[batch\]"),
        (make_batches(1)[0], TypeError, r"probe is a tuple: .*probe=\[batch\]"),
        (iter(make_batches(1)), TypeError, "probe is a list_iterator"),
        (torch.ones(2, 4), TypeError, "probe is a Tensor"),
    ],
)
def test_invalid_probe_is_refused(relay: Relay, probe: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Session(relay, make_batches(), probe=probe)
    with Session(relay, make_batches()) as session:
        train(session, 1)


# When it fails --------------------------------------------------------------------------------------------------------


def test_failing_probe_does_not_stop_the_run(relay: Relay) -> None:
    wide = (torch.randn(6, 5), torch.randn(6, 1))
    with Session(relay, make_batches(), probe=[wide]) as session:
        train(session, 1)
        session.edit(Drop(0)).result(HANG_S)
        train(session, 2)
        now = session.wait(HANG_S)
    assert now.state == "idle" and now.failure is None and now.step == 3 and len(now.layers) == 3
    assert now.changes[0].why_not.startswith("RuntimeError: ") and "\n" not in now.changes[0].why_not


def test_probe_that_does_not_fit_does_not_stop_the_run() -> None:
    large = tuple(torch.cat([part] * 500) for part in make_batches(1)[0])
    with make_relay(device=EmulatedDevice(memory_bytes=10_000)) as relay:
        with Session(relay, make_batches(), probe=[large]) as session:
            train(session, 1)
            session.edit(Drop(0)).result(HANG_S)
            train(session, 2)
            now = session.wait(HANG_S)
        assert now.state == "idle" and now.step == 3
        assert now.changes[0].verdict.startswith("not measured: DeviceOutOfMemory: ")


def test_failure_of_the_probe_after_an_edit_is_shown(relay: Relay) -> None:
    with Session(relay, make_batches(), probe=HELD_OUT) as session:
        train(session, 1)
        last: Any = relay.model[4]
        session.edit(Drop("L000"), what="drop").result(HANG_S)
        session.wait(HANG_S)
        session.edit(Swap("L002", "L003"))
        session.wait(HANG_S)
        last.error = OSError("a disk is gone\nmore of it")
        session.edit(lambda relay: None)  # invalidates the last measurement
        session.edit(Swap("L002", "L003"))
        now = session.wait(HANG_S)
    assert now.changes[-1].verdict == "not measured: OSError: a disk is gone" and now.state == "idle"
    assert [change.judged is None for change in now.changes] == [False, False, True]


# Text and loggers -----------------------------------------------------------------------------------------------------


def made(before: list[float], after: list[float]) -> LossChange:
    return LossChange(ProbeLosses(tuple(before), 0.5), ProbeLosses(tuple(after), 0.5))


@pytest.mark.parametrize(
    ("before", "after", "verdict", "message"),
    [
        ([2.0, 3.0], [2.0, 3.0], "same", "2.5, no change (0 exactly)"),
        ([2.0, 3.0], [2.1, 3.12], "worse", "2.5 → 2.61, ▲ +0.11 ± 0.014 over 2 batches"),
        ([2.0, 3.0], [1.9, 2.88], "better", "2.5 → 2.39, ▼ −0.11 ± 0.014 over 2 batches"),
        ([2.0, 3.0], [2.2, 2.9], "unclear", "2.5 → 2.55, +0.05 ± 0.21 over 2 batches"),
        ([2.0, 3.0], [2.5, 2.5], "unclear", "2.5 → 2.5, +0 ± 0.71 over 2 batches"),
        ([2.0], [2.5], "unclear", "2 → 2.5, +0.5 (one batch)"),
        ([2.0, 3.0], [math.nan, 3.0], "worse", "2.5 → nan, ▲ not finite"),
        ([math.inf, 3.0], [2.0, 3.0], "better", "inf → 2.5, ▼ not finite"),
        ([math.inf, 3.0], [-math.inf, 3.0], "unclear", "inf → -inf, not finite"),
    ],
)
def test_effect_as_text(before: list[float], after: list[float], verdict: str, message: str) -> None:
    assert (made(before, after).verdict, describe_loss_change(made(before, after))) == (verdict, message)
    assert message.endswith(describe_change(made(before, after)))


def test_loggers_get_an_edit_after_its_measurement(relay: Relay, tmp_path: Path) -> None:
    log, lines = Log(), JsonLines(tmp_path / "log.jsonl")
    with Session(relay, make_batches(), loggers=[log, lines], probe=HELD_OUT) as session:
        train(session, 1)
        session.edit(Drop(0)).result(HANG_S)
        now = session.wait(HANG_S)
    assert tuple(log.changes) == now.changes and log.changes[0].judged is not None
    (row,) = [row for row in map(json.loads, lines.path.read_text().splitlines()) if row["type"] == "change"]
    assert LossChange.of_plain(row["judged"]) == log.changes[0].judged and row["entry"] == 0


def test_non_finite_losses_of_an_effect_are_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "log.jsonl")
    lines.log_change(Change(1, "− layer 0", entry=0, judged=made([1.0], [math.nan])))
    lines.close()
    assert json.loads(lines.path.read_text().splitlines()[1])["judged"]["after"]["losses"] == [None]


def test_tensorboard_gets_the_probe() -> None:
    scalars, texts = dict[str, float](), list[str]()

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            scalars[tag] = value

        def add_text(self, tag: str, words: str, step: int) -> None:
            texts.append(words)

        def flush(self) -> None: ...

    logger = TensorBoard(Writer())
    logger.log_change(Change(1, "− layer 0", entry=0, judged=made([2.0, 3.0], [2.1, 3.12])))
    logger.log_change(Change(1, "− layer 1", entry=1, why_not="the probe is off"))
    assert scalars == {"probe/loss": pytest.approx(2.61), "probe/change": pytest.approx(0.11)}
    assert texts == [
        "− layer 0 (probe: 2.5 → 2.61, ▲ +0.11 ± 0.014 over 2 batches)",
        "− layer 1 (probe: not measured: the probe is off)",
    ]
