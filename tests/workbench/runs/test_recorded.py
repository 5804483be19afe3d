"""Recorded runs give back the snapshots of the session; damaged and truncated files are refused or repaired."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HANG_S
from recordings import record
from sessions import make_batches, make_relay, train

from l2l_core import Move
from workbench.pictures.edit_journal import journal_table
from workbench.runs.html_report import render_report
from workbench.runs.recorder import Recorder
from workbench.runs.run_lines import SnapshotDelta, to_json
from workbench.runs.run_loader import load_run
from workbench.session.branch_history import BranchHistories
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import HeldOutRow
from workbench.what_if.assumed_costs import AssumedCosts

SHOWN = (
    "model",
    "num_params",
    "device",
    "figures",
    "config",
    "step",
    "steps",
    "changes",
    "shell_params",
    "in_core_bytes",
)


class SnapshotCollector:
    """A logger that keeps every snapshot."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def log_step(self, row: object) -> None: ...

    def log_change(self, change: object) -> None: ...

    def watch(self, now: Snapshot) -> None:
        self.snapshots.append(now)

    def close(self) -> None: ...


def watch(path: Path, **options: Any) -> list[Snapshot]:
    """Record a run and return old snapshots."""
    collector = SnapshotCollector()
    record(path, collector, **options)
    return collector.snapshots


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "below" / "run.jsonl"


@pytest.fixture(scope="module")
def snapshots(path: Path) -> list[Snapshot]:
    return watch(path, title="a <run>")


# Round trips ---------------------------------------------------------------------------------------------------------


def test_every_moment_comes_back(path: Path, snapshots: list[Snapshot]) -> None:
    run = load_run(path)
    assert run.complete and run.title == "a <run>" and len(run.moments) == len(snapshots) == 12
    assert run.machine["torch"] == torch.__version__
    for number, now in enumerate(snapshots):
        again = run.snapshot(number)
        assert again.state == "closed" and again.progress is None
        for name in SHOWN:
            assert getattr(again, name) == getattr(now, name), (number, name)
        for new, old in zip(again.layers, now.layers, strict=True):
            assert (new.key, new.name, new.version, new.frozen) == (old.key, old.name, old.version, old.frozen)
            assert new.grad_norm == pytest.approx(old.grad_norm, rel=1e-5)
    assert run.snapshot().step == 10 and run.snapshot().layers[2].key == snapshots[0].layers[0].key
    with pytest.raises(ValueError, match="number=12: .* has moments 0 to 11"):
        run.snapshot(12)


def test_statistics_come_back(path: Path, snapshots: list[Snapshot]) -> None:
    new, old = load_run(path).snapshot().statistics, snapshots[-1].statistics
    assert [track.key for track in new.stack] == [track.key for track in old.stack]
    assert new.first.tolist() == old.first.tolist() == list(range(1, 11))
    for figure in ("grad_norm", "update_ratio"):
        a, b = new.values(figure, new.stack), old.values(figure, old.stack)
        assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-5, equal_nan=True)


def test_branches_come_back(tmp_path: Path) -> None:
    collector = SnapshotCollector()
    with make_relay() as relay:
        with Session(relay, make_batches(), loggers=[Recorder(tmp_path / "run.jsonl"), collector]) as session:
            train(session, 3)
            session.fork("aside").result(HANG_S)
            train(session, 2)
            session.switch("main").result(HANG_S)
            train(session, 4)
    run = load_run(tmp_path)
    assert len(run.moments) == len(collector.snapshots) == 3 + 1 + 2 + 1 + 4
    for number, now in enumerate(collector.snapshots):
        again = run.snapshot(number)
        assert (again.branch, again.steps, again.elsewhere) == (now.branch, now.steps, now.elsewhere), number
        assert again.statistics.first.tolist() == now.statistics.first.tolist()
    assert [row.step for row in run.snapshot().steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.step for row in run.snapshot().elsewhere["aside"]] == [3, 4, 5]


def test_probe_results_come_back_exactly(tmp_path: Path) -> None:
    collector = SnapshotCollector()
    nan = (torch.full((6, 4), math.nan), torch.zeros(6, 1))
    with make_relay() as relay:
        recorder = Recorder(tmp_path / "run.jsonl")
        with Session(relay, make_batches(), loggers=[recorder, collector], probe=[*make_batches(2), nan]) as session:
            train(session, 1)
            session.edit(Move(0, 2)).result(HANG_S)
            session.wait(HANG_S)
            session.probe_on = False
            session.undo().result(HANG_S)
            train(session, 1)
    run = load_run(tmp_path)
    assert len(run.moments) == len(collector.snapshots) == 4, "an edit is one moment, after old probe"
    moved, undone = run.snapshot().changes
    assert moved.judged is not None and undone.why_not == "the probe is off"
    assert repr(run.snapshot().changes) == repr(collector.snapshots[-1].changes), "compared by repr, because NaN != NaN"
    assert math.isnan(moved.judged.after.losses[2]) and not math.isnan(moved.judged.after.losses[0])
    (line,) = [cells for cells in journal_table(run.snapshot().journal, run.snapshot().changes).rows if cells[0] == "0"]
    assert line[3] == moved.verdict
    assert moved.verdict in render_report([run]).replace("&#39;", "'")


def test_traces_come_back_exactly(path: Path, snapshots: list[Snapshot]) -> None:
    run = load_run(path)
    # steps 1, 2, 4 and 8; 5 to 8 around the two changes; the last
    assert [run.snapshot(number).step for number in run.traced] == [1, 2, 4, 5, 6, 7, 8, 10]
    for number in run.traced:
        new, old = run.trace(number), snapshots[number].last
        assert old is not None
        assert new.events_since(0) == old.events_since(0) and new.memory == old.memory
        assert (new.step, new.device, new.names, new.settings) == (old.step, old.device, old.names, old.settings)
        assert new.overlap() == old.overlap()
    assert run.snapshot(2).last is run.trace(1)  # the third step has no trace
    with pytest.raises(ValueError, match="number=2: whole steps were recorded at moments 0, 1, 3"):
        run.trace(2)


def test_a_compressed_run_is_the_same(tmp_path: Path, path: Path, snapshots: list[Snapshot]) -> None:
    packed = tmp_path / "run.jsonl.gz"
    record(packed)
    assert packed.stat().st_size < 0.4 * path.stat().st_size
    assert load_run(packed).snapshot().steps[-1].loss == snapshots[-1].steps[-1].loss
    assert load_run(tmp_path).path == packed  # a folder with a run in it


def test_few_traces_are_the_first_and_the_last(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", traces=1)
    run = load_run(tmp_path)
    assert [run.snapshot(number).step for number in run.traced] == [1, 10]


def test_held_out_losses_levels_and_facts_are_kept(tmp_path: Path) -> None:
    with make_relay() as relay:
        recorder = Recorder(tmp_path / "run.jsonl")
        with Session(relay, make_batches(), loggers=[recorder]) as session:
            train(session, 1)
            recorder.log_held_out(HeldOutRow(1, {"loss": 2.5}))
            recorder.log_level("guessing", 5.5)
            recorder.log_fact("equal", "perhaps")
            recorder.log_fact("equal", "to the bit")
    run = load_run(tmp_path)
    assert (run.levels, run.facts) == ((("guessing", 5.5),), {"equal": "to the bit"})
    assert run.held_out == ((0, HeldOutRow(1, {"loss": 2.5})),) and run.snapshot().held_out == (run.held_out[0][1],)
    assert run.title == "run"


def test_losses_that_are_not_numbers_come_back(tmp_path: Path, snapshots: list[Snapshot]) -> None:
    rows = tuple(replace(snapshots[1].steps[i], loss=loss) for i, loss in enumerate((math.inf, math.nan)))
    with Recorder(tmp_path / "run.jsonl") as recorder:
        recorder.watch(replace(snapshots[1], steps=rows))
    first, second = load_run(tmp_path).snapshot().steps
    assert first.loss == math.inf and math.isnan(second.loss)
    assert "NaN" not in (tmp_path / "run.jsonl").read_text() and "Infinity" not in (tmp_path / "run.jsonl").read_text()


# A writer that was interrupted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_crash_loses_at_most_the_last_line(tmp_path: Path, name: str) -> None:
    recorder = Recorder(tmp_path / name)
    with make_relay() as relay, Session(relay, make_batches(), loggers=[recorder]) as session:
        train(session, 4)
        written = (tmp_path / name).read_bytes()  # the contents of the disk if the process ends here
    (tmp_path / name).write_bytes(written)
    run = load_run(tmp_path)
    assert not run.complete and run.snapshot().step == 4
    (tmp_path / name).write_bytes(written[:-20])
    assert load_run(tmp_path).snapshot().step in (3, 4)  # at least the trace of the fourth step is lost


# Refusals ------------------------------------------------------------------------------------------------------------


def test_another_suffix_and_an_existing_file_are_refused(path: Path, snapshots: list[Snapshot]) -> None:
    with pytest.raises(ValueError, match=r"run.json'.*jsonl.gz to have it compressed"):
        Recorder(path.with_suffix(".json"))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        Recorder(path)


def test_a_closed_recorder_is_refused(tmp_path: Path, snapshots: list[Snapshot]) -> None:
    recorder = Recorder(tmp_path / "run.jsonl")
    recorder.close()
    recorder.close()
    with pytest.raises(ValueError, match="is closed"):
        recorder.watch(snapshots[0])
    with pytest.raises(ValueError, match="holds no step and no change"):
        load_run(tmp_path)


def test_the_error_for_a_missing_run_has_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="loggers=.Recorder.*make demo"):
        load_run(tmp_path / "none.jsonl")


CHANGE = {"step": 1, "what": "an edit"}
UNEQUAL = {"before": {"losses": [1.0, 2.0], "seconds": 0.1}, "after": {"losses": [1.0], "seconds": 0.1}}


def change(lines: list[str], number: int, **fields: Any) -> list[str]:
    row = json.loads(lines[number - 1]) | fields
    return [*lines[: number - 1], json.dumps(row), *lines[number:]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:2], lines[2][:30], *lines[3:]], "line 3: this is not what Recorder writes"),
        (lambda lines: [lines[0], "[]", *lines[1:]], "line 2: "),
        (lambda lines: lines[1:], "line 1: .* of the type 'moment' cannot be here"),
        (lambda lines: change(lines, 1, schema="other"), "line 1: .*'other'"),
        (lambda lines: change(lines, 2, lists={"steps": [3, []]}), "line 2: .*keeps 3 of 0 steps"),
        (lambda lines: change(lines, 2, lists={"steps": [0, [{"loss": 1.0}]]}), "line 2: .*missing"),
        (lambda lines: change(lines, 2, layers={"version": ["x"]}), "line 2: "),
        (lambda lines: change(lines, 2, lists={"changes": [0, [CHANGE | {"judged": {"before": 1}}]]}), "line 2: "),
        (lambda lines: change(lines, 2, lists={"changes": [0, [CHANGE | {"judged": UNEQUAL}]]}), "line 2: .*2 losses"),
        (lambda lines: change(lines, 3, of=99), "line 3: .*a trace of moment 99"),
        (lambda lines: change(lines, 3, type="dance"), "line 3: .*unknown type 'dance'"),
    ],
)
def test_a_damaged_line_is_named(
    path: Path, snapshots: list[Snapshot], tmp_path: Path, damage: Any, message: str
) -> None:
    lines = damage(path.read_text(encoding="utf-8").splitlines())
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_run(tmp_path)


def test_a_damaged_trace_is_named_when_it_is_read(path: Path, snapshots: list[Snapshot], tmp_path: Path) -> None:
    lines = change(path.read_text(encoding="utf-8").splitlines(), 3, events=[[9, 0, 0.0, 1.0, 0, 0, 0, 0, 0.0]])
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = load_run(tmp_path)
    assert run.snapshot().step == 10
    with pytest.raises(ValueError, match="line 3: this is not what Recorder writes"):
        run.trace(0)


def test_a_file_that_is_no_gzip_is_refused(tmp_path: Path, path: Path, snapshots: list[Snapshot]) -> None:
    (tmp_path / "run.jsonl.gz").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="is damaged: Not a gzipped file"):
        load_run(tmp_path)
    whole = bytearray(gzip.compress(path.read_bytes()))
    whole[len(whole) // 2] ^= 0xFF
    (tmp_path / "run.jsonl.gz").write_bytes(whole)
    with pytest.raises(ValueError, match="damaged|not what Recorder writes"):
        load_run(tmp_path)


@pytest.mark.parametrize("version", [1, 6, 8])
def test_another_version_of_the_format_is_refused(
    path: Path, snapshots: list[Snapshot], tmp_path: Path, version: int
) -> None:
    lines = change(path.read_text(encoding="utf-8").splitlines(), 1, version=version)
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    message = rf"run.jsonl has version {version} of .*, and this release reads version 7: record the run again, or read .* with"
    with pytest.raises(ValueError, match=message):
        load_run(tmp_path)


def test_an_event_with_too_few_fields_is_refused(path: Path, snapshots: list[Snapshot], tmp_path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    events = [event[:-1] for event in json.loads(lines[2])["events"]]
    (tmp_path / "run.jsonl").write_text("\n".join(change(lines, 3, events=events)) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 3: this is not what Recorder writes"):
        load_run(tmp_path).trace(0)


def test_trained_parameters_come_back() -> None:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        now = session.snapshot()
    delta = SnapshotDelta()
    delta.apply(json.loads(to_json(SnapshotDelta().encode(now))))
    again = delta.decode(1, BranchHistories("main", ["main"]), None)
    assert again.shell_trained == relay.shell.num_trained and again.layers[0].num_trained == now.layers[0].num_trained
    assert AssumedCosts.of(again).layer_trained is not None


def test_measurements_come_back_with_their_branch_and_moment(tmp_path: Path) -> None:
    absolute = {"absolute": lambda outputs, batch: float((outputs - batch[1]).abs().mean())}
    with make_relay() as relay:
        loggers = [Recorder(tmp_path / "run.jsonl")]
        with Session(relay, make_batches(), loggers=loggers) as session:
            session.evaluate(make_batches(2), absolute, every=2).result(HANG_S)
            train(session, 2)
            session.fork("wide").result(HANG_S)
            train(session, 2)
            wide = session.snapshot()
            session.switch("main").result(HANG_S)
            main = session.wait(HANG_S)
    run = load_run(tmp_path)
    assert run.snapshot().held_out == main.held_out and [row.step for row in main.held_out] == [0, 2]
    last_of_wide = max(number for number in range(len(run.moments)) if run.snapshot(number).branch == "wide")
    assert run.snapshot(last_of_wide).held_out == wide.held_out and len(wide.held_out) == 3
    assert [row.step for row in run.snapshot(0).held_out] == [0]
    assert run.snapshot().steps == main.steps, "with epochs and operations"
    page = render_report([run])
    assert "The bold line is the loss on held-out data" in page and "held-out absolute" in page


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    with make_relay() as relay, Session(relay, make_batches(), loggers=[Recorder(tmp_path / "run.jsonl")]) as session:
        train(session, 1)
        session.evaluate(make_batches(1)).result(HANG_S)
    file = tmp_path / "run.jsonl"
    text = file.read_text(encoding="utf-8")
    number = next(i for i, line in enumerate(text.splitlines(), start=1) if '"held_out"' in line)
    file.write_text(text.replace('"values":{"loss"', '"values":{"other"'), encoding="utf-8")
    with pytest.raises(ValueError, match=f"line {number}.*a measurement without a loss"):
        load_run(file)
