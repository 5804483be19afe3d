"""Sessions: runs, pauses, schedulers, closing and takeover."""

from __future__ import annotations

import _thread
import gc
import threading
import time
from typing import Any
from weakref import ref

import pytest
import torch
from patience import HANG_S
from sessions import assert_equal, make_batches, make_relay, weights_of
from torch import nn

from l2l_core import LayerDrop, Relay, RelayConfig, Schedule
from workbench.lessons.recipe_races import ByBranch
from workbench.pictures.session_header import progress_html
from workbench.session.session import Session

# Running --------------------------------------------------------------------------------------------------------------


def test_session_trains_like_a_plain_loop(relay: Relay) -> None:
    batches = make_batches()
    with make_relay() as plain:
        losses = [plain.step(batch).loss for batch in (batches * 2)[:7]]
        expected = weights_of(plain)
    with Session(relay, batches) as session:
        session.run(7)
        now = session.wait(HANG_S)
    assert [row.loss for row in now.steps] == losses
    assert [row.step for row in now.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert_equal(weights_of(relay), expected)
    assert (now.state, now.step, now.done, now.target) == ("idle", 7, 7, 7)
    assert now.last is not None and now.last.step == 6 and now.progress is None
    assert all(row.version == 7 and row.grad_norm and row.update_ratio for row in now.layers)


def test_pause_keeps_the_remaining_steps_and_stop_drops_them(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.run(3)
        assert first.entered.wait(HANG_S)
        session.pause()  # in the middle of the first step
        assert session.snapshot().pausing and session.snapshot().state == "running"
        first.gate.set()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.target) == ("paused", 1, 3)
        session.run()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.step) == ("idle", 3, 3)
        session.run(50)
        session.stop()
        now = session.wait(HANG_S)
        assert now.state == "idle" and now.done == now.target and now.step == 4, "one step, then the queue"
        assert now.dropped == 49 and "1 of 1 steps, stopped (50 requested)" in progress_html(now)
        session.run(1)
        assert session.wait(HANG_S).dropped == 0


def test_single_step_of_a_paused_run_counts(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.step()
        assert session.wait(HANG_S).done == 1
        session.run(5)
        session.pause()
        assert session.wait(HANG_S).state == "paused"
        session.step()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.target) == ("paused", 2, 5)


def test_steps_are_added_to_a_run_in_progress(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run(2)
        session.run(3)
        assert session.wait(HANG_S).done == 5


def test_run_without_a_number_ends_with_stop(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run()
        while len(session.snapshot().steps) < 3:
            time.sleep(0.005)
        assert session.snapshot().target is None
        session.stop()
        now = session.wait(HANG_S)
    assert now.state == "idle" and now.done >= 3


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_number_of_steps_must_be_positive(relay: Relay, steps: Any) -> None:
    with Session(relay, make_batches()) as session, pytest.raises(ValueError, match="positive integer"):
        session.run(steps)


def test_wait_raises_after_its_timeout(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        with pytest.raises(TimeoutError, match="still running after step 0"):
            session.wait(0.05)
        first.gate.set()
        session.wait(HANG_S)


def test_interrupt_of_wait_pauses_the_run(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run()
        threading.Timer(0.2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            session.wait(HANG_S)
        assert session.wait(HANG_S).state == "paused"


def test_resuming_in_the_last_step_does_not_begin_an_endless_run(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.run(1)
        assert first.entered.wait(HANG_S)
        session.run()
        first.gate.set()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.target) == ("idle", 1, 1)
        first.gate = threading.Event()
        first.entered.clear()
        session.run(1)
        assert first.entered.wait(HANG_S)
        session.stop()
        session.run()  # a new run, since it follows a stop
        first.gate.set()
        while (now := session.snapshot()).step < 4:
            time.sleep(0.005)
        assert now.target is None


def test_session_requires_a_relay() -> None:
    with pytest.raises(TypeError, match="l2l_core.Relay over your model"):
        Session(nn.Linear(2, 2), [])  # type: ignore[arg-type]


# Schedulers -----------------------------------------------------------------------------------------------------------


def test_scheduler_is_stepped(relay: Relay) -> None:
    plain = make_relay()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each.optimizer, 0.5) for each in (plain, relay)]
    batches = make_batches()
    losses = []
    for batch in batches:
        losses.append(plain.step(batch).loss)
        schedules[0].step()
    plain.close()
    with Session(relay, batches, scheduler=schedules[1]) as session:
        session.run(5)
        now = session.wait(HANG_S)
    assert [row.loss for row in now.steps] == losses


def test_plateau_scheduler_gets_the_loss(relay: Relay) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(relay.optimizer, patience=0, threshold=1e9)
    with Session(relay, make_batches(), scheduler=schedule) as session:
        session.run(3)
        now = session.wait(HANG_S)
    assert now.failure is None and now.step == 3
    assert schedule.best == min(row.loss for row in now.steps) or schedule.num_bad_epochs >= 0
    assert relay.optimizer.param_groups[0]["lr"] < 1e-2


class Halving(Schedule):
    """Halves the learning rate after each step, by overriding `step`."""

    def step(self, relay: Any, batch: Any) -> Any:
        result = super().step(relay, batch)
        relay.optimizer.param_groups[0]["lr"] /= 2
        return result


class PreparedHalving(Schedule):
    """The same, by the remedy."""

    def prepare(self, relay: Any) -> None:
        super().prepare(relay)
        if relay.steps:
            relay.optimizer.param_groups[0]["lr"] /= 2


@pytest.mark.parametrize(
    "use",
    [
        lambda relay: Session(relay, make_batches(), schedule=Halving()),
        lambda relay: Halving() + LayerDrop(0.5),
        lambda relay: ByBranch({"main": Halving()}),
    ],
    ids=["session", "sum", "race"],
)
def test_a_schedule_that_overrides_step_is_refused_where_that_would_be_ignored(relay: Relay, use: Any) -> None:
    with pytest.raises(ValueError, match=r"Halving overrides step.*Move the code into prepare"):
        use(relay)
    with make_relay() as plain:
        losses = [Halving().step(plain, batch).loss for batch in make_batches()]
    schedule = ByBranch({"main": PreparedHalving()}) + Schedule()
    with Session(relay, make_batches(), schedule=schedule) as session:  # the remedy
        session.run(5)
        assert [row.loss for row in session.wait(HANG_S).steps] == losses


# The end --------------------------------------------------------------------------------------------------------------


def test_a_closed_session_takes_no_commands(relay: Relay) -> None:
    session = Session(relay, make_batches())
    session.close()
    session.close()
    assert session.snapshot().state == "closed"
    assert session.wait(HANG_S).state == "closed"
    with pytest.raises(RuntimeError, match="make a new one"):
        session.run(1)


def test_close_waits_for_the_step_and_cancels_the_queue(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    session = Session(relay, make_batches())
    session.run(5)
    assert first.entered.wait(HANG_S)
    dropped = session.edit(lambda relay: None, what="never")
    session.close(wait=False)
    assert dropped.cancelled()
    first.gate.set()
    session.close()
    assert session.snapshot().step == 1
    relay.step(make_batches(1)[0])  # the relay can be used again


def test_another_session_takes_the_relay_over(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    old = Session(relay, make_batches())
    old.run()
    assert first.entered.wait(HANG_S)
    with Session(relay, make_batches()) as new:
        new.step()
        first.gate.set()
        now = new.wait(HANG_S)
        assert (now.state, now.step) == ("idle", 2), "the old one's step, then the new one's"
        assert old.snapshot().state == "closed"


def test_session_that_was_taken_over_is_freed(relay: Relay) -> None:
    """It is freed at once rather than with the later session, since it holds traces."""
    first = Session(relay, make_batches())
    first.run(1)
    first.wait(HANG_S)
    gone = ref(first)
    with Session(relay, make_batches()) as second:
        second.run(1)
        second.wait(HANG_S)
        del first
        gc.collect()
        assert gone() is None


def test_takeover_shows_the_last_settings_of_the_earlier_session(relay: Relay) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def change(relay: Relay) -> None:
        begun.set()
        assert go_on.wait(HANG_S)
        relay.config = RelayConfig(seed=0, micro_batches=6)

    old = Session(relay, make_batches())
    old.edit(change)
    assert begun.wait(HANG_S)
    with Session(relay, make_batches()) as new:
        new.reconfigure(ahead=2)
        go_on.set()
        now = new.wait(HANG_S)
        assert now.config == relay.config == RelayConfig(seed=0, micro_batches=6, ahead=2)
    old.close()


def test_interrupt_of_wait_on_a_closing_session(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    session = Session(relay, make_batches())
    session.run()
    assert first.entered.wait(HANG_S)
    session.close(wait=False)
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        session.wait(HANG_S)
    first.gate.set()
    session.close()
