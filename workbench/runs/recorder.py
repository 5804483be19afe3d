"""Writes what a session shows into one file, from which reports and replays are made: see `run_lines.py` for its lines.

Each line is written out at once, so a crash loses at most the last one. Nothing is pickled.
"""

from __future__ import annotations

import gzip
import os
import platform
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast
from weakref import ref

import psutil
import torch

from l2l_core import Inside, Trace
from workbench.runs.look_lines import Decode, look_row
from workbench.runs.race_lines import race_row
from workbench.runs.run_lines import SCHEMA, VERSION, SnapshotDelta, to_json, trace_row
from workbench.session import Change, Race, Snapshot, StepRow

MAX_TRACES = 40


class Recorder:
    """A logger that records everything that the views need, so that `load_run` can show it again without a model.

    Every step is recorded with its figures and those of every layer (about 40 bytes per layer and step, before
    compression). A few steps are recorded whole, with all their events: the first, the 2nd, 4th, 8th and so on, the last
    one before and the first one after a change, and the last.

    Args:
        path: `*.jsonl`, or `*.jsonl.gz` for a tenth of the size; its folder is made.
        title: of the run, for people.
        overwrite: whether a file that is there may go.
        traces: steps that are recorded whole, at most; the last step comes on top.

    Raises:
        FileExistsError: the file is there and `overwrite` is off.
        ValueError: another ending.
    """

    def __init__(self, path: str | Path, *, title: str = "", overwrite: bool = False, traces: int = MAX_TRACES) -> None:
        self.path = Path(path)
        if not self.path.name.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(
                f"path={str(path)!r}: a recorded run is a file *.jsonl, or *.jsonl.gz to have it compressed"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            raw = open(self.path, "wb" if overwrite else "xb")
        except FileExistsError as error:
            raise FileExistsError(f"{self.path} exists already: give another path, or overwrite=True") from error
        self._raw: BinaryIO = raw
        self._gzip = (
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) if self.path.suffix == ".gz" else None
        )
        self._delta = SnapshotDelta()
        self._moments = self._steps = 0
        self._last_traces: dict[
            str, ref[Trace]
        ] = {}  # by branch, the last step that was told; weak, since traces are large
        self._pending: tuple[int, Trace] | None = None  # moment and trace of a step that may turn out to matter
        self._changed = True  # since the last step
        self._traces_left = traces
        self._write("run", {"schema": SCHEMA, "version": VERSION, "title": title, **_describe_machine()})

    # -- what a session calls ------------------------------------------------------------------------------------------

    def log_step(self, row: StepRow) -> None:
        """Do nothing: `watch` sees the step."""

    def log_change(self, change: Change) -> None:
        """Do nothing: `watch` sees the change."""

    def watch(self, now: Snapshot) -> None:
        """Record a step or a change.

        Raises:
            ValueError: the recorder is closed.
        """
        number, stepped = self._moments, self._shows_new_step(now)
        self._write("moment", {"stepped": stepped, **self._delta.encode(now)})
        self._moments += 1
        if not stepped:
            self._write_trace(self._pending)
            self._pending, self._changed = None, True
            return
        assert now.last is not None
        self._last_traces[now.branch], self._pending = ref(now.last), (number, now.last)
        self._steps += 1
        if self._changed or self._steps & (self._steps - 1) == 0:
            self._write_trace(self._pending)
            self._pending = None
        self._changed = False

    def log_race(self, race: Race) -> None:
        """Record a race that is over, with what each branch did in it."""
        self._write("race", race_row(race))

    def log_look(self, seen: Inside, decode: Decode | None) -> None:
        """Record what was seen inside of layers, with the text of its tokens where they can be decoded."""
        self._write("look", look_row(seen, decode))

    def _shows_new_step(self, snapshot: Snapshot) -> bool:
        """Whether it shows a step of its branch that was not told yet."""
        if (
            snapshot.shown is None or snapshot.shown.branch != snapshot.branch
        ):  # after a fork, the other branch's last step is shown
            return False
        told = self._last_traces.get(snapshot.branch)
        return told is None or told() is not snapshot.last

    def close(self) -> None:
        """Record the last step whole, and close the file; calling it twice is fine."""
        if self._raw.closed:
            return
        self._traces_left = 1  # the last step comes on top of what `traces` allows
        self._write_trace(self._pending)
        self._write("end", {})
        if self._gzip is not None:
            self._gzip.close()
        self._raw.close()  # `GzipFile` leaves a file open that it was given

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what only the caller knows ------------------------------------------------------------------------------------

    def log_held_out(self, step: int, loss: float) -> None:
        """Record the loss on held-out data after so many steps."""
        self._write("held_out", {"step": step, "loss": loss})

    def log_level(self, name: str, loss: float) -> None:
        """Record a loss to compare with, as that of always guessing."""
        self._write("level", {"name": name, "loss": loss})

    def log_fact(self, name: str, words: str) -> None:
        """Record something that was found out about the run, in a sentence; a later one of the same name takes its place."""
        self._write("fact", {"name": name, "words": words})

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _write_trace(self, step: tuple[int, Trace] | None) -> None:
        if step is not None and self._traces_left > 0:
            self._traces_left -= 1
            self._write("trace", {"of": step[0], **trace_row(step[1])})

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        if self._raw.closed:
            raise ValueError(f"{self.path} is closed: make a new Recorder to go on")
        line = to_json({"type": kind, **row})
        file = cast(BinaryIO, self._gzip or self._raw)
        file.write(line.encode() + b"\n")
        if self._gzip is not None:
            self._gzip.flush(zlib.Z_SYNC_FLUSH)  # all up to here can be unpacked, should the process end now
        self._raw.flush()


def _describe_machine() -> dict[str, Any]:
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
