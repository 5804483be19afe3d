"""Loggers of a run: one row per step, and every change between steps.

A logger is any object with the three methods of `Logger`. This file has one for lines of JSON and one for TensorBoard,
`experiment_loggers.py` has those for W&B, trackio and MLflow, and `Recorder` records everything that the views need.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from l2l_core import Inside
from l2l_core.edits import MAIN_BRANCH
from workbench.session.race_result import Race
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import Change, HeldOutRow, StepRow

SCHEMA = 1


@runtime_checkable
class Logger(Protocol):
    """Interface of loggers: any object with these three methods receives the steps and changes of a session.

    They are called by one thread at a time, after each step and each change. A row has the fields `step`, `loss`, `seconds`,
    `samples`, `tokens`, `epoch`, `lr`, `layers`, `branch`, `flop`, `overlap`, `peak_device_bytes`, `bytes_loaded`,
    `bytes_pushed` and `objective`. A change has `step`, `what` (in words), `branch`, and for an edit `entry` (its number in
    the journal) and `verdict` (its effect on the losses of the probe, in words).

    Example:
        >>> import csv
        >>> from dataclasses import asdict
        >>> from workbench import Session
        >>> class CsvFile:
        ...     def __init__(self, path):
        ...         self.file, self.writer = open(path, "w", newline=""), None
        ...     def log_step(self, row):
        ...         if self.writer is None:
        ...             self.writer = csv.DictWriter(self.file, list(asdict(row)))
        ...             self.writer.writeheader()
        ...         self.writer.writerow(asdict(row))
        ...         self.file.flush()
        ...     def log_change(self, change):
        ...         pass
        ...     def close(self):
        ...         self.file.close()
        >>> with Session(relay, lambda: batch, loggers=[CsvFile("steps.csv")]) as session:
        ...     session.run(2)
        ...     now = session.wait()
        >>> with open("steps.csv", newline="") as file:
        ...     [row["step"] for row in csv.DictReader(file)]
        ['1', '2']
    """

    def log_step(self, row: StepRow) -> None:
        """Log a finished step."""

    def log_change(self, change: Change) -> None:
        """Log a change of settings or of the model; an edit is logged after the probe has measured it."""

    def close(self) -> None:
        """End logging; may be called twice."""


@runtime_checkable
class SnapshotLogger(Protocol):
    """A logger that also receives snapshots, such as `Recorder`."""

    def watch(self, now: Snapshot) -> None:
        """Receive a snapshot that includes the step or change logged just before."""


@runtime_checkable
class RaceLogger(Protocol):
    """A logger that also receives races; the steps of the branches are logged by `log_step` like all others."""

    def log_race(self, race: Race) -> None:
        """Log a finished race."""


@runtime_checkable
class LookLogger(Protocol):
    """A logger that also receives looks inside layers."""

    def log_look(self, seen: Inside, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Log a look inside layers; `decode` is the session's."""


@runtime_checkable
class HeldOutLogger(Protocol):
    """A logger that also receives measurements on held-out data."""

    def log_held_out(self, row: HeldOutRow) -> None:
        """Log a measurement."""


def tag_of(name: str, branch: str) -> str:
    """Return the tag of a value: its name, followed by the name of any branch but the first."""
    return name if branch == MAIN_BRANCH else f"{name}/{branch}"


def scalars_of_held_out(row: HeldOutRow) -> dict[str, float]:
    """Return the values of a measurement on held-out data by tag."""
    return {tag_of(f"held_out/{name}", row.branch): value for name, value in row.values.items()}


def scalars_of(row: StepRow) -> dict[str, float]:
    """Return the figures of a step by tag: loss, learning rate, epoch, depth, times and bytes."""
    rate = {} if row.lr is None else {"lr": row.lr}
    epoch = {} if row.epoch is None else {"epoch": row.epoch}
    counted = {"step/tokens_per_s": row.per_s} if row.unit == "tokens" else {}
    scalars = (
        rate
        | epoch
        | counted
        | {
            "loss": row.loss,
            "layers": row.layers,
            "step/seconds": row.seconds,
            "step/samples_per_s": row.samples / row.seconds if row.seconds else math.nan,
            "step/overlap": row.overlap,
            "bytes/peak_device": row.peak_device_bytes,
            "bytes/loaded": row.bytes_loaded,
            "bytes/pushed": row.bytes_pushed,
        }
    )
    return {tag_of(name, row.branch): value for name, value in scalars.items()}


def scalars_of_change(change: Change) -> dict[str, float]:
    """Return the held-out loss after an edit, and its change, by tag; empty if they were not measured."""
    if change.judged is None:
        return {}
    scalars = {"probe/loss": change.judged.after.mean, "probe/change": change.judged.change}
    return {tag_of(name, change.branch): value for name, value in scalars.items()}


def text_of(change: Change) -> str:
    """Return a change, and for an edit its effect on the held-out loss, in words."""
    return change.what if change.entry is None else f"{change.what} (probe: {change.verdict})"


class JsonLines:
    """Logger to a file with one JSON object per line; each line is flushed, so a crash loses none.

    Every line has a `type`: "header" (schema, versions, start time; one per run), then "step", "change" and
    "held_out" with the fields of `StepRow`, `Change` and `HeldOutRow`. JSON has no NaN or infinity, so a number that is not
    finite becomes null. ``pandas.read_json(path, lines=True)`` reads it as a table.

    Args:
        path: the file; its folder is created.
        append: append to an existing file.

    Raises:
        FileExistsError: the file exists and `append` is False.

    Example:
        >>> import json
        >>> from workbench import JsonLines, Session
        >>> with Session(relay, lambda: batch, loggers=[JsonLines("run.jsonl")]) as session:
        ...     session.run(2)
        ...     now = session.wait()
        >>> with open("run.jsonl") as file:
        ...     [json.loads(line)["type"] for line in file]
        ['header', 'step', 'step']
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Binary, to read the last byte; "x" checks and creates in one operation.
            self._file = open(self.path, "a+b" if append else "xb")  # noqa: SIM115 - open until `close`
        except FileExistsError as error:
            raise FileExistsError(
                f"{self.path} exists already: give another path, or append=True to append to it"
            ) from error
        if append and self._ends_within_a_line():
            self._file.write(b"\n")
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self._write("header", {"schema": SCHEMA, "began": began, "versions": versions})

    def log_step(self, row: StepRow) -> None:
        """Write a step.

        Raises:
            ValueError: the logger is closed.
        """
        self._write("step", asdict(row))

    def log_change(self, change: Change) -> None:
        """Write a change.

        Raises:
            ValueError: the logger is closed.
        """
        self._write("change", asdict(change))

    def log_held_out(self, row: HeldOutRow) -> None:
        """Write a measurement on held-out data.

        Raises:
            ValueError: the logger is closed.
        """
        self._write("held_out", asdict(row))

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._file.closed:
            raise ValueError(f"{self.path} is closed: make a new JsonLines(..., append=True) to append to it")
        line = json.dumps({"type": kind, **_finite_or_none(fields)}, ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode("utf-8") + b"\n")
        self._file.flush()

    def _ends_within_a_line(self) -> bool:
        """Return True if the last line of the file is incomplete, because the writer was interrupted."""
        if self._file.seek(0, os.SEEK_END) == 0:
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


class TensorBoard:
    """Logger of scalars and changes to TensorBoard.

    Tags of a branch other than "main" end with its name, as ``loss/slim``, so that each branch has its own curve.

    Args:
        writer: a folder for a new `torch.utils.tensorboard.SummaryWriter`, or a writer, which stays open when the logger
            is closed.

    Raises:
        ModuleNotFoundError: `writer` is a folder and the package tensorboard is not installed.
        TypeError: neither a folder nor a writer.

    Example:
        See `JsonLines`; ``TensorBoard("out/tensorboard")`` takes its place in `loggers`.
    """

    def __init__(self, writer: str | Path | Any) -> None:
        self._owns_writer = isinstance(writer, str | Path)
        if not self._owns_writer and not all(hasattr(writer, name) for name in ("add_scalar", "add_text", "flush")):
            raise TypeError(f"writer={writer!r}: give a folder, or a SummaryWriter")
        self._writer: Any = _make_writer(Path(writer)) if self._owns_writer else writer

    def log_step(self, row: StepRow) -> None:
        """Write the figures of a step."""
        for tag, value in scalars_of(row).items():
            self._writer.add_scalar(tag, value, row.step)

    def log_change(self, change: Change) -> None:
        """Write a change as text at its step, and for a measured edit the probe's mean loss and its change."""
        self._writer.add_text(tag_of("change", change.branch), text_of(change), change.step)
        for tag, value in scalars_of_change(change).items():
            self._writer.add_scalar(tag, value, change.step)

    def log_held_out(self, row: HeldOutRow) -> None:
        """Write the values of a measurement on held-out data at its step."""
        for tag, value in scalars_of_held_out(row).items():
            self._writer.add_scalar(tag, value, row.step)

    def close(self) -> None:
        """Flush the writer, and close it if this logger created it."""
        self._writer.flush()
        if self._owns_writer:
            self._writer.close()


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite_or_none(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"TensorBoard({str(folder)!r}) needs a package that is not installed: pip install tensorboard",
            name=error.name,
        ) from error
    return SummaryWriter(log_dir=str(folder))
