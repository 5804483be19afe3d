"""Logger that writes the snapshots of a session to a file for reports and replays; `run_lines.py` has the format.

Each line is flushed at once, so a crash loses at most the last one. Nothing is pickled.
"""

from __future__ import annotations

import gzip
import os
import platform
import zlib
from collections.abc import Mapping
from dataclasses import asdict
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
from workbench.session import Change, HeldOutRow, Race, Snapshot, StepRow

MAX_TRACES = 40


class Recorder:
    """Logger that records a session, so that `load_run` can replay it without the model.

    Each step is recorded with the figures of the step and of every layer (about 40 bytes per layer and step before
    compression). The traces of a few steps are recorded too: of steps 1, 2, 4, 8 and so on, of the last step before and the
    first step after a change, and of the last step.

    Args:
        path: `*.jsonl`, or `*.jsonl.gz` for a tenth of the size; the folder is created.
        title: title of the run.
        overwrite: if True, replace an existing file.
        traces: largest number of traces, not counting that of the last step.

    Raises:
        FileExistsError: the file exists and `overwrite` is False.
        ValueError: the suffix of `path` is neither `.jsonl` nor `.jsonl.gz`.

    Example:
        >>> from workbench import Recorder, Session, load_run
        >>> with Recorder("run.jsonl.gz") as recorder, Session(relay, lambda: batch, loggers=[recorder]) as session:
        ...     session.run(3)
        ...     state = session.wait()
        >>> len(load_run("run.jsonl.gz").snapshot().steps)
        3
    """

    def __init__(self, path: str | Path, *, title: str = "", overwrite: bool = False, traces: int = MAX_TRACES) -> None:
        self.path = Path(path)
        if not self.path.name.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(
                f"path={str(path)!r}: the name of a recorded run must end in .jsonl, or in .jsonl.gz to have it compressed"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            raw = open(self.path, "wb" if overwrite else "xb")  # noqa: SIM115 (closed by `close`)
        except FileExistsError as error:
            raise FileExistsError(f"{self.path} exists already: pass another path, or overwrite=True") from error
        self._raw: BinaryIO = raw
        self._gzip = (
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) if self.path.suffix == ".gz" else None
        )
        self._delta = SnapshotDelta()
        self._moments = self._steps = 0
        self._last_traces: dict[str, ref[Trace]] = {}  # by branch, of the last step; weak, because traces are large
        self._pending: tuple[int, Trace] | None = None  # moment and trace of a step that a change may follow
        self._changed = True  # since the last step
        self._traces_left = traces
        self._write("run", {"schema": SCHEMA, "version": VERSION, "title": title, **_describe_machine()})

    # -- called by the session -----------------------------------------------------------------------------------------

    def log_step(self, row: StepRow) -> None:
        """Do nothing; `watch` records steps."""

    def log_change(self, change: Change) -> None:
        """Do nothing; `watch` records changes."""

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
        """Record a finished race."""
        self._write("race", race_row(race))

    def log_look(self, inside: Inside, decode: Decode | None) -> None:
        """Record a look inside, with the text of its tokens if `decode` is given."""
        self._write("look", look_row(inside, decode))

    def log_held_out(self, row: HeldOutRow) -> None:
        """Record a measurement on held-out data."""
        self._write("held_out", asdict(row))

    def _shows_new_step(self, snapshot: Snapshot) -> bool:
        """Return True if the shown step belongs to the current branch and was not recorded yet."""
        # After a fork, the last step of the parent branch is shown.
        if snapshot.shown is None or snapshot.shown.branch != snapshot.branch:
            return False
        recorded = self._last_traces.get(snapshot.branch)
        return recorded is None or recorded() is not snapshot.last

    def close(self) -> None:
        """Record the trace of the last step and close the file; further calls do nothing."""
        if self._raw.closed:
            return
        self._traces_left = 1  # the last step does not count against `traces`
        self._write_trace(self._pending)
        self._write("end", {})
        if self._gzip is not None:
            self._gzip.close()
        self._raw.close()  # GzipFile does not close its fileobj

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- called by the owner of the recorder ---------------------------------------------------------------------------

    def log_level(self, name: str, loss: float) -> None:
        """Record a reference loss, for example that of random guesses."""
        self._write("level", {"name": name, "loss": loss})

    def log_fact(self, name: str, words: str) -> None:
        """Record a sentence about the run; it replaces an earlier one of the same name."""
        self._write("fact", {"name": name, "words": words})

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _write_trace(self, step: tuple[int, Trace] | None) -> None:
        if step is not None and self._traces_left > 0:
            self._traces_left -= 1
            self._write("trace", {"of": step[0], **trace_row(step[1])})

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        if self._raw.closed:
            raise ValueError(f"{self.path} is closed: create a new Recorder to record more")
        line = to_json({"type": kind, **row})
        file = cast(BinaryIO, self._gzip or self._raw)
        file.write(line.encode() + b"\n")
        if self._gzip is not None:
            self._gzip.flush(zlib.Z_SYNC_FLUSH)  # readable up to here if the process ends
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
