"""The traces of one step by all workers, on one time axis, and the waits between workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from l2l_core.trace import (
    NETWORK_LANES,
    Event,
    Interval,
    Trace,
    intersect,
    merge,
    total_length,
    write_chrome,
)

_FILE = "rank{}.jsonl"

STEP_BEGIN = "begin"  # `Wait.where` of a wait before the step's first event


@dataclass(frozen=True, slots=True)
class Wait:
    """Time that one worker waited for another in a step.

    Attributes:
        rank, last: the worker that waited, and the last one to start, for which it waited.
        where: "begin" (of the step), "gather" (of weights) or "reduce" (of gradients, and at the end of the step).
        seconds: total wait.
        exposed_s: part of it in which compute did nothing; only that makes a step longer.
    """

    rank: int
    last: int
    where: str
    seconds: float
    exposed_s: float


def find_waits(trace: Trace) -> tuple[Wait, ...]:
    """Return the waits of the worker with this trace; empty without other workers."""
    worker, lanes = trace.worker, trace.lanes
    found = [Wait(worker.rank, worker.last, STEP_BEGIN, worker.waited_s, worker.waited_s)] if worker.waited_s else []
    computes = merge((event.start_s, event.stop_s) for event in lanes["compute"])
    for lane in NETWORK_LANES:
        for last, waits in sorted(waits_by_worker(lanes.get(lane, ())).items()):
            seconds = total_length(waits)
            exposed_s = max(0.0, seconds - total_length(intersect(waits, computes)))
            found.append(Wait(worker.rank, last, lane, seconds, exposed_s))
    return tuple(found)


def waits_by_worker(events: Iterable[Event]) -> dict[int, list[Interval]]:
    """Return the merged waits before collectives, by the worker that was waited for."""
    by_last: dict[int, list[Interval]] = defaultdict(list)
    for event in (event for event in events if event.stalled_s):
        by_last[event.last].append((event.start_s - event.stalled_s, event.start_s))
    return {last: merge(waits) for last, waits in by_last.items()}


class Traces(Sequence[Trace]):
    """One trace per worker, by rank.

    Args:
        traces: of all workers.

    Raises:
        ValueError: a worker is missing or given twice, or the traces are of different steps.

    Example:
        >>> result = relay.step(batch)
        >>> traces = relay.traces()  # of all workers, on every worker
        >>> len(traces), traces[0].worker.count
        (1, 1)
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = tuple(sorted(traces, key=lambda trace: trace.worker.rank))
        ranks, counts = ([getattr(t.worker, name) for t in self._traces] for name in ("rank", "count"))
        if not ranks or ranks != list(range(len(ranks))) or {*counts} != {len(ranks)}:
            raise ValueError(
                f"traces of the workers {ranks}, of {max(counts, default=1)}: give one of each worker, as `relay.traces()` does"
            )
        steps = {trace.step for trace in self._traces}
        if len(steps) > 1:
            raise ValueError(f"traces of steps {sorted(steps)}: give those that the workers made of one step")

    @overload
    def __getitem__(self, rank: int) -> Trace: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Trace]: ...
    def __getitem__(self, rank: int | slice) -> Trace | Sequence[Trace]:
        return self._traces[rank]

    def __len__(self) -> int:
        return len(self._traces)

    def __repr__(self) -> str:
        return f"<Traces of step {self[0].step + 1} by {len(self)} worker{'s' if len(self) > 1 else ''}, {self.span_s:.6g} s>"

    @property
    def offsets_s(self) -> list[float]:
        """Start of each worker's trace, in seconds since the first one's."""
        began_s = [trace.worker.began_s for trace in self]
        return [each - min(began_s) for each in began_s]

    @property
    def span_s(self) -> float:
        """Seconds from the first start to the last stop, 0.0 without events."""
        times = [
            (b + e.start_s, b + e.stop_s) for b, trace in zip(self.offsets_s, self, strict=True) for e in trace.events
        ]
        return max(stop for _, stop in times) - min(start for start, _ in times) if times else 0.0

    def waits(self) -> tuple[Wait, ...]:
        """Return all waits between workers."""
        return tuple(wait for trace in self for wait in trace.waits())

    def to_chrome(self, path: str | Path, *, compress: bool | None = None) -> None:
        """Write one Chrome trace JSON with a process per worker, for Perfetto, as `Trace.to_chrome`.

        If `path` is a folder, write one file per worker there, for Holistic Trace Analysis.
        """
        if not Path(path).is_dir():
            write_chrome(self, Path(path), compress)
            return
        for trace in self:
            trace.to_chrome(Path(path) / f"rank{trace.worker.rank}.json.gz", compress=compress)

    def to_jsonl(self, folder: str | Path) -> None:
        """Write one file of JSON lines per worker into a new or existing folder; `from_jsonl` reads them exactly."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for trace in self:
            trace.to_jsonl(Path(folder) / _FILE.format(trace.worker.rank))

    @classmethod
    def from_jsonl(cls, folder: str | Path) -> Traces:
        """Read a folder of `to_jsonl`.

        Raises:
            ValueError: a file is missing, or damaged as for `Trace.from_jsonl`.
        """
        return cls([Trace.from_jsonl(path) for path in sorted(Path(folder).glob(_FILE.format("*")))])
