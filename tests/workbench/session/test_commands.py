"""Commands between two steps: edits, schedules and settings, in the order of the calls."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from patience import HANG_S
from sessions import changes_of, make_batches, wait_until

from l2l_core import Depth, Drop, Edit, Freezing, Insert, LayerDrop, Relay, RelayConfig
from workbench.session.session import Session
from workbench.session.snapshot_values import Change


def test_commands_run_in_order(relay: Relay) -> None:
    seen: list[int] = []
    with Session(relay, make_batches()) as session:
        session.step()
        session.edit(lambda relay: seen.append(relay.steps), what="look")
        session.step()
        session.edit(lambda relay: seen.append(relay.steps))
        now = session.wait(HANG_S)
    assert seen == [1, 2]
    assert now.changes == (Change(1, "look"),), "a call without a description is not recorded"


def test_inverse_of_an_edit_restores_the_stack(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run(2)
        session.wait(HANG_S)
        inverse = session.edit(Drop(1)).result(HANG_S)
        now = session.wait(HANG_S)
        assert [row.key for row in now.layers] == ["L000", "L002", "L003"]
        assert now.num_params == sum(param.numel() for param in relay.model.parameters())
        assert now.changes[0].what == "dropped layer 1"
        session.step()
        session.edit(inverse)
        session.step()
        now = session.wait(HANG_S)
    assert [row.version for row in now.layers] == [now.step, now.step - 1, now.step, now.step]
    assert now.state == "idle" and len(now.changes) == 2


def test_future_of_an_edit_gets_result_and_error(relay: Relay) -> None:
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


def test_edits_undo_and_redo_are_recorded(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.step()
        session.edit(Insert(2, init="copy"), Drop("L000"))
        session.step()
        session.undo()
        assert session.redo().result(HANG_S).kind == "redo"
        now = session.wait(HANG_S)
        group = "inserted at 2 (copy); dropped 0 · L000"
        assert changes_of(now) == [(1, group), (2, f"undid: {group}"), (2, f"redid: {group}")]
        assert [change.entry for change in now.changes] == [0, 1, 2]
        assert now.journal == relay.journal and [entry.kind for entry in now.journal] == ["edit", "undo", "redo"]
        assert [row.key for row in now.layers] == ["L001", "L004", "L002", "L003"] and now.touched == {"L004"}
        assert (now.can_undo, now.can_redo) == (True, False)


def test_schedule_edits_before_its_steps(relay: Relay) -> None:
    schedule = Depth({0: 4, 2: 6, 4: 3}, grow="top") + Freezing({3: 1})
    with Session(relay, make_batches(), schedule=schedule) as session:
        session.run(5)
        now = session.wait(HANG_S)
    assert [(change.step, change.what) for change in now.changes] == [
        (2, "duplicated layers 2 to 3, top"), (3, "froze layers 0"), (4, now.changes[2].what),
    ]  # fmt: skip
    assert now.changes[2].what.count("dropped") == 3 and len(now.layers) == 3 == len(relay.stack)
    assert [entry.step for entry in now.journal] == [2, 3, 4, 4][: len(now.journal)]


def test_layers_skipped_by_a_schedule_do_not_run(relay: Relay) -> None:
    with Session(relay, make_batches(), schedule=LayerDrop(1.0)) as session:
        session.step()
        now = session.wait(HANG_S)
    assert now.last is not None and len({e.layer for e in now.last.events if e.kind == "forward"}) == 1
    assert len(now.layers) == 4 and now.changes == ()


def test_failing_schedule_stops_the_run(relay: Relay) -> None:
    with Session(relay, make_batches(), schedule=Depth(lambda step: 4 - 4 * step)) as session:
        session.run(3)
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.step == 1 and now.failure.during == "edit"
        assert "depth(1) is 0" in now.failure.message


def test_refused_edit_changes_nothing_and_the_run_continues(relay: Relay) -> None:
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


def test_other_error_of_an_edit_stops_the_run(relay: Relay) -> None:
    class Breaks(Edit):
        def execute(self, editor: Any, do: Any) -> None:
            raise OSError("no space left on the disk")

    with Session(relay, make_batches()) as session:
        session.run()
        assert isinstance(session.edit(Breaks()).exception(20), OSError)
        now = session.wait(HANG_S)
    assert now.state == "failed" and now.failure is not None and now.refusal is None


def test_queued_command_can_be_cancelled(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.run(2)
        assert first.entered.wait(HANG_S)
        dropped = session.edit(Drop("L001"))
        session.reconfigure(micro_batches=3)
        session.reconfigure(ahead=2)
        waiting = session.snapshot()
        assert waiting.queued == ("drop 1 · L001", "micro_batches 2 → 3", "ahead 1 → 2")
        assert session.cancel(waiting.tickets[0]) and dropped.cancelled()
        assert session.cancel(waiting.tickets[1])
        assert session.snapshot().queued == ("ahead 1 → 2",) and session.snapshot().config.micro_batches == 2
        first.gate.set()
        now = session.wait(HANG_S)
        assert not session.cancel(waiting.tickets[2]), "it has already run"
    assert len(now.layers) == 4 and (now.config.micro_batches, now.config.ahead) == (2, 2) and now.step == 2


def test_settings_apply_to_the_next_step(relay: Relay) -> None:
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


def test_equal_settings_are_no_change(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.reconfigure(micro_batches=2, h2d_bytes_per_s=None)
        assert session.wait(HANG_S).changes == ()


def test_setting_made_by_a_function_is_shown(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.edit(
            lambda relay: setattr(relay, "config", RelayConfig(seed=0, micro_batches=6)), what="by hand"
        ).result(HANG_S)
        assert session.snapshot().config.micro_batches == 6
        session.reconfigure(ahead=2)
        session.wait(HANG_S)
    assert relay.config == RelayConfig(seed=0, micro_batches=6, ahead=2)


def test_cancelled_call_is_not_made(relay: Relay) -> None:
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


def test_queued_setting_and_function_do_not_undo_each_other(relay: Relay) -> None:
    first = relay.model[1]
    first.gate = threading.Event()
    with Session(relay, make_batches()) as session:
        session.step()
        assert first.entered.wait(HANG_S)
        session.edit(lambda relay: setattr(relay, "config", replace(relay.config, stash="host")), what="stash by hand")
        session.reconfigure(micro_batches=3)
        first.gate.set()
        now = session.wait(HANG_S)
    assert now.config == relay.config == RelayConfig(seed=0, micro_batches=3, stash="host", verify="never")


def test_setting_that_became_invalid_is_refused(relay: Relay) -> None:
    go_on = threading.Event()
    with Session(relay, make_batches()) as session:
        session.reconfigure(update="deferred")
        session.wait(HANG_S)
        session.edit(
            lambda relay: go_on.wait(HANG_S) and setattr(relay, "config", RelayConfig(seed=0, update="eager")),
            what="by hand",
        )
        session.reconfigure(max_grad_norm=1.0)
        go_on.set()
        now = session.wait(HANG_S)
        assert now.failure is not None and "max_grad_norm=1.0 with update='eager'" in now.failure.message
        assert now.config == relay.config == RelayConfig(seed=0, update="eager")
        session.step()
        assert session.wait(HANG_S).state == "idle"


def test_settings_of_a_failing_function_are_shown(relay: Relay) -> None:
    def change(relay: Relay) -> None:
        relay.config = RelayConfig(seed=0, micro_batches=6)
        raise RuntimeError("half way")

    with Session(relay, make_batches()) as session:
        session.edit(change, what="by hand")
        assert session.wait(HANG_S).config.micro_batches == 6


def test_link_throttled_by_a_function_is_shown_and_kept(relay: Relay) -> None:
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


def test_settings_queued_after_a_switch_are_not_lost(relay: Relay) -> None:
    go_on = threading.Event()
    with Session(relay, make_batches(), probe=False) as session:
        session.fork("slim").result(HANG_S)
        session.reconfigure(micro_batches=3)
        session.edit(lambda relay: go_on.wait(HANG_S))
        session.switch("main")
        session.reconfigure(micro_batches=3)  # equal to those of slim, which is still active
        go_on.set()
        session.edit(lambda relay: None).result(HANG_S)
        assert (relay.branch, relay.config.micro_batches) == ("main", 3)


def test_layers_are_tried_on_the_previous_batch_after_a_failed_one(relay: Relay) -> None:
    good = make_batches()[0]
    bad: Any = (torch.ones(6, 5), torch.ones(6, 1))
    with Session(relay, [good, bad, good], probe=False) as session:
        session.run(2)
        assert session.wait(HANG_S).state == "failed"
        session.skip()
        session.edit(Insert(1, torch.nn.Linear(8, 8))).result(HANG_S)  # runs on a few rows
        assert len(relay.stack) == 5
