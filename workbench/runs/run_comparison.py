"""Comparison of recorded runs: losses on one axis, a step of each on one time axis, differences as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from l2l_core import Trace
from l2l_core.trace import format_bytes
from workbench.pictures import (
    Picture,
    Table,
    draw_loss,
    draw_memory,
    draw_timeline,
    format_count,
    format_seconds,
    memory_table,
    round_up,
    settings_table,
    timeline_table,
)
from workbench.readings import Columns
from workbench.runs.recorded_run import RecordedRun
from workbench.session import Snapshot


class NamedRun(NamedTuple):
    """A run with a unique name and its last snapshot."""

    name: str
    snapshot: Snapshot
    run: RecordedRun


class StepPictures(NamedTuple):
    """Pictures of one step of a run."""

    name: str
    step: str  # for example "step 12"
    timeline: Picture
    memory: Picture


@dataclass(frozen=True)
class Comparison:
    """Differences between runs.

    Attributes:
        loss: all losses over steps.
        steps: the last traced step of each run, on common axes of time and bytes.
        table: a row per figure or setting, a column per run.
        differing: names of the rows in which the runs differ.
        `said`: one sentence for each run but the first: the steps in which its losses equal those of the first run.
    """

    loss: Picture
    steps: Sequence[StepPictures]
    table: Table
    differing: frozenset[str]
    said: Sequence[str]


def compare_runs(runs: Sequence[NamedRun]) -> Comparison:
    """Compare two or more runs."""
    columns = [_compared_figures(one) for one in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, "–") for column in columns)) for name in names]
    return Comparison(
        loss=_draw_losses(runs),
        steps=_draw_steps(runs),
        table=Table("Figures and settings", ("", *(one.name for one in runs)), rows),
        differing=frozenset(name for name, *cells in rows if len(set(cells)) > 1),
        said=[_describe_equality(runs[0], one) for one in runs[1:]],
    )


def _draw_losses(runs: Sequence[NamedRun]) -> Picture:
    first, *others = runs
    drawn = draw_loss(
        first.snapshot.steps,
        branch=first.name,
        others={one.name: one.snapshot.steps for one in others},
        title="Loss of all runs",
    )
    by_step = [{row.step: row.loss for row in one.snapshot.steps} for one in runs]
    steps = sorted({step for losses in by_step for step in losses})
    # At most 20 rows, evenly spaced, with both ends.
    shown = [steps[round(i * (len(steps) - 1) / 19)] for i in range(20)] if len(steps) > 20 else steps
    rows = [(str(step), *(f"{losses[step]:.6g}" if step in losses else "–" for losses in by_step)) for step in shown]
    return Picture(drawn, Table("Losses of all runs", ("step", *(one.name for one in runs)), rows))


def _describe_equality(first: NamedRun, other: NamedRun) -> str:
    """Describe up to which step two runs have bitwise equal losses, and the largest later difference."""
    losses = {row.step: row.loss for row in other.snapshot.steps}
    common = [(row.step, abs(row.loss - losses[row.step])) for row in first.snapshot.steps if row.step in losses]
    unequal = [(step, difference) for step, difference in common if difference != 0]  # true for NaN
    both = f"{first.name} and {other.name}"
    if not common:
        return f"{both} have no step in common."
    if not unequal:
        return f"{both}: losses are equal, to the bit, in all {len(common)} steps that both made."
    since, largest = unequal[0][0], f"they differ by {max(difference for _, difference in unequal):.2g} at most"
    if since == common[0][0]:
        return f"{both}: losses are not equal from the first common step on; {largest}."
    return f"{both}: losses are equal, to the bit, before step {since}; after that {largest}."


def _draw_steps(runs: Sequence[NamedRun]) -> list[StepPictures]:
    traced = [(one, one.snapshot.last) for one in runs if one.snapshot.last is not None]
    span_s = round_up(max((Columns.of(trace).end_s for _, trace in traced), default=0.0))
    peaks = [trace.peak_bytes("device") for _, trace in traced] + [one.snapshot.budget_bytes or 0 for one, _ in traced]
    top = round_up(1.05 * max(peaks, default=0))
    return [
        StepPictures(one.name, one.snapshot.shown_words, _timeline(trace, span_s), _memory(one, trace, span_s, top))
        for one, trace in traced
    ]


def _timeline(trace: Trace, span_s: float) -> Picture:
    sentences = [str(bound) for bound in trace.bound_by()]
    drawn = draw_timeline(Columns.of(trace), span_s=span_s, keys=trace.names, sentences=sentences)
    return Picture(drawn, timeline_table(trace))


def _memory(one: NamedRun, trace: Trace, span_s: float, top: float) -> Picture:
    drawn = draw_memory(
        Columns.of(trace),
        keys=trace.names,
        span_s=span_s,
        budget_bytes=one.snapshot.budget_bytes,
        in_core_bytes=one.snapshot.in_core_bytes,
        top_bytes=top,
    )
    return Picture(drawn, memory_table(trace, one.snapshot.in_core_bytes))


def _compared_figures(one: NamedRun) -> dict[str, str]:
    """Return the compared figures and settings, by name."""
    now, run = one.snapshot, one.run
    found = {"steps": str(len(now.steps)), "layers": str(len(now.layers)), "weights": format_count(now.num_params)}
    if now.steps:
        found |= {
            "loss of the first step": f"{now.steps[0].loss:.6g}",
            "loss of the last step": f"{now.steps[-1].loss:.6g}",
            "time of a step, median": format_seconds(median(row.seconds for row in now.steps)),
            "peak of device memory": format_bytes(max(row.peak_device_bytes for row in now.steps)),
        }
    if now.in_core_bytes is not None:
        found["in core would need"] = format_bytes(now.in_core_bytes)
    if now.last is not None:
        found["copies hidden under compute"] = f"{100 * now.last.overlap():.0f} %"
        for lane, words in (
            ("h2d", "host → device, exposed"),
            ("d2h", "device → host, exposed"),
            ("eps", "EPS, exposed"),
        ):
            found[words] = format_seconds(now.last.exposed_s(lane))
        found |= {f"bound in {bound.phase}": bound.lane for bound in now.last.bound_by()}
    found["edits and changes"] = str(len(now.changes))
    found["device"] = now.device
    found.update((name, value) for name, value in settings_table(now).rows)
    return found | {
        name: str(run.machine.get(name, "–")) for name in ("platform", "cores", "threads", "python", "torch")
    }
