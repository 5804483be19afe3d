"""A session: what is asked for happens in order on its thread, and is seen from outside at any time."""

from __future__ import annotations

import _thread
import copy
import gc
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from patience import HANG_S
from sessions import WIDTH, Batch, Layer, make_batches, make_relay, mse, train, wait_until
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import (
    Depth,
    Drop,
    Edit,
    EmulatedDevice,
    Freezing,
    Insert,
    LayerDrop,
    Relay,
    RelayConfig,
    TornStep,
)
from workbench.readings.in_core_bytes import in_core_bytes
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot
from workbench.session.values import Change, StepRow


@pytest.fixture
def relay() -> Iterator[Relay]:
    before = set(threading.enumerate())
    with make_relay() as made:
        yield made
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not left, f"threads that nobody ended: {left}"


def weights_of(relay: Relay) -> list[torch.Tensor]:
    return [param.detach().clone() for param in relay.model.parameters()]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Running --------------------------------------------------------------------------------------------------------------


def test_a_session_trains_as_a_plain_loop_does(relay: Relay) -> None:
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


def test_pause_keeps_what_is_left_and_stop_drops_it(relay: Relay) -> None:
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


def test_a_step_out_of_a_paused_run_counts_as_its_own(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.step()
        assert session.wait(HANG_S).done == 1
        session.run(5)
        session.pause()
        assert session.wait(HANG_S).state == "paused"
        session.step()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.target) == ("paused", 2, 5)


def test_steps_are_added_to_a_run_under_way(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run(2)
        session.run(3)
        assert session.wait(HANG_S).done == 5


def test_a_run_without_a_number_goes_on_until_it_is_stopped(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run()
        while len(session.snapshot().steps) < 3:
            time.sleep(0.005)
        assert session.snapshot().target is None
        session.stop()
        now = session.wait(HANG_S)
    assert now.state == "idle" and now.done >= 3


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_a_number_of_steps_is_positive(relay: Relay, steps: Any) -> None:
    with Session(relay, make_batches()) as session, pytest.raises(ValueError, match="positive integer"):
        session.run(steps)


def test_waiting_gives_up_after_its_time(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        with pytest.raises(TimeoutError, match="still running after step 0"):
            session.wait(0.05)
        first.gate.set()
        session.wait(HANG_S)


def test_an_interrupt_while_waiting_pauses_the_run(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run()
        threading.Timer(0.2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            session.wait(HANG_S)
        assert session.wait(HANG_S).state == "paused"


def test_going_on_in_the_last_step_of_a_run_does_not_begin_one_without_end(relay: Relay) -> None:
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
        session.run()  # what comes after a stop is a run of its own
        first.gate.set()
        while (now := session.snapshot()).step < 4:
            time.sleep(0.005)
        assert now.target is None


# Batches --------------------------------------------------------------------------------------------------------------


def test_a_data_loader_begins_again_and_a_generator_ends(relay: Relay) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
    with Session(relay, loader) as session:
        session.run(5)
        assert session.wait(HANG_S).done == 5
    with Session(relay, iter(make_batches(2))) as session:
        session.run()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.failure) == ("idle", 2, None)


def test_a_function_makes_every_batch(relay: Relay) -> None:
    made: list[int] = []

    def batch() -> Batch:
        made.append(len(made))
        return make_batches(1)[0]

    with Session(relay, batch) as session:
        session.run(3)
        session.wait(HANG_S)
    assert made == [0, 1, 2]


def test_a_source_without_a_batch_says_so(relay: Relay) -> None:
    loader = DataLoader(TensorDataset(torch.randn(3, 4), torch.randn(3, 1)), batch_size=4, drop_last=True)
    for source in (loader, []):
        with Session(relay, source) as session:
            session.run(2)
            now = session.wait(HANG_S)
            assert now.failure is not None and now.failure.during == "batch"
            assert "no batch" in now.failure.message and "drop_last" in now.failure.message


class Columns(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor | None = None


def test_every_row_of_a_loader_with_batches_of_its_own_type_is_trained_once(relay: Relay) -> None:
    plain, kinds = make_batches(), list[type]()
    loss = relay._call._loss
    relay._call._loss = lambda outputs, batch: kinds.append(type(batch)) or loss(outputs, batch)
    loader = DataLoader([Columns(x, y) for x, y in plain], batch_size=None)
    with Session(relay, loader) as session:
        session.run(5)
        now = session.wait(HANG_S)
    with make_relay() as other:
        assert [row.loss for row in now.steps] == [other.step(batch).loss for batch in plain]
        assert_equal(weights_of(relay), weights_of(other))
    assert (now.step, now.failure, {row.samples for row in now.steps}) == (5, None, {6})
    assert kinds == [Columns] * 10


ONE_BATCH = [{"input_ids": torch.zeros(2, 2)}, UserDict(input_ids=torch.zeros(2, 2)), Columns(torch.zeros(2, 2))]


@pytest.mark.parametrize("source", [3, torch.zeros(2, 2), *ONE_BATCH])
def test_what_is_no_source_of_batches_is_refused(relay: Relay, source: Any) -> None:
    with pytest.raises(TypeError, match="an iterable of batches"):
        Session(relay, source)


def test_only_a_relay_has_a_session() -> None:
    with pytest.raises(TypeError, match="l2l_core.Relay over your model"):
        Session(nn.Linear(2, 2), [])  # type: ignore[arg-type]


# Changes between steps ------------------------------------------------------------------------------------------------


def test_commands_happen_in_the_order_in_which_they_were_given(relay: Relay) -> None:
    seen: list[int] = []
    with Session(relay, make_batches()) as session:
        session.step()
        session.edit(lambda relay: seen.append(relay.steps), what="look")
        session.step()
        session.edit(lambda relay: seen.append(relay.steps))
        now = session.wait(HANG_S)
    assert seen == [1, 2]
    assert now.changes == (Change(1, "look"),), "a call without a name is not recorded"


def test_the_stack_is_edited_between_steps_and_the_inverse_brings_it_back(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run(2)
        session.wait(HANG_S)
        inverse = session.edit(Drop(1)).result(HANG_S)
        now = session.wait(HANG_S)
        assert [row.key for row in now.layers] == ["L000", "L002", "L003"]
        assert now.num_params == sum(param.numel() for param in relay.model.parameters())
        assert now.changes[0].what == "− layer 1"
        session.step()
        session.edit(inverse)
        session.step()
        now = session.wait(HANG_S)
    assert [row.version for row in now.layers] == [now.step, now.step - 1, now.step, now.step]
    assert now.state == "idle" and len(now.changes) == 2


def test_an_edit_returns_its_result_and_its_error(relay: Relay) -> None:
    batches = make_batches()
    with Session(relay, batches) as session:
        assert session.edit(lambda relay: relay.evaluate(batches[0])).result(HANG_S) > 0
        future = session.edit(lambda relay: 1 / 0, what="divide")
        assert isinstance(future.exception(20), ZeroDivisionError)
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.failure is not None and now.failure.during == "edit"
        assert now.changes == ()
        session.run(2)
        now = session.wait(HANG_S)
        assert now.state == "idle" and now.failure is None and now.step == 2
    with pytest.raises(TypeError, match="a function of the relay"):
        session.edit("drop layer 3")  # type: ignore[arg-type]


def test_edits_undo_and_redo_are_recorded_in_words_and_in_the_journal(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.step()
        session.edit(Insert(2, init="copy"), Drop("L000"))
        session.step()
        session.undo()
        assert session.redo().result(HANG_S).kind == "redo"
        now = session.wait(HANG_S)
        group = "+ at 2 (copy); − L000"
        assert now.changes == (Change(1, group), Change(2, f"undo {group}"), Change(2, f"redo {group}"))
        assert now.journal == relay.journal and [entry.kind for entry in now.journal] == ["edit", "undo", "redo"]
        assert [row.key for row in now.layers] == ["L001", "L004", "L002", "L003"] and now.touched == {"L004"}
        assert (now.can_undo, now.can_redo) == (True, False)
        session.step()
        now = session.wait(HANG_S)
    assert now.journal[-1].loss_after == now.steps[-1].loss, "the journal follows the steps"


class Log:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.changes: list[Change] = []

    def log_step(self, row: StepRow) -> None:
        self.rows.append(row)

    def log_change(self, change: Change) -> None:
        self.changes.append(change)

    def close(self) -> None: ...


def test_every_branch_has_its_own_past(relay: Relay) -> None:
    with Session(relay, make_batches(), loggers=[log := Log()]) as session:
        train(session, 2)
        session.fork("wide")
        session.edit(Insert(2))
        train(session, 2)
        wide = session.wait(HANG_S)
        assert (wide.branch, wide.step, len(wide.layers)) == ("wide", 4, 5)
        assert [(row.step, row.branch) for row in wide.steps] == [(1, "main"), (2, "main"), (3, "wide"), (4, "wide")]
        assert wide.changes == (Change(2, "⑂ wide", "wide"), Change(2, "+ at 2 (identity)", "wide"))
        assert wide.elsewhere == {}, "main has nothing that is not in the past of its fork"
        assert [(branch.name, branch.active, branch.steps) for branch in wide.branches] == [
            ("main", False, 2),
            ("wide", True, 4),
        ]

        session.switch("main")
        now = session.wait(HANG_S)
        assert (now.branch, now.step, len(now.layers), now.journal) == ("main", 2, 4, ())
        assert now.steps == wide.steps[:2] and now.changes == () and not now.can_undo
        assert now.statistics.last.tolist() == [1, 2] and wide.statistics.last.tolist() == [1, 2, 3, 4]
        assert now.elsewhere == {"wide": wide.steps[1:]}, "from the last step that both have"
        train(session, 1)
        now = session.wait(HANG_S)
        assert [(row.step, row.branch) for row in now.steps] == [(1, "main"), (2, "main"), (3, "main")]
        assert now.elsewhere == {"wide": wide.steps[1:]}

        session.switch("wide")
        train(session, 1)
        again = session.wait(HANG_S)
        assert [row.step for row in again.steps] == [1, 2, 3, 4, 5] and again.steps[:4] == wide.steps
        assert again.elsewhere == {"main": now.steps[1:]} and again.can_undo
        session.discard("main")
        now = session.wait(HANG_S)
        assert now.elsewhere == {} and [branch.name for branch in now.branches] == ["wide"]
        assert now.failure is None and now.refusal is None
    assert [(row.step, row.branch) for row in log.rows] == [
        (1, "main"), (2, "main"), (3, "wide"), (4, "wide"), (3, "main"), (5, "wide"),
    ]  # fmt: skip
    assert Change(4, "switch to wide", "wide") in log.changes


def test_a_branch_trains_as_if_the_other_one_had_not_been(relay: Relay) -> None:
    batch = make_batches()[0]
    with make_relay() as plain:
        losses = [plain.step(batch).loss for _ in range(5)]
        expected = weights_of(plain)
    with Session(relay, lambda: batch) as session:
        train(session, 3)
        session.fork("aside")
        session.edit(Drop(0))
        session.reconfigure(micro_batches=3)
        train(session, 2)
        session.switch("main")
        train(session, 2)
        now = session.wait(HANG_S)
    assert [row.loss for row in now.steps] == losses and now.config.micro_batches == 2
    assert_equal(weights_of(relay), expected)


def test_branches_that_cannot_be_are_refused_and_the_run_goes_on(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run()
        for future in (session.fork("main"), session.fork(" "), session.switch("nowhere"), session.discard("main")):
            assert isinstance(future.exception(20), ValueError)
        now = session.snapshot()
        assert now.state == "running" and now.failure is None and now.refusal is not None
        assert now.branch == "main" and now.changes == ()
        session.stop()


def test_branches_made_by_a_function_have_pasts_too(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 2)
        session.edit(lambda relay: (relay.fork("a"), relay.fork("b")))
        train(session, 1)
        session.reconfigure(micro_batches=3)
        session.edit(lambda relay: relay.switch("a"))
        session.reconfigure(ahead=2)
        now = session.wait(HANG_S)
        assert now.failure is None and [change.what for change in now.changes] == ["ahead 1 → 2"]
        assert now.branch == "a" and [row.branch for row in now.steps] == ["main", "main"]
        assert list(now.elsewhere) == ["b"]


def test_a_schedule_edits_before_the_steps_it_names(relay: Relay) -> None:
    schedule = Depth({0: 4, 2: 6, 4: 3}, grow="top") + Freezing({3: 1})
    with Session(relay, make_batches(), schedule=schedule) as session:
        session.run(5)
        now = session.wait(HANG_S)
    assert [(change.step, change.what) for change in now.changes] == [
        (2, "2 × layers 2–3, top"), (3, "freeze layers 0"), (4, now.changes[2].what),
    ]  # fmt: skip
    assert now.changes[2].what.count("−") == 3 and len(now.layers) == 3 == len(relay.stack)
    assert [entry.step for entry in now.journal] == [2, 3, 4, 4][: len(now.journal)]


def test_layers_that_a_schedule_leaves_out_are_not_in_the_step(relay: Relay) -> None:
    with Session(relay, make_batches(), schedule=LayerDrop(1.0)) as session:
        session.step()
        now = session.wait(HANG_S)
    assert now.last is not None and len({e.layer for e in now.last.events if e.kind == "forward"}) == 1
    assert len(now.layers) == 4 and now.changes == ()


def test_a_schedule_that_cannot_be_followed_stops_the_run(relay: Relay) -> None:
    with Session(relay, make_batches(), schedule=Depth(lambda step: 4 - 4 * step)) as session:
        session.run(3)
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.step == 1 and now.failure.during == "edit"
        assert "depth(1) is 0" in now.failure.message


def test_an_edit_that_is_refused_changes_nothing_and_the_run_goes_on(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run()
        first = session.edit(Drop("L001"), Drop(slice(None)))
        assert isinstance(first.exception(20), ValueError)
        seen = session.snapshot()
        assert seen.state == "running" and seen.failure is None and seen.changes == ()
        assert [row.key for row in seen.layers] == ["L000", "L001", "L002", "L003"] and not seen.journal
        assert seen.refusal is not None and seen.refusal.during == "refused"
        assert "one must stay" in seen.refusal.message and seen.refusal.after == "Nothing was changed."
        wait_until(lambda: session.snapshot().step >= seen.step + 2)
        assert isinstance(session.redo().exception(20), ValueError)
        assert "nothing to redo" in str(session.snapshot().refusal)
        session.edit(Drop("L001")).result(HANG_S)
        now = session.snapshot()
        assert now.refusal is None and now.state == "running"
        session.stop()


def test_an_edit_that_breaks_otherwise_stops_the_run(relay: Relay) -> None:
    class Breaks(Edit):
        def carry_out(self, editor: Any, do: Any) -> None:
            raise OSError("no space left on the disk")

    with Session(relay, make_batches()) as session:
        session.run()
        assert isinstance(session.edit(Breaks()).exception(20), OSError)
        now = session.wait(HANG_S)
    assert now.state == "failed" and now.failure is not None and now.refusal is None


def test_a_command_can_be_taken_out_of_the_queue(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.run(2)
        assert first.entered.wait(HANG_S)
        dropped = session.edit(Drop("L001"))
        session.reconfigure(micro_batches=3)
        session.reconfigure(ahead=2)
        waiting = session.snapshot()
        assert waiting.queued == ("− L001", "micro_batches 2 → 3", "ahead 1 → 2")
        assert session.cancel(waiting.tickets[0]) and dropped.cancelled()
        assert session.cancel(waiting.tickets[1])
        assert session.snapshot().queued == ("ahead 1 → 2",) and session.snapshot().config.micro_batches == 2
        first.gate.set()
        now = session.wait(HANG_S)
        assert not session.cancel(waiting.tickets[2]), "its turn has come"
    assert len(now.layers) == 4 and (now.config.micro_batches, now.config.ahead) == (2, 2) and now.step == 2


def test_settings_act_on_the_next_step(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.step()
        session.reconfigure(micro_batches=3, stash="host", h2d_bytes_per_s=2e6)
        planned = session.snapshot()
        session.step()
        now = session.wait(HANG_S)
    assert planned.config.micro_batches == 3 and planned.figures["h2d_bytes_per_s"] == 2e6, "shown at once"
    assert now.last is not None
    used = {name: now.last.settings[name] for name in ("micro_batches", "stash", "h2d_bytes_per_s", "ahead")}
    assert used == {"micro_batches": 3, "stash": "host", "h2d_bytes_per_s": 2e6, "ahead": 1}
    what = "micro_batches 2 → 3, stash device → host, h2d_bytes_per_s unlimited → 2 MB/s"
    assert now.changes == (Change(1, what),)


def test_settings_since_the_last_step_are_one_change(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.step()
        for micro_batches in (3, 6):
            session.reconfigure(micro_batches=micro_batches, h2d_bytes_per_s=2e6, d2h_bytes_per_s=2e6)
            session.wait(HANG_S)
        session.step()
        session.reconfigure(ahead=2)
        session.reconfigure(ahead=1)
        now = session.wait(HANG_S)
    assert now.changes == (Change(1, "micro_batches 2 → 6, link unlimited → 2 MB/s"),)


def test_settings_that_are_as_they_were_are_no_change(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.reconfigure(micro_batches=2, h2d_bytes_per_s=None)
        assert session.wait(HANG_S).changes == ()


def test_a_setting_that_an_edit_makes_is_seen(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.edit(lambda relay: setattr(relay, "config", RelayConfig(micro_batches=6)), what="by hand").result(
            HANG_S
        )
        assert session.snapshot().config.micro_batches == 6
        session.reconfigure(ahead=2)
        session.wait(HANG_S)
    assert relay.config == RelayConfig(micro_batches=6, ahead=2)


def test_a_call_that_is_cancelled_while_it_waits_is_not_made(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    called: list[Relay] = []
    with Session(relay, make_batches()) as session:
        session.step()
        assert first.entered.wait(HANG_S)
        assert session.edit(called.append).cancel()
        first.gate.set()
        assert session.wait(HANG_S).state == "idle" and not called
        session.step()
        assert session.wait(HANG_S).step == 2


def test_a_setting_and_a_change_that_wait_together_do_not_undo_each_other(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        assert first.entered.wait(HANG_S)
        session.edit(lambda relay: setattr(relay, "config", replace(relay.config, stash="host")), what="stash by hand")
        session.reconfigure(micro_batches=3)
        first.gate.set()
        now = session.wait(HANG_S)
    assert now.config == relay.config == RelayConfig(micro_batches=3, stash="host")


def test_a_setting_that_no_longer_fits_is_refused_when_its_turn_comes(relay: Relay) -> None:
    go_on = threading.Event()
    with Session(relay, make_batches()) as session:
        session.reconfigure(update="deferred")
        session.wait(HANG_S)
        session.edit(
            lambda relay: go_on.wait(HANG_S) and setattr(relay, "config", RelayConfig(update="eager")), what="by hand"
        )
        session.reconfigure(max_grad_norm=1.0)
        go_on.set()
        now = session.wait(HANG_S)
        assert now.failure is not None and "max_grad_norm=1.0 with update='eager'" in now.failure.message
        assert now.config == relay.config == RelayConfig(update="eager")
        session.step()
        assert session.wait(HANG_S).state == "idle"


def test_what_a_failing_change_has_set_is_seen(relay: Relay) -> None:
    def change(relay: Relay) -> None:
        relay.config = RelayConfig(micro_batches=6)
        raise RuntimeError("half way")

    with Session(relay, make_batches()) as session:
        session.edit(change, what="by hand")
        assert session.wait(HANG_S).config.micro_batches == 6


def test_a_link_that_a_change_throttles_is_seen_and_stays(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.edit(lambda relay: relay.device.throttle(3e6, 3e6), what="throttle")
        assert session.wait(HANG_S).figures["h2d_bytes_per_s"] == 3e6
        session.reconfigure(ahead=2)
        session.wait(HANG_S)
    assert relay.device.figures()["h2d_bytes_per_s"] == 3e6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batch": 2}, "no setting 'micro_batch'; there are micro_batches, ahead"),
        ({"h2d_bytes_per_s": -1.0}, "h2d_bytes_per_s=-1.0"),
        ({"max_grad_norm": 1.0}, "update='deferred'"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(relay: Relay, settings: dict[str, Any], message: str) -> None:
    with Session(relay, make_batches()) as session:
        with pytest.raises(ValueError, match=message):
            session.reconfigure(**settings)
        session.step()
        assert session.wait(HANG_S).state == "idle"


# Looking --------------------------------------------------------------------------------------------------------------


def test_a_snapshot_in_mid_step_shows_how_far_it_is_and_stays_as_it_is(relay: Relay) -> None:
    last = relay.model[4]
    last.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        assert last.entered.wait(HANG_S)
        now = session.snapshot()
        assert now.progress is not None and now.state == "running" and now.steps == ()
        events = now.progress.events
        part = now.progress.trace.since(0)[0][:events]
        assert {event.layer for event in part if event.kind == "forward"} == {"L000", "L001", "L002"}
        last.gate.set()
        session.wait(HANG_S)
    assert now.progress.events == events < len(now.progress.trace.events)
    assert now.progress.trace.since(0)[0][:events] == part


def test_snapshots_tell_what_waits(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        assert first.entered.wait(HANG_S)
        session.reconfigure(ahead=2)
        assert session.snapshot().queued == ("ahead 1 → 2",)
        first.gate.set()
        session.wait(HANG_S)


def test_what_in_core_training_would_need_is_known_after_the_first_step(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        assert session.snapshot().in_core_bytes is None
        session.step()
        now = session.wait(HANG_S)
    assert now.in_core_bytes is not None and now.in_core_bytes > 16 * now.num_params


class Watched(nn.Sequential):
    """Takes a snapshot whenever something goes through its buffers, as what comes after a step does."""

    session: Session | None = None

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        if self.session is not None:
            self.seen.append(self.session.snapshot())
        return super().buffers(recurse)


def test_a_step_is_counted_when_its_row_is_there() -> None:
    model = Watched(nn.Linear(4, WIDTH), *(Layer() for _ in range(2)), nn.Linear(WIDTH, 1))
    model.seen = []
    with Relay(model, device=EmulatedDevice(), layers=list(model)[1:3], loss=mse) as relay:
        with Session(relay, make_batches()) as session:
            model.session = session
            session.run(2)
            session.wait(HANG_S)
            model.session = None
    assert model.seen
    assert all(now.step == len(now.steps) for now in model.seen)


class Unusual(nn.Sequential):
    """A model that cannot be asked for its buffers."""

    asked = False

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        self.asked = True
        raise RuntimeError("no buffers here")


def test_a_step_counts_even_if_in_core_needs_cannot_be_told() -> None:
    model = Unusual(nn.Linear(4, WIDTH), *(Layer() for _ in range(2)), nn.Linear(WIDTH, 1))
    with Relay(model, device=EmulatedDevice(), layers=list(model)[1:3], loss=mse) as relay:
        with Session(relay, make_batches()) as session:
            session.run(2)
            now = session.wait(HANG_S)
    assert model.asked
    assert (now.state, now.failure, now.done, now.in_core_bytes) == ("idle", None, 2, None)


def test_in_core_needs_follow_how_long_batches_are(relay: Relay) -> None:
    short, long = ((torch.randn(6, length, 4), torch.randn(6, length, 1)) for length in (2, 50))
    with Session(relay, [short, long]) as session:
        session.step()
        first = session.wait(HANG_S)
        session.step()
        second = session.wait(HANG_S)
    assert first.in_core_bytes is not None and second.in_core_bytes is not None
    assert second.in_core_bytes == in_core_bytes(relay, second.last) > 2 * first.in_core_bytes


def test_in_core_needs_follow_what_is_trained(relay: Relay) -> None:
    def freeze(relay: Relay) -> None:
        for param in relay.model[1].parameters():
            param.requires_grad_(False)

    with Session(relay, make_batches()) as session:
        session.step()
        whole = session.wait(HANG_S)
        session.edit(freeze, what="freeze")
        session.step()
        frozen = session.wait(HANG_S)
    assert frozen.in_core_bytes is not None and whole.in_core_bytes is not None
    assert frozen.in_core_bytes == in_core_bytes(relay, frozen.last) != whole.in_core_bytes
    assert whole.layers[0].grad_norm and frozen.layers[0].frozen
    assert frozen.layers[0].grad_norm is None and frozen.layers[0].update_ratio is None, "statistics of the last step"


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_failing_step_is_shown_and_the_same_batch_is_tried_again(relay: Relay) -> None:
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


def test_a_batch_that_cannot_be_used_can_be_skipped(relay: Relay) -> None:
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


def test_a_batch_that_was_only_forecast_is_not_skipped(relay: Relay) -> None:
    """No step has failed on it."""
    first, second = make_batches(2)
    with make_relay() as plain:
        expected = [plain.step(batch).loss for batch in (first, second)]
    with Session(relay, iter([first, second])) as session:
        session.forecast().result(20)
        session.skip()
        session.run(2)
        now = session.wait(20)
    assert [row.loss for row in now.steps] == expected


def test_a_torn_step_says_so_and_goes_on_with_the_next_batch(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_source_of_batches_that_fails_is_asked_again(relay: Relay) -> None:
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


def test_what_a_failed_step_held_is_let_go(relay: Relay) -> None:
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
            assert held[0]() is None, "on a device it would take up memory"
    finally:
        gc.enable()
        hook.remove()


def test_an_error_that_cannot_be_read_is_shown_all_the_same(relay: Relay) -> None:
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


def test_a_step_that_ends_in_stop_iteration_has_failed(relay: Relay) -> None:
    relay.model[2].error = StopIteration()
    with Session(relay, make_batches()) as session:
        session.run(2)
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.failure is not None and now.failure.error == "StopIteration"


# Loggers and schedulers -----------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self, fails: bool = False) -> None:
        self.steps: list[StepRow] = []
        self.changes: list[Change] = []
        self.closed = 0
        self.fails = fails

    def log_step(self, row: StepRow) -> None:
        if self.fails:
            raise OSError("disk full")
        self.steps.append(row)

    def log_change(self, change: Change) -> None:
        self.changes.append(change)

    def close(self) -> None:
        self.closed += 1


def test_loggers_get_every_step_and_change(relay: Relay) -> None:
    logger = Recorder()
    with Session(relay, make_batches(), loggers=[logger]) as session:
        session.run(2)
        session.reconfigure(ahead=2)
        now = session.wait(HANG_S)
    assert tuple(logger.steps) == now.steps and tuple(logger.changes) == now.changes
    assert logger.closed == 1


def test_a_failing_logger_loses_no_step(relay: Relay) -> None:
    with Session(relay, make_batches(), loggers=[Recorder(fails=True)]) as session:
        session.run(2)
        now = session.wait(HANG_S)
        assert now.failure is not None and now.failure.during == "logger" and "done and counted" in now.failure.after
        assert now.step == now.done == 1
        session.run()
        assert session.wait(HANG_S).step == 2


def test_other_loggers_are_told_when_one_fails(relay: Relay) -> None:
    good, bad = Recorder(), Recorder(fails=True)
    with Session(relay, make_batches(), loggers=[bad, good]) as session:
        session.step()
        now = session.wait(HANG_S)
    assert now.failure is not None and now.failure.during == "logger" and tuple(good.steps) == now.steps != ()


def test_a_change_that_cannot_be_logged_is_made_and_its_result_arrives(relay: Relay) -> None:
    class Full(Recorder):
        def log_change(self, change: Change) -> None:
            raise OSError("disk full")

    with Session(relay, make_batches(), loggers=[Full()]) as session:
        assert session.edit(lambda relay: 42, what="count").result(HANG_S) == 42
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.failure is not None and now.failure.during == "logger"
        assert "change" in now.failure.after and now.changes == (Change(0, "count"),)


def test_the_learning_rate_follows_its_schedule(relay: Relay) -> None:
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


def test_a_schedule_that_follows_the_loss_gets_it(relay: Relay) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(relay.optimizer, patience=0, threshold=1e9)
    with Session(relay, make_batches(), scheduler=schedule) as session:
        session.run(3)
        now = session.wait(HANG_S)
    assert now.failure is None and now.step == 3
    assert schedule.best == min(row.loss for row in now.steps) or schedule.num_bad_epochs >= 0
    assert relay.optimizer.param_groups[0]["lr"] < 1e-2


# The end --------------------------------------------------------------------------------------------------------------


def test_a_closed_session_takes_no_commands(relay: Relay) -> None:
    session = Session(relay, make_batches())
    session.close()
    session.close()
    assert session.snapshot().state == "closed"
    assert session.wait(HANG_S).state == "closed"
    with pytest.raises(RuntimeError, match="make a new one"):
        session.run(1)


def test_closing_waits_for_the_step_and_drops_the_rest(relay: Relay) -> None:
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
    relay.step(make_batches(1)[0])  # the relay is free again


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


def test_snapshots_are_of_one_moment_while_others_steer(relay: Relay) -> None:
    seen: list[Snapshot] = []
    with Session(relay, make_batches()) as session:
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                seen.append(session.snapshot())
                time.sleep(1e-4)  # or it would hardly ever let go of the interpreter

        looker = threading.Thread(target=look)
        looker.start()
        session.run(30)
        for ahead in (2, 0, 1):
            session.reconfigure(ahead=ahead)
        session.wait(HANG_S)
        over.set()
        looker.join()
    for one in seen:
        assert one.done <= len(one.steps) <= 30 and len(one.changes) <= 3
        assert one.target in (0, 30)
    numbers = [one.number for one in seen]
    assert numbers == sorted(numbers)
    assert copy.copy(seen[-1]).steps == seen[-1].steps


def test_a_session_that_takes_over_shows_what_the_earlier_one_set_last(relay: Relay) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def change(relay: Relay) -> None:
        begun.set()
        assert go_on.wait(HANG_S)
        relay.config = RelayConfig(micro_batches=6)

    old = Session(relay, make_batches())
    old.edit(change)
    assert begun.wait(HANG_S)
    with Session(relay, make_batches()) as new:
        new.reconfigure(ahead=2)
        go_on.set()
        now = new.wait(HANG_S)
        assert now.config == relay.config == RelayConfig(micro_batches=6, ahead=2)
    old.close()


def test_an_interrupt_while_waiting_for_a_session_that_closes_is_an_interrupt(relay: Relay) -> None:
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
