"""The traces of one step by all workers that made it, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import overload

from l2l_core.analysis.worker_waits import Wait
from l2l_core.trace import Trace, write_chrome

_FILE = "rank{}.jsonl"


class Traces(Sequence[Trace]):
    """One trace per worker, by rank.

    Args:
        traces: of all workers.

    Raises:
        ValueError: a worker is missing or there twice, or they are of different steps.
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
        return (
            f"<Traces of step {self[0].step} by {len(self)} worker{'s' if len(self) > 1 else ''}, {self.span_s:.6g} s>"
        )

    @property
    def offsets_s(self) -> list[float]:
        """By rank, when its trace began, in seconds since the first one did."""
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
        """Say which worker has waited for which, where and how long; see `worker_waits.py`."""
        return tuple(wait for trace in self for wait in trace.waits())

    def to_chrome(self, path: str | Path, *, compress: bool | None = None) -> None:
        """Write one Chrome trace JSON with a process per worker, for Perfetto, as `Trace.to_chrome`.

        If `path` is a folder, write one file per worker there: that is what Holistic Trace Analysis reads.
        """
        if not Path(path).is_dir():
            write_chrome(self, Path(path), compress)
            return
        for trace in self:
            trace.to_chrome(Path(path) / f"rank{trace.worker.rank}.json.gz", compress=compress)

    def to_jsonl(self, folder: str | Path) -> None:
        """Write a file of JSON lines per worker into a folder, which is made; `from_jsonl` reads them back exactly."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for trace in self:
            trace.to_jsonl(Path(folder) / _FILE.format(trace.worker.rank))

    @classmethod
    def from_jsonl(cls, folder: str | Path) -> Traces:
        """Read what `to_jsonl` wrote.

        Raises:
            ValueError: a file is missing, or damaged as for `Trace.from_jsonl`.
        """
        return cls([Trace.from_jsonl(path) for path in sorted(Path(folder).glob(_FILE.format("*")))])
