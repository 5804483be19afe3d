"""A run that was recorded with `Recorder`, read back: snapshots of its session and traces of some steps, without a model."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from l2l_core import Trace
from workbench.runs.lines import READ, SCHEMA, Row, Told, trace_of
from workbench.runs.race_lines import race_of
from workbench.session import Pasts, Race, ShownStep, Snapshot

IN_FOLDER = ("run.jsonl.gz", "run.jsonl")
# What values of another form raise where they are used: lines are read as they come, and not checked field by field.
_DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError)


@dataclass(frozen=True, eq=False)  # equal by identity, so that a run can be a key of the caches below
class RecordedRun:
    """A recorded run.

    Attributes:
        path: its file.
        title: for people; the file's name if there was none.
        began: when, as ISO 8601 in UTC.
        machine: what it ran on: platform, cores, memory_bytes, threads, python, torch.
        moments: a line for every step and every change; `snapshot` shows one.
        traced: numbers of the moments whose step was recorded whole, ascending.
        held_out: steps and losses on held-out data.
        levels: names and losses to compare with.
        facts: by name, what was found out about the run.
        races: each with the number of the moment after which it was over.
        complete: whether it was closed, and not cut short by the end of its process.
    """

    path: Path
    title: str
    began: str
    machine: Mapping[str, Any]
    moments: Sequence[Row]
    traced: Sequence[int]
    held_out: Sequence[tuple[float, float]]
    levels: Sequence[tuple[str, float]]
    facts: Mapping[str, str]
    races: Sequence[tuple[int, Race]]
    complete: bool
    _traces: Mapping[int, tuple[int, Row]]  # by moment, the line and its row

    def snapshot(self, number: int | None = None) -> Snapshot:
        """Show the session after a step or a change; by default at the end.

        It shows the newest step that led there and was recorded whole, none if there is none.

        Raises:
            ValueError: there is no such moment.
        """
        last = len(self.moments) - 1
        if number is None:
            number = last
        if not 0 <= number <= last:
            raise ValueError(f"number={number}: {self.path} has moments 0 to {last}")
        return _show(self, number)[0]

    def whole(self, number: int | None = None) -> int | None:
        """Find the newest moment that led there, by default to the end, whose step was recorded whole; None if there is none.

        Steps of other branches do not count.
        """
        return _show(self, len(self.moments) - 1 if number is None else number)[1]

    def trace(self, number: int) -> Trace:
        """Read the events of a step that was recorded whole; `traced` has the numbers.

        Raises:
            ValueError: it was not, or its line is damaged.
        """
        if number not in self._traces:
            there = ", ".join(map(str, self.traced))
            raise ValueError(f"number={number}: whole steps were recorded at moments {there}")
        return _read_trace(self, number)

    def until(self, number: int) -> RecordedRun:
        """Cut the run after this moment, and name the moment in its title; what was found out about the run stays.

        Held-out losses are kept up to the furthest step that was reached by then.

        Raises:
            ValueError: there is no such moment.
        """
        if number == len(self.moments) - 1:
            return self
        then, moments = self.snapshot(number), self.moments[: number + 1]
        # Rows say a step's number only where it differs, and it is less after a switch to a branch that is behind.
        reached = max(row["plain"].get("step", 0) for row in moments)
        traces = {at: line for at, line in self._traces.items() if at <= number}
        return replace(
            self,
            title=f"{self.title}, {then.state_words}",
            moments=moments,
            traced=tuple(sorted(traces)),
            held_out=tuple((step, loss) for step, loss in self.held_out if step <= reached),
            races=tuple((at, race) for at, race in self.races if at <= number),
            _traces=traces,
        )


class Recording:
    """A recorded run at one of its moments, as a source for panels.

    Invariant: `number` is a moment of the run.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.number = len(run.moments) - 1
        self._changed = threading.Condition()

    def select(self, number: int) -> None:
        """Go to another moment.

        Raises:
            ValueError: there is none of this number.
        """
        self.run.snapshot(number)  # raises; and it is made before those who wait are woken, to find it in the cache
        with self._changed:
            self.number = number
            self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        """Show the session as it was at this moment."""
        return self.run.snapshot(self.number)

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait until another moment is selected, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self.number != number, timeout_s)


@lru_cache(maxsize=16)
def _show(run: RecordedRun, number: int) -> tuple[Snapshot, int | None]:
    """The session then, and the moment of the step that it shows."""
    told, pasts, branch = Told(), Pasts("", [""]), ""
    wholes: dict[str, tuple[int, Callable[[Trace], ShownStep]] | None] = {"": None}  # by branch, as pasts are
    for at, row in enumerate(run.moments[: number + 1]):
        told.take(row)
        # `branch` is still that of the row before, from which new ones were forked.
        wholes = {name: wholes.get(name, wholes[branch]) for name in told.branches}
        branch = told.branch
        if row["stepped"] and at in run._traces:
            wholes[branch] = at, told.shown()
        pasts.follow(told.branch, told.branches)
        if row["stepped"]:
            pasts.here.steps.append(told.last_step)
            pasts.here.statistics.append(told.last_step.step, told.layers())
        else:
            pasts.here.statistics.arrange(told.layers())
    race = next((race for at, race in reversed(run.races) if at <= number), None)
    whole = wholes[branch]
    if whole is None:
        return told.show(number, pasts, None, race), None
    return told.show(number, pasts, whole[1](run.trace(whole[0])), race), whole[0]


@lru_cache(maxsize=16)
def _read_trace(run: RecordedRun, number: int) -> Trace:
    line, row = run._traces[number]
    try:
        return trace_of(row)
    except _DAMAGE as error:
        raise _damaged(run.path, line, error) from error


def load_run(path: str | Path) -> RecordedRun:
    """Read a recorded run, a file or the folder of the demo; what its last line lost in a crash is left out.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a damaged line, which is named, another version of the format, or nothing to show.
    """
    file = _find(Path(path))
    reader = _Reader(file)
    lines = list(_lines(file))
    for number, (line, is_whole) in enumerate(lines, start=1):
        try:
            reader.take(number, json.loads(line))
        except _DAMAGE as error:
            if number == len(lines) > 1 and not is_whole:
                break  # its writer was interrupted
            raise _damaged(file, number, error) from error
    return reader.result()


def name_runs(runs: Sequence[RecordedRun]) -> list[str]:
    """List the titles of runs, with numbers if two are the same."""
    titles = [run.title for run in runs]
    return titles if len(set(titles)) == len(titles) else [f"{title} ({i})" for i, title in enumerate(titles, start=1)]


class _Reader:
    """Takes one line after another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head: Row = {}
        self._moments: list[Row] = []
        self._traces: dict[int, tuple[int, Row]] = {}
        self._held_out: list[tuple[float, float]] = []
        self._levels: list[tuple[str, float]] = []
        self._facts: dict[str, str] = {}
        self._races: list[tuple[int, Race]] = []
        self._complete = False
        self._told = Told()

    def take(self, number: int, row: Row) -> None:
        kind = row.pop("type")
        if (kind == "run") != (number == 1):
            raise ValueError(f"a line of the type {kind!r} cannot be here")
        if kind == "run":
            if row["schema"] != SCHEMA or row["version"] not in READ:
                raise ValueError(
                    f"{row['schema']!r} version {row['version']!r}; this program reads {SCHEMA!r} "
                    f"versions {READ[0]} to {READ[-1]}"
                )
            self._head = {name: row[name] for name in ("title", "began", "machine")}
        elif kind == "moment":
            self._told.take(row)
            # Tried now, so that a damaged line is named by `load_run` and not by a picture.
            self._told.layers(), self._told.branches, bool(row["stepped"])
            self._moments.append(row)
        elif kind == "trace":
            if not 0 <= (of := row.pop("of")) < len(self._moments):
                raise ValueError(f"a trace of moment {of}, of {len(self._moments)}")
            self._traces[of] = number, row  # as it is: a step has many events, and few steps are looked at
        elif kind == "race":
            self._races.append((max(0, len(self._moments) - 1), race_of(row)))
        elif kind == "held_out":
            self._held_out.append((int(row["step"]), float(row["loss"])))
        elif kind == "level":
            self._levels.append((str(row["name"]), float(row["loss"])))
        elif kind == "fact":
            self._facts[str(row["name"])] = str(row["words"])
        elif kind == "end":
            self._complete = True
        else:
            raise ValueError(f"a line of the unknown type {kind!r}")

    def result(self) -> RecordedRun:
        if not self._moments:
            raise ValueError(f"{self._path} holds no step and no change: there is nothing to show")
        title = self._head.pop("title") or self._path.name.partition(".")[0]
        return RecordedRun(
            path=self._path,
            title=title,
            **self._head,
            moments=tuple(self._moments),
            traced=tuple(sorted(self._traces)),
            held_out=tuple(self._held_out),
            levels=tuple(self._levels),
            facts=self._facts,
            races=tuple(self._races),
            complete=self._complete,
            _traces=self._traces,
        )


def _find(path: Path) -> Path:
    found = next((path / name for name in IN_FOLDER if (path / name).is_file()), path)
    if not found.is_file():
        raise FileNotFoundError(
            f"there is no recorded run {path}: record one with Session(..., loggers=[Recorder({str(path)!r})]), "
            "or with `make demo`, which makes out/demo/run.jsonl.gz"
        )
    return found


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Lines, and whether they end; a compressed file may stop anywhere."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while True:
            try:
                line = file.readline()
            except EOFError:
                return
            except (gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path} is damaged: {error}") from error
            if not line:
                return
            yield line.removesuffix(b"\n"), line.endswith(b"\n")


def _damaged(path: Path, line: int, error: BaseException) -> ValueError:
    said = str(error) if isinstance(error, ValueError) else repr(error)
    return ValueError(f"{path}, line {line}: this is not what Recorder writes: {said}")
