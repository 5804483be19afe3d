"""Failures of steps and batches: display, retry and skip."""

from __future__ import annotations

import gc
import time
from typing import Any
from weakref import ref

import pytest
import torch
from patience import HANG_S
from sessions import Batch, assert_equal, make_batches, make_relay, weights_of
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig, TornStep
from workbench.pictures import failed_trace
from workbench.session.session import Session


def test_failed_step_is_shown_and_its_batch_tried_again(relay: Relay) -> None:
    batches = make_batches()
    with make_relay() as plain:
        expected = [plain.step(batch).loss for batch in batches[:2]]
    with Session(relay, batches) as session:
        session.step()
        before = session.wait(HANG_S)
        weights = weights_of(relay)
        relay.model[2].error = RuntimeError("no luck in this layer")
        session.run(3)
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.step == before.step == 1
        assert now.failure is not None and (now.failure.step, now.failure.during) == (2, "step")
        assert "no luck in this layer" in now.failure.message and "in forward" in now.failure.traceback
        assert "tries the same batch again" in now.failure.after
        assert_equal(weights_of(relay), weights)
        relay.model[2].error = None
        session.run()
        now = session.wait(HANG_S)
    assert [row.loss for row in now.steps[:2]] == expected
    assert (now.state, now.done, now.failure) == ("idle", 3, None)


def test_failed_batch_can_be_skipped(relay: Relay) -> None:
    bad = (torch.full((6, 4), float("nan")), torch.zeros(6, 1))
    with Session(relay, [bad, *make_batches(2)]) as session:
        session.run(2)
        assert session.wait(HANG_S).state == "failed"
        session.run()
        assert session.wait(HANG_S).state == "failed"
        session.skip()
        session.run()
        now = session.wait(HANG_S)
    assert (now.state, now.done) == ("idle", 2)


def test_batch_taken_for_a_forecast_is_not_skipped(relay: Relay) -> None:
    first, second = make_batches(2)
    with make_relay() as plain:
        expected = [plain.step(batch).loss for batch in (first, second)]
    with Session(relay, iter([first, second])) as session:
        session.forecast().result(20)
        session.skip()
        session.run(2)
        now = session.wait(20)
    assert [row.loss for row in now.steps] == expected


def test_torn_step_is_shown_and_its_batch_is_used(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(3)
    taken: list[int] = []

    def step(batch: Batch, **options: Any) -> Any:
        taken.append(next(i for i, one in enumerate(batches) if one is batch))
        if len(taken) == 1:
            raise TornStep("torn after the update of layer 3", ["L003"])
        return original(batch)

    original = relay.step
    monkeypatch.setattr(relay, "step", step)
    with Session(relay, batches) as session:
        session.run(2)
        now = session.wait(HANG_S)
        assert now.failure is not None and "counts as used" in now.failure.after
        session.run()
        session.wait(HANG_S)
    assert taken == [0, 1, 2]


def test_failed_source_of_batches_is_tried_again(relay: Relay) -> None:
    calls: list[int] = []

    def batch() -> Batch:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("disk asleep")
        return make_batches(1)[0]

    with Session(relay, batch) as session:
        session.run(2)
        now = session.wait(HANG_S)
        assert now.failure is not None and (now.failure.during, now.failure.error) == ("batch", "OSError")
        session.run()
        assert session.wait(HANG_S).done == 2


def test_tensors_of_a_failed_step_are_freed(relay: Relay) -> None:
    held: list[ref[torch.Tensor]] = []

    def fail(layer: nn.Module, args: tuple[torch.Tensor]) -> None:
        held.append(ref(args[0]))
        raise RuntimeError("no room")

    gc.collect()
    gc.disable()
    hook = relay.model[2].register_forward_pre_hook(fail)
    try:
        with Session(relay, make_batches()) as session:
            session.step()
            assert session.wait(HANG_S).state == "failed"
            deadline_s = time.monotonic() + HANG_S
            while held[0]() is not None and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert held[0]() is None, "it would occupy device memory"
    finally:
        gc.enable()
        hook.remove()


def test_error_without_readable_message_is_shown(relay: Relay) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("nothing to say")

    relay.model[2].error = Mute()
    with Session(relay, make_batches()) as session:
        session.step()
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.failure is not None and now.failure.error == "Mute"
        relay.model[2].error = None
        session.run()
        assert session.wait(HANG_S).step == 1


def test_step_that_raises_stop_iteration_fails(relay: Relay) -> None:
    relay.model[2].error = StopIteration()
    with Session(relay, make_batches()) as session:
        session.run(2)
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.failure is not None and now.failure.error == "StopIteration"


def test_step_that_does_not_fit_is_shown_up_to_its_failure() -> None:
    config = RelayConfig(micro_batches=6)
    with make_relay(config) as probe:
        budget = probe.step(make_batches()[0]).peak_device_bytes
    with make_relay(config, EmulatedDevice(memory_bytes=budget)) as relay, Session(relay, make_batches()) as session:
        session.step()
        finished = session.wait(HANG_S).last
        session.reconfigure(micro_batches=1)
        session.step()
        now = session.wait(HANG_S)
        assert now.failure is not None and now.failure.error == "DeviceOutOfMemory"
        trace = now.failure.trace
        assert trace is not None and trace.failed is not None and trace.failed.asked_bytes > 0
        assert now.last is finished and finished is not None and finished.failed is None
        assert failed_trace(now) is trace
        session.reconfigure(micro_batches=7)  # more than the six rows of the batch, so no trace begins
        session.step()
        again = session.wait(HANG_S)
        assert again.failure is not None and again.failure.trace is None and failed_trace(again) is None
        session.reconfigure(micro_batches=6)
        session.step()
        now = session.wait(HANG_S)
        assert now.failure is None and failed_trace(now) is None
        assert now.last is not None and now.last.failed is None and now.step == 2
