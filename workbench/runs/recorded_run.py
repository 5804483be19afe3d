"""A run that was recorded with `Recorder`, read back: snapshots of its session and traces of some steps, without a model."""

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
from workbench.session import BranchHistories, Race, ShownStep, Snapshot


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
        looks: likewise, each with the number of the moment after which somebody looked inside.
        complete: whether it was closed, and not cut short by the end of its process.
        others: the same run as the other workers have recorded it, by rank; empty where one trained alone.
    """

    path: Path
    title: str
    began: str
    machine: Mapping[str, Any]
    moments: Sequence[JsonRow]
    traced: Sequence[int]
    held_out: Sequence[tuple[float, float]]
    levels: Sequence[tuple[str, float]]
    facts: Mapping[str, str]
    races: Sequence[tuple[int, Race]]
    looks: Sequence[tuple[int, RecordedLook]]
    complete: bool
    _traces: Mapping[int, tuple[int, JsonRow]]  # by moment, the line and its row
    others: Sequence[RecordedRun] = ()

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
        return _snapshot_at(self, number)[0]

    def traced_moment(self, number: int | None = None) -> int | None:
        """Find the newest moment that led there, by default to the end, whose step was recorded whole; None if there is none.

        Steps of other branches do not count.
        """
        return _snapshot_at(self, len(self.moments) - 1 if number is None else number)[1]

    def look(self, number: int | None = None) -> tuple[int, RecordedLook] | None:
        """Find the last look inside by a moment, by default the end, and the moment that it was of; None before the first."""
        last = len(self.moments) - 1 if number is None else number
        return next((one for one in reversed(self.looks) if one[0] <= last), None)

    def trace(self, number: int) -> Trace:
        """Read the events of a step that was recorded whole; `traced` has the numbers.

        Raises:
            ValueError: it was not, or its line is damaged.
        """
        if number not in self._traces:
            there = ", ".join(map(str, self.traced))
            raise ValueError(f"number={number}: whole steps were recorded at moments {there}")
        return _read_trace(self, number)

    def traces(self, number: int | None = None) -> Traces | None:
        """Read what all workers did in the step that `snapshot` shows; None where one trained alone, or one did not record it."""
        of = self.traced_moment(number)
        if of is None or not self.others or not all(of in other.traced for other in self.others):
            return None
        return Traces([self.trace(of), *(other.trace(of) for other in self.others)])

    def last_traces(self, most: int, number: int | None = None) -> list[Traces]:
        """Read the last steps that led there of which `traces` knows what all workers did, at most so many, oldest first."""
        found: list[Traces] = []
        at = self.traced_moment(number)
        while at is not None and len(found) < most:
            traces = self.traces(at)
            found += [traces] if traces is not None else []
            at = self.traced_moment(at - 1) if at else None
        return found[::-1]

    def truncated(self, number: int) -> RecordedRun:
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
            looks=tuple((at, look) for at, look in self.looks if at <= number),
            _traces=traces,
            others=tuple(other.truncated(min(number, len(other.moments) - 1)) for other in self.others),
        )


class RunCursor:
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
def _snapshot_at(run: RecordedRun, number: int) -> tuple[Snapshot, int | None]:
    """The session then, and the moment of the step that it shows."""
    told, pasts, branch = SnapshotDelta(), BranchHistories("", [""]), ""
    wholes: dict[str, tuple[int, Callable[[Trace], ShownStep]] | None] = {"": None}  # by branch, as pasts are
    for at, row in enumerate(run.moments[: number + 1]):
        told.apply(row)
        # `branch` is still that of the row before, from which new ones were forked.
        wholes = {name: wholes.get(name, wholes[branch]) for name in told.branches}
        branch = told.branch
        if row["stepped"] and at in run._traces:
            wholes[branch] = at, told.shown_step_factory()
        pasts.sync_branches(told.branch, told.branches)
        if row["stepped"]:
            pasts.current.steps.append(told.last_step)
            pasts.current.statistics.append(told.last_step.step, told.layers())
        else:
            pasts.current.statistics.set_stack(told.layers())
    race = next((race for at, race in reversed(run.races) if at <= number), None)
    whole = wholes[branch]
    if whole is None:
        return told.decode(number, pasts, None, race), None
    return told.decode(number, pasts, whole[1](run.trace(whole[0])), race), whole[0]


@lru_cache(maxsize=16)
def _read_trace(run: RecordedRun, number: int) -> Trace:
    line, row = run._traces[number]
    try:
        return trace_from_row(row)
    except DAMAGE_ERRORS as error:
        raise damage_error(run.path, line, error) from error


def name_runs(runs: Sequence[RecordedRun]) -> list[str]:
    """List the titles of runs, with numbers if two are the same."""
    titles = [run.title for run in runs]
    return titles if len(set(titles)) == len(titles) else [f"{title} ({i})" for i, title in enumerate(titles, start=1)]
