"""Ranks in separate processes: commands to all of them, snapshots of each, and their end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_training
from patience import HANG_S

from l2l_core import Drop, Duplicate, Relay
from workbench.ranks import LaunchError, RankController, RankProcesses
from workbench.replay_bench import ReplayBench
from workbench.runs import RecordedRun, load_run
from workbench.runs.html_report import render_report


def losses_in_one_process(relay: Relay, steps: int) -> list[float]:
    """Losses of one process with the rows of both."""
    import torch

    rows = [rank_training.batches_of(rank) for rank in (0, 1)]
    both = [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in zip(*rows, strict=True)]
    return [relay.step(both[step % len(both)]).loss for step in range(steps)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def controller(folder: Path) -> Iterator[RankController]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANKS_RECORDED_IN", str(folder))
        controller = RankController(RankProcesses(rank_training.train, 2))
    yield controller
    controller.close()
    assert not any(one.process.is_alive() for one in controller.ranks)


def test_steps_edits_and_settings_reach_all_ranks(controller: RankController) -> None:
    """At any time, and the loss is that of one process with all rows."""
    controller.run(3)
    controller.wait(HANG_S)
    controller.run()
    controller.edit(Duplicate(1)).result(HANG_S)  # in the middle of a run
    controller.undo().result(HANG_S)
    controller.reconfigure(ahead=0).result(HANG_S)
    controller.pause()
    now = controller.wait(HANG_S)
    assert now.state == "paused" and now.failure is None and now.device.startswith("2 workers, ")
    first, second = (one.snapshot() for one in controller.ranks)
    assert [row.loss for row in first.steps] == [row.loss for row in second.steps] and len(first.steps) > 3
    assert first.config.ahead == second.config.ahead == 0
    assert [change.what for change in first.changes] == [change.what for change in second.changes]
    assert [entry.kind for entry in first.journal] == [entry.kind for entry in second.journal] == ["edit", "undo"]
    with rank_training.relay_of(workers=None) as relay:
        relay.config = relay.config.__class__(micro_batches=4)
        assert [row.loss for row in first.steps][:3] == pytest.approx(losses_in_one_process(relay, 3), rel=1e-6)
    controller.stop()


def test_each_rank_shows_its_own_step(controller: RankController) -> None:
    controller.step()
    controller.wait(HANG_S)
    traces = [one.snapshot().last for one in controller.ranks]
    assert [trace.worker.rank for trace in traces] == [0, 1] and len({trace.step for trace in traces}) == 1
    shown = controller.ranks[0].snapshot().shown
    assert controller.ranks[0].snapshot().shown is shown  # so that a player keeps its position


def test_an_edit_that_is_refused_changes_no_rank(controller: RankController) -> None:
    before = [one.snapshot().layers for one in controller.ranks]
    with pytest.raises(ValueError, match=r"worker 0: .*; worker 1: "):
        controller.edit(Drop("nothing")).result(HANG_S)
    assert [[row.key for row in one.snapshot().layers] for one in controller.ranks] == [
        [row.key for row in rows] for rows in before
    ]
    with pytest.raises(TypeError, match=r"pass edits, e.g. Drop\(2\)"):
        controller.edit(print)  # type: ignore[arg-type]
    assert controller.snapshot().failure is None


def test_branches_are_created_and_left_on_all_ranks(controller: RankController) -> None:
    controller.fork("slim").result(HANG_S)
    controller.edit(Drop(1)).result(HANG_S)
    controller.step()
    controller.wait(HANG_S)
    assert [len(one.snapshot().layers) for one in controller.ranks] == [3, 3]
    controller.switch("main").result(HANG_S)
    now = [one.snapshot() for one in controller.ranks]
    assert [(each.branch, len(each.layers)) for each in now] == [("main", 4)] * 2
    assert [[branch.name for branch in each.branches] for each in now] == [["main", "slim"]] * 2
    with pytest.raises(ValueError, match=r"worker 0: .*there is no branch 'wide'.*; worker 1: "):
        controller.switch("wide").result(HANG_S)
    controller.discard("slim").result(HANG_S)
    assert [[branch.name for branch in one.snapshot().branches] for one in controller.ranks] == [["main"]] * 2
    assert controller.snapshot().failure is None


def test_a_rank_that_is_killed_is_named_and_all_end(controller: RankController) -> None:
    """The last test of these ranks."""
    controller.run()
    os.kill(controller.ranks[1].process.pid, signal.SIGKILL)
    now = controller.wait(HANG_S)
    assert now.state == "failed" and now.failure is not None
    assert now.failure.message == "worker 1 is gone: its process was ended by SIGKILL"
    assert "start all of them anew" in now.failure.after
    assert controller.ranks[1].snapshot().ended and not controller.ranks[0].snapshot().ended
    failure = controller.ranks[0].snapshot().failure
    assert failure is not None and failure.error == "WorkerLostError"
    controller.close()
    assert not any(one.process.is_alive() for one in controller.ranks)
    assert controller.snapshot().state == "closed" and "were ended" in controller.snapshot().ended


@pytest.fixture(scope="module")
def recorded(controller: RankController, folder: Path) -> RecordedRun:
    if not controller.snapshot().step:
        controller.run(2)
        controller.wait(HANG_S)
    controller.close()
    return load_run(folder)


def test_a_recorded_run_shows_every_rank(recorded: RecordedRun) -> None:
    """Rank 1 may have been killed; the part written before is complete."""
    number = max({*recorded.traced} & {*recorded.others[0].traced})
    traces = recorded.traces(number)
    assert traces is not None and [trace.worker.rank for trace in traces] == [0, 1]
    assert all({*trace.lanes} >= {"gather", "reduce"} and trace.lanes["gather"] for trace in traces)
    text = render_report([recorded.truncated(number)])
    assert "<h2>2 workers</h2>" in text and "Who waits for whom in step" in text and "Lanes of worker 1" in text
    assert "Who waited for whom in steps" in text


def test_a_replay_shows_every_ranks_lanes(recorded: RecordedRun) -> None:
    replay = ReplayBench(recorded)
    number = max({*recorded.traced} & {*recorded.others[0].traced})
    replay.session.select(number)
    replay.views.show_view("waits")
    (panel,) = replay.views.visible_panels
    panel.show(replay.snapshot())
    shown = panel.still(replay.snapshot())
    assert len(shown) == 4 and shown[0].table.title.startswith("Who waits for whom")
    steps = [traces[0].step + 1 for traces in recorded.last_traces(24, number)]
    assert steps == sorted(steps) and shown[1].table.title == f"Who waited for whom in steps {steps[0]} to {steps[-1]}"
    assert panel.widget.children[4].value.count("<svg") == 2, "the lanes of both"
    replay.close()


@pytest.mark.slow
def test_a_rank_that_cannot_start_ends_all() -> None:
    with pytest.raises(LaunchError, match="rank 1 of 2 could not start(.|\n)*FileNotFoundError: no data on this rank"):
        RankProcesses(rank_training.train_but_one, 2)


@pytest.mark.slow
def test_relays_that_train_alone_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"Relay\(..., workers=Workers\(\)\)"):
        RankProcesses(rank_training.train_alone, 2)


def test_functions_that_processes_cannot_import_are_refused() -> None:
    def train() -> None: ...

    for invalid in (train, lambda: None, 7):
        with pytest.raises(TypeError, match="must be a function in a module"):
            RankProcesses(invalid, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers=1: must be 2 or more"):
        RankProcesses(rank_training.train, 1)
