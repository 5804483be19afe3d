"""A run recorded by `Recorder`: snapshots of its session and traces of some steps, without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from l2l_core import Trace, Traces
from workbench.runs.look_lines import RecordedLook
from workbench.runs.run_file import DAMAGE_ERRORS, damage_error
from workbench.runs.run_lines import JsonRow, SnapshotDelta, trace_from_row
from workbench.session import BranchHistories, HeldOutRow, Race, ShownStep, Snapshot


@dataclass(frozen=True, eq=False)  # hashable by identity, for the caches below
class RecordedRun:
    """A recorded run.

    Attributes:
        path: file of the run.
        title: title, by default the name of the file.
        began: time of the start, as ISO 8601 in UTC.
        machine: platform, cores, memory_bytes, threads, python, torch.
        moments: one row per step and per change; `snapshot` converts one.
        traced: numbers of the moments with the trace of a step, ascending.
        held_out: measurements on held-out data, each with the number of the last moment before its row.
        levels: names and values of reference losses.
        facts: sentences about the run, by name.
        races: races, each with the number of the last moment before its row.
        looks: looks inside, each with the number of the last moment before its row.
        complete: True if the recorder was closed; False if its process ended before.
        others: recordings of the same run by the other workers, by rank; empty with one worker.
    """

    path: Path
    title: str
    began: str
    machine: Mapping[str, Any]
    moments: Sequence[JsonRow]
    traced: Sequence[int]
    held_out: Sequence[tuple[int, HeldOutRow]]
    levels: Sequence[tuple[str, float]]
    facts: Mapping[str, str]
    races: Sequence[tuple[int, Race]]
    looks: Sequence[tuple[int, RecordedLook]]
    complete: bool
    _traces: Mapping[int, tuple[int, JsonRow]]  # by moment: number of the line, and its row
    others: Sequence[RecordedRun] = ()

    def snapshot(self, number: int | None = None) -> Snapshot:
        """Return the snapshot of the session at a moment, by default the last.

        Its shown step is the newest one with a trace that led to the moment, if any.

        Raises:
            ValueError: the moment does not exist.
        """
        last = len(self.moments) - 1
        if number is None:
            number = last
        if not 0 <= number <= last:
            raise ValueError(f"number={number}: {self.path} has moments 0 to {last}")
        return _snapshot_at(self, number)[0]

    def traced_moment(self, number: int | None = None) -> int | None:
        """Return the newest traced moment up to a moment (by default the last) on its branch; None if none exists."""
        return _snapshot_at(self, len(self.moments) - 1 if number is None else number)[1]

    def look(self, number: int | None = None) -> tuple[int, RecordedLook] | None:
        """Return the last look up to a moment (by default the last), with its moment; None before the first look."""
        last = len(self.moments) - 1 if number is None else number
        return next((one for one in reversed(self.looks) if one[0] <= last), None)

    def trace(self, number: int) -> Trace:
        """Return the trace of a moment in `traced`.

        Raises:
            ValueError: the moment has no trace, or its line is damaged.
        """
        if number not in self._traces:
            numbers = ", ".join(map(str, self.traced))
            raise ValueError(f"number={number}: whole steps were recorded at moments {numbers}")
        return _read_trace(self, number)

    def traces(self, number: int | None = None) -> Traces | None:
        """Return all workers' traces of a moment's step; None with one worker, or if one is missing."""
        moment = self.traced_moment(number)
        if moment is None or not self.others or not all(moment in other.traced for other in self.others):
            return None
        return Traces([self.trace(moment), *(other.trace(moment) for other in self.others)])

    def last_traces(self, most: int, number: int | None = None) -> list[Traces]:
        """Return the traces of all workers for at most `most` last steps up to a moment, oldest first."""
        found: list[Traces] = []
        moment = self.traced_moment(number)
        while moment is not None and len(found) < most:
            traces = self.traces(moment)
            found += [traces] if traces is not None else []
            moment = self.traced_moment(moment - 1) if moment else None
        return found[::-1]

    def truncated(self, number: int) -> RecordedRun:
        """Return the run up to a moment, which is added to its title; facts and levels stay.

        Raises:
            ValueError: the moment does not exist.
        """
        if number == len(self.moments) - 1:
            return self
        then, moments = self.snapshot(number), self.moments[: number + 1]
        traces = {at: line for at, line in self._traces.items() if at <= number}
        return replace(
            self,
            title=f"{self.title}, {then.state_words}",
            moments=moments,
            traced=tuple(sorted(traces)),
            held_out=tuple((at, row) for at, row in self.held_out if at <= number),
            races=tuple((at, race) for at, race in self.races if at <= number),
            looks=tuple((at, look) for at, look in self.looks if at <= number),
            _traces=traces,
            others=tuple(other.truncated(min(number, len(other.moments) - 1)) for other in self.others),
        )


class RunCursor:
    """A recorded run at a selected moment, as a source of snapshots for panels.

    Invariant: `number` is a moment of the run.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.number = len(run.moments) - 1
        self._changed = threading.Condition()

    def select(self, number: int) -> None:
        """Select another moment.

        Raises:
            ValueError: the moment does not exist.
        """
        self.run.snapshot(number)  # raises; also fills the cache before waiting threads are woken
        with self._changed:
            self.number = number
            self._changed.notify_all()

    def snapshot(self) -> Snapshot:
        """Return the snapshot of the session at the selected moment."""
        return self.run.snapshot(self.number)

    def wait_for_change(self, number: int, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until another moment than `number` is selected."""
        with self._changed:
            self._changed.wait_for(lambda: self.number != number, timeout_s)


@lru_cache(maxsize=16)
def _snapshot_at(run: RecordedRun, number: int) -> tuple[Snapshot, int | None]:
    """Return the snapshot of a moment, and the moment of its shown step."""
    delta, histories, branch = SnapshotDelta(), BranchHistories("", [""]), ""
    measured: dict[int, list[HeldOutRow]] = {}
    for at, held_out in run.held_out:
        measured.setdefault(at, []).append(held_out)
    traced: dict[str, tuple[int, Callable[[Trace], ShownStep]] | None] = {"": None}  # by branch: the last traced step
    for at, row in enumerate(run.moments[: number + 1]):
        delta.apply(row)
        # `branch` is still the branch of the previous row, the parent of new branches.
        traced = {name: traced.get(name, traced[branch]) for name in delta.branches}
        branch = delta.branch
        if row["stepped"] and at in run._traces:
            traced[branch] = at, delta.shown_step_factory()
        histories.sync_branches(delta.branch, delta.branches)
        if row["stepped"]:
            histories.current.steps.append(delta.last_step)
            histories.current.statistics.append(delta.last_step.step, delta.layers())
        else:
            histories.current.statistics.set_stack(delta.layers())
        histories.current.held_out += measured.get(at, ())
    race = next((race for at, race in reversed(run.races) if at <= number), None)
    last = traced[branch]
    if last is None:
        return delta.decode(number, histories, None, race), None
    moment, make_shown_step = last
    return delta.decode(number, histories, make_shown_step(run.trace(moment)), race), moment


@lru_cache(maxsize=16)
def _read_trace(run: RecordedRun, number: int) -> Trace:
    line, row = run._traces[number]
    try:
        return trace_from_row(row)
    except DAMAGE_ERRORS as error:
        raise damage_error(run.path, line, error) from error


def name_runs(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the titles of runs, numbered if two are equal."""
    titles = [run.title for run in runs]
    return titles if len(set(titles)) == len(titles) else [f"{title} ({i})" for i, title in enumerate(titles, start=1)]
