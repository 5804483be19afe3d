"""Loggers: files that can be read line by line, also after a crash, and refusals with a remedy."""

import importlib.util
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import HANG_S
from sessions import make_batches

from l2l_core import Drop, Relay
from workbench.session.experiment_loggers import MLflow, Wandb
from workbench.session.loggers import JsonLines, Logger, TensorBoard
from workbench.session.session import Session
from workbench.session.snapshot_values import Change, StepRow

ROW = StepRow(
    step=3,
    loss=2.5,
    seconds=0.5,
    samples=8,
    peak_device_bytes=1000,
    bytes_loaded=700,
    bytes_pushed=300,
    overlap=0.75,
)
CHANGE = Change(step=3, what="micro_batches 4 → 8")

has_tensorboard = importlib.util.find_spec("tensorboard") is not None


def diverged(loss: float) -> StepRow:
    return StepRow(4, loss, 0.5, 8, 1000, 700, 300, 0.75)


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


class Writer:
    """Stand-in for a SummaryWriter that keeps its input."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = self.closed = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag] = (value, step)

    def add_text(self, tag: str, words: str, step: int) -> None:
        self.texts.append((tag, words, step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


# JSON lines ----------------------------------------------------------------------------------------------------------


def test_a_header_and_one_object_per_line(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "runs" / "log.jsonl")
    logger.log_step(ROW)
    logger.log_change(CHANGE)
    logger.close()
    header, step, change = read(tmp_path / "runs" / "log.jsonl")
    assert header["type"] == "header" and header["schema"] == 1
    assert header["versions"]["torch"] == torch.__version__ and header["versions"]["python"].startswith("3.")
    assert step.pop("type") == "step" and StepRow(**step) == ROW
    assert change.pop("type") == "change" and Change(**change) == CHANGE


def test_lines_are_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "log.jsonl")
    for count in (2, 3):
        logger.log_step(ROW)
        assert len(read(tmp_path / "log.jsonl")) == count
    logger.close()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_number_is_null(tmp_path: Path, loss: float) -> None:
    logger = JsonLines(tmp_path / "log.jsonl")
    logger.log_step(diverged(loss))
    logger.close()
    assert read(tmp_path / "log.jsonl")[1]["loss"] is None


def test_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("mine\n")
    with pytest.raises(FileExistsError, match=r"log\.jsonl exists already.*append=True"):
        JsonLines(path)
    assert path.read_text() == "mine\n"


def test_appending_writes_another_header(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for append in (False, True):
        logger = JsonLines(path, append=append)
        logger.log_step(ROW)
        logger.close()
    assert [row["type"] for row in read(path)] == ["header", "step", "header", "step"]


def test_appending_to_an_incomplete_line_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"type": "step", "lo')
    JsonLines(path, append=True).close()
    torn, header = path.read_text().splitlines()
    assert torn == '{"type": "step", "lo' and json.loads(header)["type"] == "header"


def test_appending_may_start_a_file(tmp_path: Path) -> None:
    JsonLines(tmp_path / "log.jsonl", append=True).close()
    assert [row["type"] for row in read(tmp_path / "log.jsonl")] == ["header"]


def test_closed_log_raises(tmp_path: Path) -> None:
    logger = JsonLines(tmp_path / "log.jsonl")
    logger.close()
    logger.close()
    with pytest.raises(ValueError, match="closed.*append=True"):
        logger.log_step(ROW)


# TensorBoard ---------------------------------------------------------------------------------------------------------


def test_writer_gets_figures_at_their_step() -> None:
    writer = Writer()
    logger = TensorBoard(writer)
    logger.log_step(ROW)
    logger.log_change(CHANGE)
    assert writer.scalars["loss"] == (2.5, 3)
    assert writer.scalars["step/samples_per_s"] == (16.0, 3)
    assert writer.scalars["bytes/peak_device"] == (1000, 3)
    assert writer.texts == [("change", "micro_batches 4 → 8", 3)]


class Run:
    """Stand-in for a run of W&B that keeps its input."""

    def __init__(self) -> None:
        self.logged: dict[tuple[str, int], Any] = {}
        self.config: dict[str, Any] = {}

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged |= {(name, step): value for name, value in values.items()}


class Client:
    """Stand-in for MLflow's client, which refuses other characters in names as the real one does."""

    def __init__(self, *_: Any) -> None:
        self.run, self.texts = Run(), ""

    def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
        assert re.fullmatch(r"[/\w.\- ]*", name)
        self.run.log({name: value}, step)

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self.texts = text

    def log_param(self, *_: Any) -> None: ...


class LikeMLflow(MLflow):
    def _import(self) -> Any:
        return SimpleNamespace(tracking=SimpleNamespace(MlflowClient=Client))


def test_branches_of_a_race_have_their_own_tags_in_every_logger(relay: Relay) -> None:
    writer, run, mlflow, seen = Writer(), Run(), LikeMLflow(run_id="one"), Recorder()
    loggers = [TensorBoard(writer), Wandb(run), mlflow, seen]
    with Session(relay, make_batches(), loggers=loggers, probe=make_batches()[:1]) as session:
        for name in ("slim", "a:b"):
            session.fork(name).result(HANG_S)
            session.edit(Drop(0)).result(HANG_S)
            session.switch("main").result(HANG_S)
        session.race("main", "slim", "a:b", steps=2).result(HANG_S)
        assert session.wait(HANG_S).failure is None
    losses = {(row.branch, row.step): row.loss for row in seen.steps}
    assert len(losses) == 6
    tags = {"main": "loss", "slim": "loss/slim", "a:b": "loss/a:b"}
    assert {each: run.logged[tags[each[0]], each[1]] for each in losses} == losses
    tags |= {"a:b": "loss/a_b"}
    assert {each: mlflow._client.run.logged[tags[each[0]], each[1]] for each in losses} == losses
    assert {name: writer.scalars[f"loss{end}"] for name, end in (("main", ""), ("slim", "/slim"))} == {
        name: (losses[name, 2], 2) for name in ("main", "slim")
    }
    assert {"change", "change/slim"} <= {tag for tag, _, _ in writer.texts}
    assert {"change", "change/slim"} <= {name for name, _ in run.logged}
    assert "step 0/slim: " in mlflow._client.texts and "probe/loss/slim" in writer.scalars


def test_writer_of_the_user_stays_open() -> None:
    writer = Writer()
    TensorBoard(writer).close()
    assert writer.flushed == 1 and not writer.closed


def test_invalid_writer_is_refused() -> None:
    with pytest.raises(TypeError, match="writer=3: give a folder, or a SummaryWriter"):
        TensorBoard(3)


@pytest.mark.skipif(has_tensorboard, reason="tensorboard is installed")
def test_missing_tensorboard_raises_with_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


@pytest.mark.skipif(not has_tensorboard, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")  # from imports of tensorboard, whose version is not pinned
def test_a_real_writer_makes_a_file(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path)
    logger.log_step(ROW)
    logger.log_change(CHANGE)
    logger.close()
    assert list(tmp_path.glob("events.out.tfevents.*"))


# The protocol --------------------------------------------------------------------------------------------------------


def test_a_class_with_three_methods_is_a_logger(tmp_path: Path) -> None:
    class Mine:
        def log_step(self, row: StepRow) -> None: ...
        def log_change(self, change: Change) -> None: ...
        def close(self) -> None: ...

    log = JsonLines(tmp_path / "log.jsonl")
    log.close()
    assert isinstance(Mine(), Logger) and isinstance(log, Logger) and isinstance(TensorBoard(Writer()), Logger)
    assert not isinstance(object(), Logger)


# In a session ---------------------------------------------------------------------------------------------------------


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


def test_failing_logger_loses_no_step(relay: Relay) -> None:
    with Session(relay, make_batches(), loggers=[Recorder(fails=True)]) as session:
        session.run(2)
        now = session.wait(HANG_S)
        assert now.failure is not None and now.failure.during == "logger" and "done and counted" in now.failure.after
        assert now.step == now.done == 1
        session.run()
        assert session.wait(HANG_S).step == 2


def test_other_loggers_are_notified_when_one_fails(relay: Relay) -> None:
    good, bad = Recorder(), Recorder(fails=True)
    with Session(relay, make_batches(), loggers=[bad, good]) as session:
        session.step()
        now = session.wait(HANG_S)
    assert now.failure is not None and now.failure.during == "logger" and tuple(good.steps) == now.steps != ()


def test_change_that_cannot_be_logged_is_made(relay: Relay) -> None:
    class Full(Recorder):
        def log_change(self, change: Change) -> None:
            raise OSError("disk full")

    with Session(relay, make_batches(), loggers=[Full()]) as session:
        assert session.edit(lambda relay: 42, what="count").result(HANG_S) == 42
        now = session.wait(HANG_S)
        assert now.state == "failed" and now.failure is not None and now.failure.during == "logger"
        assert "change" in now.failure.after and now.changes == (Change(0, "count"),)
