"""Where the figures of a run go besides the screen: one row per step, and every change between steps.

A logger is any object with the three methods of `Logger`. Two are here, and `recorder.py` has one that keeps all that the
views need. Others take a few lines, for example wandb (trackio's functions have the same names, so `import trackio as wandb`
will do):

    class Wandb:
        def __init__(self, **options): self.run = wandb.init(**options)
        def log_step(self, row): self.run.log({"loss": row.loss, "seconds": row.seconds}, step=row.step)
        def log_change(self, change): self.run.log({"change": change.what}, step=change.step)
        def close(self): self.run.finish()
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
from workbench.session.race_result import Race
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import Change, StepRow

SCHEMA = 1


@runtime_checkable
class Logger(Protocol):
    """Takes what a session has to tell, from one thread at a time."""

    def log_step(self, row: StepRow) -> None:
        """A step is finished."""

    def log_change(self, change: Change) -> None:
        """Settings or the model have changed since the last step; of an edit, this comes once the probe has judged it."""

    def close(self) -> None:
        """Nothing more will come; calling it twice is fine."""


@runtime_checkable  # a session asks each logger whether it is one, and nobody has to inherit
class SnapshotLogger(Protocol):
    """A logger that also wants to see the whole session, as `Recorder` does."""

    def watch(self, now: Snapshot) -> None:
        """Look at the session, in which the step or change that was logged just before shows by now."""


@runtime_checkable
class RaceLogger(Protocol):
    """A logger that also takes races; the steps of the branches come to `log_step`, one by one, as all do."""

    def log_race(self, race: Race) -> None:
        """A race is over."""


@runtime_checkable
class LookLogger(Protocol):
    """A logger that also takes looks inside of layers."""

    def log_look(self, seen: Inside, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Somebody has looked; `decode` is the session's."""


class JsonLines:
    """A file with one JSON object per line, each written out at once, so that a crash loses nothing.

    Every line has a `type`: "header" (schema, versions, when the run began; one per run), then "step" and "change" with
    the fields of `StepRow` and `Change`. JSON has no NaN or infinity: a number that is not finite becomes null.

    Args:
        path: the file; its folder is made.
        append: go on at the end of a file that is there.

    Raises:
        FileExistsError: the file is there and `append` is off.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Binary, so that the last byte can be looked at; with "x" nobody can make the file in between.
            self._file = open(self.path, "a+b" if append else "xb")
        except FileExistsError as error:
            raise FileExistsError(
                f"{self.path} exists already: give another path, or append=True to go on at its end"
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

    def close(self) -> None:
        """Close the file; calling it twice is fine."""
        self._file.close()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        if self._file.closed:
            raise ValueError(f"{self.path} is closed: make a new JsonLines(..., append=True) to go on")
        line = json.dumps({"type": kind, **_finite_or_none(fields)}, ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode("utf-8") + b"\n")
        self._file.flush()  # a crash of the process loses none; a buffer would keep the last few

    def _ends_within_a_line(self) -> bool:
        """Whether what wrote the file before was interrupted; its last line then stays as it is."""
        if self._file.seek(0, os.SEEK_END) == 0:
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"


class TensorBoard:
    """Scalars and changes for TensorBoard.

    Args:
        writer: a folder for a new `torch.utils.tensorboard.SummaryWriter`, or a writer of your own, which stays open
            when the logger closes.

    Raises:
        ModuleNotFoundError: a folder was given and the package tensorboard is not installed.
        TypeError: neither a folder nor a writer.
    """

    def __init__(self, writer: str | Path | Any) -> None:
        self._owns_writer = isinstance(writer, str | Path)
        if not self._owns_writer and not all(hasattr(writer, name) for name in ("add_scalar", "add_text", "flush")):
            raise TypeError(f"writer={writer!r}: give a folder, or a SummaryWriter")
        self._writer = _make_writer(Path(writer)) if self._owns_writer else writer

    def log_step(self, row: StepRow) -> None:
        """Write the figures of a step."""
        scalars = {
            "loss": row.loss,
            "step/seconds": row.seconds,
            "step/samples_per_s": row.samples / row.seconds if row.seconds else math.nan,
            "step/overlap": row.overlap,
            "bytes/peak_device": row.peak_device_bytes,
            "bytes/loaded": row.bytes_loaded,
            "bytes/pushed": row.bytes_pushed,
        }
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, row.step)

    def log_change(self, change: Change) -> None:
        """Write a change as text at its step; of an edit that was judged, the probe's mean loss and its change too."""
        said = change.what if change.entry is None else f"{change.what} (probe: {change.verdict})"
        self._writer.add_text("change", said, change.step)
        if change.judged is not None:
            self._writer.add_scalar("probe/loss", change.judged.after.mean, change.step)
            self._writer.add_scalar("probe/change", change.judged.change, change.step)

    def close(self) -> None:
        """Flush; close the writer if it was made here."""
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
