"""Waits of each worker over several steps: a row per worker, a bar per step, on one scale.

Unlike one slow step, a worker that is often late shows up here.
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

MAX_STEPS = 24  # the last ones are shown
WIDTH, LEFT, RIGHT, TOP, ROW, PITCH = 960, 96, 944, 30, 40, 48  # px
_GAP = 3  # px, between the bars of two steps


@dataclass(frozen=True, slots=True)
class StepWaits:
    """Waits of all workers in one step.

    Attributes:
        step: number of the step, from 0.
        seconds: duration, with the wait before it.
        exposed_s: by worker, seconds waited for others without computing.
        waits: all waits.
    """

    step: int
    seconds: float
    exposed_s: tuple[float, ...]
    waits: tuple[Wait, ...]

    @staticmethod
    def of(traces: Traces) -> StepWaits:
        """Return the waits in the traces of a step."""
        seconds = traces.span_s + max(trace.worker.waited_s for trace in traces)
        exposed_s = tuple(sum(wait.exposed_s for wait in trace.waits()) for trace in traces)
        return StepWaits(traces[0].step, seconds, exposed_s, traces.waits())


def show_waits(steps: Sequence[StepWaits]) -> Picture:
    """Return the waits of every worker in these steps, oldest first, with a table of pairs of workers."""
    table, steps = waits_table(steps), steps[-MAX_STEPS:]
    workers, most_s = len(steps[-1].exposed_s), round_up(max(max(step.exposed_s) for step in steps))
    words = f"waits for others while nothing is computed, of {format_seconds(most_s)}"
    parts, pitch = [svg.text(LEFT, 16, words, style="small")], (RIGHT - LEFT) / MAX_STEPS
    for rank in range(workers):
        parts += _row(rank, [step.exposed_s[rank] / most_s for step in steps], pitch)
    for column, step in enumerate(steps):
        x, y = LEFT + (column + 0.5) * pitch, TOP + workers * PITCH + 8
        parts.append(svg.text(x, y, str(step.step + 1), anchor="middle", style="small"))
    return Picture(svg.document(WIDTH, TOP + workers * PITCH + 20, table.title, table.note, parts), table)


def waits_table(steps: Sequence[StepWaits]) -> Table:
    """Return a table of waits per pair of workers; the note names the worker that caused the longest waits."""
    steps = steps[-MAX_STEPS:]
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
    note = describe_stragglers([wait for step in steps for wait in step.waits])
    return Table(f"Who waited for whom in steps {first} to {last}", header, rows, note)


def _row(rank: int, shares: Sequence[float], pitch: float) -> Iterator[str]:
    """Draw a worker's bars; a share of 1 fills the row's height."""
    y = TOP + rank * PITCH
    yield svg.text(LEFT - 8, y + ROW / 2 + 4, f"worker {rank}", anchor="end")
    yield svg.rect(LEFT, y, RIGHT - LEFT, ROW, style="well")
    for column, share in enumerate(shares):
        if share > 0:
            height = max(0.5, ROW * share)
            yield svg.rect(LEFT + column * pitch + _GAP / 2, y + ROW - height, pitch - _GAP, height, fill=VERMILION)
