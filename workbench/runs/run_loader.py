"""Load recorded runs; every line is decoded at once, so that an error names the damaged line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from l2l_core.trace import OtherVersionError, check_version
from workbench.runs.look_lines import RecordedLook, look_from_row
from workbench.runs.race_lines import race_from_row
from workbench.runs.recorded_run import RecordedRun
from workbench.runs.run_file import DAMAGE_ERRORS, damage_error, find_run, other_rank_files, read_lines
from workbench.runs.run_lines import SCHEMA, VERSION, JsonRow, SnapshotDelta, build_record
from workbench.session import LOSS, HeldOutRow, Race


def load_run(path: str | Path) -> RecordedRun:
    """Load a recorded run from a file or folder; a last line truncated by a crash is dropped.

    A run of several workers is a folder with `rank0.jsonl`, `rank1.jsonl` and so on, one per worker.

    Raises:
        FileNotFoundError: no file exists.
        ValueError: a line is damaged, the run has no moment, or the file has another version of the format.

    Example:
        >>> from workbench import Recorder, Session, load_run
        >>> with Recorder("run.jsonl") as recorder, Session(relay, lambda: batch, loggers=[recorder]) as session:
        ...     session.run(3)
        ...     state = session.wait()
        >>> [row.step for row in load_run("run.jsonl").snapshot().steps]
        [1, 2, 3]
    """
    file = find_run(Path(path))
    return replace(_load(file), others=tuple(_load(other) for other in other_rank_files(file)))


def _load(file: Path) -> RecordedRun:
    reader = _RunReader(file)
    lines = list(read_lines(file))
    for number, (line, is_whole) in enumerate(lines, start=1):
        try:
            reader.read_row(number, json.loads(line))
        except OtherVersionError:
            raise
        except DAMAGE_ERRORS as error:
            if number == len(lines) > 1 and not is_whole:
                break  # the writer was interrupted
            raise damage_error(file, number, error) from error
    return reader.result()


class _RunReader:
    """Collects the rows of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: JsonRow = {}
        self._moments: list[JsonRow] = []
        self._traces: dict[int, tuple[int, JsonRow]] = {}
        self._held_out: list[tuple[int, HeldOutRow]] = []
        self._levels: list[tuple[str, float]] = []
        self._facts: dict[str, str] = {}
        self._races: list[tuple[int, Race]] = []
        self._looks: list[tuple[int, RecordedLook]] = []
        self._complete = False
        self._delta = SnapshotDelta()

    def read_row(self, number: int, row: JsonRow) -> None:
        kind = row.pop("type")
        if (kind == "run") != (number == 1):
            raise ValueError(f"a line of the type {kind!r} cannot be here")
        if kind == "run":
            check_version(self._path, row, SCHEMA, VERSION, "record the run again")
            self._header = {name: row[name] for name in ("title", "began", "machine")}
        elif kind == "moment":
            self._delta.apply(row)
            # Raise for a damaged row here, where the line is known, and not in a picture.
            _ = self._delta.layers(), self._delta.branches, row["stepped"]
            self._moments.append(row)
        elif kind == "trace":
            if not 0 <= (of := row.pop("of")) < len(self._moments):
                raise ValueError(f"a trace of moment {of}, of {len(self._moments)}")
            self._traces[of] = number, row  # decoded on demand, because a step has many events
        elif kind == "race":
            self._races.append((max(0, len(self._moments) - 1), race_from_row(row)))
        elif kind == "look":
            self._looks.append((max(0, len(self._moments) - 1), look_from_row(row)))
        elif kind == "held_out":
            self._held_out.append((max(0, len(self._moments) - 1), _held_out_from_row(row)))
        elif kind == "level":
            self._levels.append((str(row["name"]), float(row["loss"])))
        elif kind == "fact":
            self._facts[str(row["name"])] = str(row["words"])
        elif kind == "end":
            self._complete = True
        else:
            raise ValueError(f"a row of the unknown type {kind!r}")

    def result(self) -> RecordedRun:
        if not self._moments:
            raise ValueError(f"{self._path} holds no step and no change: record at least one step")
        title = self._header.pop("title") or self._path.name.partition(".")[0]
        return RecordedRun(
            path=self._path,
            title=title,
            **self._header,
            moments=tuple(self._moments),
            traced=tuple(sorted(self._traces)),
            held_out=tuple(self._held_out),
            levels=tuple(self._levels),
            facts=self._facts,
            races=tuple(self._races),
            looks=tuple(self._looks),
            complete=self._complete,
            _traces=self._traces,
        )


def _held_out_from_row(row: JsonRow) -> HeldOutRow:
    """Read a measurement; its values may be text, as NaN is."""
    values = {str(name): float(value) for name, value in row["values"].items()}
    if LOSS not in values:
        raise ValueError("a measurement without a loss")
    return build_record(HeldOutRow, {**row, "values": values})
