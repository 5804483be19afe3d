"""How long each worker waited in each of several steps: a row per worker, a bar per step, all on one scale.

One step may be slow by accident; who is late again and again is seen here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from l2l_core.analysis import Traces, Wait
from workbench.pictures import svg
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import format_seconds, round_up
from workbench.pictures.stragglers import describe_stragglers
from workbench.pictures.theme import VERMILION

MAX_STEPS = 24  # that are shown, the last ones
WIDTH, LEFT, RIGHT, TOP, ROW, PITCH = 960, 96, 944, 30, 40, 48  # px
_GAP = 3  # px: between the bars of two steps


@dataclass(frozen=True, slots=True)
class StepWaits:
    """What workers waited for in one step.

    Attributes:
        step: its number, from 0.
        seconds: that it took, with waiting for its begin.
        exposed_s: by worker, how long it waited for others while it had nothing to compute.
        waits: of all.
    """

    step: int
    seconds: float
    exposed_s: tuple[float, ...]
    waits: tuple[Wait, ...]

    @staticmethod
    def of(traces: Traces) -> StepWaits:
        """Read them off the traces of a step."""
        seconds = traces.span_s + max(trace.worker.waited_s for trace in traces)
        exposed_s = tuple(sum(wait.exposed_s for wait in trace.waits()) for trace in traces)
        return StepWaits(traces[0].step, seconds, exposed_s, traces.waits())


def show_waits(steps: Sequence[StepWaits]) -> Picture:
    """Draw what every worker waited in each of these steps, oldest first, as SVG with a table of who waited for whom."""
    table, steps = waits_table(steps), steps[-MAX_STEPS:]
    workers, most_s = len(steps[-1].exposed_s), round_up(max(max(step.exposed_s) for step in steps))
    parts = [
        svg.text(LEFT, 16, f"waits for others while nothing is computed, of {format_seconds(most_s)}", style="small")
    ]
    for rank in range(workers):
        parts += _row(rank, [step.exposed_s[rank] / most_s for step in steps])
    parts += _numbers([step.step for step in steps], TOP + workers * PITCH + 8)
    return Picture(svg.document(WIDTH, TOP + workers * PITCH + 20, table.title, table.note, parts), table)


def waits_table(steps: Sequence[StepWaits]) -> Table:
    """List who waited for whom over the steps; the note says who was waited for most."""
    steps = steps[-MAX_STEPS:]
    every = [wait for step in steps for wait in step.waits]
    by_pair: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for step in steps:
        for wait in step.waits:
            by_pair[wait.rank, wait.last][step.step] += wait.exposed_s
    whole_s = sum(step.seconds for step in steps)
    rows = [
        (
            f"worker {rank}",
            f"worker {last}",
            f"{sum(seconds > 0 for seconds in waited.values())} of {len(steps)}",
            format_seconds(sum(waited.values())),
            format_seconds(max(waited.values())),
            f"{100 * sum(waited.values()) / whole_s:.0f} %" if whole_s else "–",
        )
        for (rank, last), waited in sorted(by_pair.items())
    ]
    header = ("who waits", "for whom", "in steps", "exposed", "longest", "of the time")
    first, last = steps[0].step + 1, steps[-1].step + 1
    return Table(f"Who waited for whom in steps {first} to {last}", header, rows, describe_stragglers(every))


def _row(rank: int, shares: Sequence[float]) -> Iterator[str]:
    """Draw a worker's bars; each share is of the row's height."""
    y, pitch = TOP + rank * PITCH, (RIGHT - LEFT) / MAX_STEPS
    yield svg.text(LEFT - 8, y + ROW / 2 + 4, f"worker {rank}", anchor="end")
    yield svg.rect(LEFT, y, RIGHT - LEFT, ROW, style="well")
    for at, share in enumerate(shares):
        if share > 0:
            height = max(0.5, ROW * share)
            yield svg.rect(LEFT + at * pitch + _GAP / 2, y + ROW - height, pitch - _GAP, height, fill=VERMILION)


def _numbers(steps: Sequence[int], y: float) -> Iterator[str]:
    """Number the columns; people count steps from 1."""
    pitch = (RIGHT - LEFT) / MAX_STEPS
    for at, step in enumerate(steps):
        yield svg.text(LEFT + (at + 0.5) * pitch, y, str(step + 1), anchor="middle", style="small")
