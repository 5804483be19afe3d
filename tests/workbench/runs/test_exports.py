"""Exported files can be read by their programs, contain the shown step or run, and overwrite nothing."""

from __future__ import annotations

import gzip
import importlib.util
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

import pytest
from patience import HANG_S
from sessions import make_batches, make_relay, train

from l2l_core import Drop, EmulatedDevice, Move
from workbench.pictures import race_table
from workbench.runs.exports import EXPORTS, export
from workbench.session import Session, Snapshot


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        train(session, 3)
        session.edit(Move(0, 2)).result(HANG_S)
        train(session, 2)
        session.evaluate(make_batches(1)).result(HANG_S)
        yield session


@pytest.fixture(scope="module")
def now(session: Session) -> Snapshot:
    return session.snapshot()


def test_perfetto_gets_every_event_of_the_step(session: Session, now: Snapshot, tmp_path: Path) -> None:
    written = export("Perfetto", session, tmp_path / "a" / "b")
    assert written.path == tmp_path / "a" / "b" / "step_5.json.gz" and written.description == "step 5"
    assert written.viewer_url == "https://ui.perfetto.dev"
    rows = json.loads(gzip.decompress(written.path.read_bytes()))["traceEvents"]
    assert now.last is not None
    assert sum(row["ph"] == "X" for row in rows) == now.last.counts[0] > 20


def test_the_memory_viewer_gets_the_bytes_of_the_step(session: Session, now: Snapshot, tmp_path: Path) -> None:
    written = export("Memory viewer", session, tmp_path)
    assert written.path.name == "step_5_memory.pickle"
    actions = pickle.loads(written.path.read_bytes())["device_traces"][0]
    used = peak = 0
    for action in actions:
        used += {"alloc": action["size"], "free_completed": -action["size"]}.get(action["action"], 0)
        peak = max(peak, used)
    assert now.last is not None and peak == now.last.peak_bytes("device")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_gets_every_step_and_change(session: Session, now: Snapshot, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = export("TensorBoard", session, tmp_path)
    assert written.path == tmp_path / "tensorboard" / "step_5" and str(tmp_path / "tensorboard") in written.next_step
    found = EventAccumulator(str(written.path))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("loss")]
    assert losses == [(row.step, pytest.approx(row.loss)) for row in now.steps] and len(losses) == 5
    assert found.Tags()["tensors"] == ["change/text_summary"]
    (measured,) = found.Scalars("held_out/loss")
    assert (measured.step, measured.value) == (5, pytest.approx(now.held_out[0].values["loss"]))


def test_the_report_has_the_whole_run_and_the_shown_step(session: Session, now: Snapshot, tmp_path: Path) -> None:
    written = export("Report", session, tmp_path)
    text = written.path.read_text(encoding="utf-8")
    assert written.path.name == "step_5_report.html" and "5 steps" in text and "Step 5" in text
    assert f"{now.steps[0].loss:.4g}" in text and "Made from the open session" in text
    assert escape(now.changes[0].what) in text and text.count("<svg") >= 5
    columns = now.statistics.values("grad_norm", now.statistics.stack).shape[1]
    assert columns == 5 and "Gradient norm of layers" in text


def test_nothing_is_overwritten(session: Session, tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        for name in EXPORTS:
            names.add(export(name, session, tmp_path).path)
    assert len(names) == 12 and tmp_path / "step_5-3.json.gz" in names and tmp_path / "tensorboard/step_5-2" in names
    assert all(path.exists() for path in names)


def test_file_names_have_the_branch_if_there_are_several(tmp_path: Path) -> None:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        train(session, 1)
        session.fork("wide / 2").result(HANG_S)
        train(session, 1)
        assert export("Perfetto", session, tmp_path).path.name == "wide_2_step_2.json.gz"


def test_after_a_fork_runs_have_the_new_branch_and_steps_the_parent(tmp_path: Path) -> None:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        train(session, 2)
        session.fork("slim").result(HANG_S)
        session.edit(Drop(0)).result(HANG_S)
        now = session.snapshot()
        assert now.shown is not None and (now.branch, now.shown.branch) == ("slim", "main")
        assert {name: export(name, session, tmp_path).path.name for name in EXPORTS} == {
            "Perfetto": "main_step_2.json.gz",
            "Memory viewer": "main_step_2_memory.pickle",
            "TensorBoard": "slim_step_2",
            "Report": "slim_step_2_report.html",
        }


def test_the_report_of_a_session_has_the_race_that_is_over(tmp_path: Path) -> None:
    with make_relay() as relay, Session(relay, make_batches(), probe=make_batches(8)[5:]) as session:
        train(session, 1)
        session.fork("slim").result(HANG_S)
        assert "<h2>Race of" not in export("Report", session, tmp_path).path.read_text(encoding="utf-8")
        race = session.race("main", "slim", steps=2).result(HANG_S)
        text = export("Report", session, tmp_path).path.read_text(encoding="utf-8")
    assert "<h2>Race of main, slim</h2>" in text
    assert all(cell in text for row in race_table(race).rows for cell in row)


@contextmanager
def files_of_at_most(most_bytes: int) -> Iterator[None]:
    """Limit the size of files, to simulate a full disk."""
    resource = pytest.importorskip("resource", reason="only Unix limits the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The writer thread of TensorBoard raises the error once more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", EXPORTS)
def test_a_failed_write_leaves_nothing(session: Session, name: str, tmp_path: Path) -> None:
    whole = export(name, session, tmp_path).path
    before = sorted(tmp_path.rglob("*"))
    half = (before[-1] if whole.is_dir() else whole).stat().st_size // 2
    running = set(threading.enumerate())
    with files_of_at_most(half), pytest.raises(OSError, match="File too large"):
        export(name, session, tmp_path)
    for thread in set(threading.enumerate()) - running:  # otherwise its error would fail the next test
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", EXPORTS)
def test_before_the_first_step_there_is_nothing_to_write(name: str, tmp_path: Path) -> None:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        with pytest.raises(ValueError, match="no step to write yet: press Run or Step first"):
            export(name, session, tmp_path / "exports")
    assert not (tmp_path / "exports").exists(), "not even a folder"


def test_the_memory_of_a_failed_step_is_written(tmp_path: Path) -> None:
    with make_relay(device=EmulatedDevice(memory_bytes=2_500)) as relay, Session(relay, make_batches()) as session:
        session.step()
        now = session.wait(HANG_S)
        assert now.failure is not None and now.failure.trace is not None and now.last is None
        written = export("Memory viewer", session, tmp_path)
        assert written.path.name == "failed_step_1_memory.pickle" and written.description == "step 1, which failed"
        assert pickle.loads(written.path.read_bytes())["device_traces"][0]
        with pytest.raises(ValueError, match="no step to write yet"):
            export("Perfetto", session, tmp_path)


@pytest.mark.parametrize("name", EXPORTS)
def test_a_path_below_a_file_is_an_error(session: Session, name: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OSError):
        export(name, session, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_closed_session_can_be_written_too(tmp_path: Path) -> None:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        train(session, 1)
    assert session.snapshot().state == "closed" and export("Report", session, tmp_path).path.exists()
