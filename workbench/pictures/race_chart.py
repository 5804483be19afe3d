"""Race of branches: losses on one axis, the tree of branches with their edits, and the memory of each.

Curves are training losses; rings are means over the probe, on the same batches for all branches. In the tree below, a thick
line marks the steps of the race and a diamond an edit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from l2l_core.trace import format_bytes
from workbench.pictures.amount_axis import draw_amount_axis
from workbench.pictures.loss_chart import BOTTOM, TOP, draw_loss_axis, loss_scale
from workbench.pictures.loss_curve import LossCurve, draw_curve, draw_names, draw_others, ends_of, other_colour
from workbench.pictures.picture import Picture, Table
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale, format_prefixed, format_seconds, round_up
from workbench.pictures.step_axis import LEFT, WIDTH
from workbench.pictures.svg import document, path, rect, text
from workbench.pictures.theme import BLUE, GREY
from workbench.session import FLOP_RULE, Change, Race, Racer, describe_change

Axis = Literal["steps", "flop", "seconds"]

AXES: Mapping[Axis, str] = {"steps": "steps", "flop": "compute (FLOP)", "seconds": "seconds of the branch's own steps"}
MAX_RACERS = 8  # maximum number of branches drawn
MAX_EDITS = 40  # per branch
END = 830.0  # px, end of the longest curve: room for names on its right
TREE = (LEFT, 560.0)  # px, left and right edge
BARS = (620.0, 860.0)
LINE = 24.0  # px, height of a branch


def show_race(race: Race, axis: Axis = "steps") -> Picture:
    """Return a race as a picture with its table."""
    return Picture(draw_race(race, axis), race_table(race))


def draw_race(race: Race, axis: Axis = "steps") -> str:
    """Draw a race over steps, FLOP or seconds, as an SVG.

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in AXES:
        raise ValueError(f"axis={axis!r} is not an axis of a race: give one of {', '.join(map(repr, AXES))}")
    shown = race.racers[:MAX_RACERS]
    colours = [BLUE, *map(other_colour, range(len(shown) - 1))]
    curves = {racer.name: _curve(racer, axis) for racer in shown}
    measured = [
        (racer.name, _spent_so_far(racer, axis)[step], loss) for racer in shown for step, loss in racer.measured
    ]
    points = [(name, spent, loss.mean) for name, spent, loss in measured if math.isfinite(loss.mean)]
    means = [mean for _, _, mean in points]
    y, marks = loss_scale([end for curve in curves.values() for end in curve.range()] + means)
    x = Scale(0.0, max(_spent_so_far(racer, axis)[-1] for racer in shown) or 1.0, LEFT, END)
    first, *others = shown
    lines, tree_top, colour_of = _branch_lines(shown), BOTTOM + 74, dict(zip(curves, colours, strict=True))
    height = tree_top + LINE * len(lines) + 24
    parts = [
        text(LEFT, 20, "Race: loss", style="strong"),
        text(LEFT, 40, f"{shortened(first.name, 24)} is the solid line; rings are means over the probe", style="dim"),
        *draw_loss_axis(y, marks, "loss", named=bool(means) or any(len(curve.step) for curve in curves.values())),
        *draw_amount_axis(x, axis, AXES[axis], TOP, BOTTOM),
        *(_draw_equal(race, other, x, colour_of[other.name]) for other in others if axis == "flop"),
        *draw_others({racer.name: curves[racer.name] for racer in others}, x, y),
        *draw_curve(curves[first.name], x, y),
        *draw_names(ends_of(curves, colour_of, x, y), WIDTH, BOTTOM),
        *(_ring(x(spent), y(mean), colour_of[name]) for name, spent, mean in points),
        *_tree(lines, colour_of, tree_top),
        *_bars(lines, colour_of, tree_top),
    ]
    return document(WIDTH, height, "Race", _describe(race, axis), parts)


def race_table(race: Race) -> Table:
    """Return a table with a row per branch, including the difference at equal compute, and notes."""
    costs = ("FLOP", "seconds", "peak memory", "probe at equal FLOP", "training loss there")
    header = ("branch", "layers", "steps", "loss", "probe", *costs)
    rows = [_row(race, racer) for racer in race.racers]
    notes = [f"The race has ended: {race.ended}."] if race.ended else []
    notes += [f"{racer.name} has left, {racer.left}." for racer in race.racers if racer.left]
    for racer in race.racers:
        notes += [f"{racer.name}: the probe was not measured, {racer.not_measured}."] if racer.not_measured else []
    notes += [
        f"At equal compute: the loss of a branch minus that of {race.racers[0].name} after as many FLOP, ± the standard "
        "deviation over the probe's batches, interpolated between measurements. It is of one run of each branch, no spread over "
        "seeds. ▼ lower and ▲ higher by more than that.",
        f"{FLOP_RULE} Seconds: own steps only.",
    ]
    return Table("Race", header, rows, " ".join(notes))


def _row(race: Race, racer: Racer) -> Sequence[str]:
    is_first = racer is race.racers[0]
    judged, trained = race.difference(racer.name), race.train_difference(racer.name)
    return (
        racer.name,
        str(racer.layers),
        f"{len(racer.steps)} of {race.asked}",
        f"{racer.steps[-1].loss:.4g}" if racer.steps else "–",
        f"{racer.at_end.mean:.4g}" if racer.at_end is not None else "–",
        format_prefixed(racer.spent_flop[-1]).strip(),
        format_seconds(racer.spent_s[-1]),
        format_bytes(racer.peak_bytes) if racer.peak_bytes is not None else "–",
        "compared with" if is_first else describe_change(judged) if judged is not None else "–",
        "" if is_first else f"{trained:+.2g}".replace("-", "−") if trained is not None else "–",
    )


def _spent_so_far(racer: Racer, axis: Axis) -> Sequence[float]:
    """Return the position on the axis after each number of steps, from 0 steps on."""
    if axis == "flop":
        return racer.spent_flop
    return racer.spent_s if axis == "seconds" else range(len(racer.steps) + 1)


def _curve(racer: Racer, axis: Axis) -> LossCurve:
    spent = np.array(_spent_so_far(racer, axis)[1:], np.float64)
    loss = np.array([row.loss for row in racer.steps], np.float64)
    return LossCurve.of(spent, loss)


def _draw_equal(race: Race, other: Racer, x: Scale, colour: str) -> str:
    """Return a line where a branch and the first one have spent the same FLOP."""
    return path(f"M{x(race.equal_flop(other.name)):.1f} {TOP}V{BOTTOM}", stroke=colour, dash="1 4", width=1.5)


def _ring(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="page" stroke="{colour}" stroke-width="2"/>'


class _BranchLine(NamedTuple):
    """A branch in the tree."""

    name: str
    parent: str | None
    first: int  # step of its fork
    start_step: int  # step at the beginning of the race
    last: int  # present step
    edits: Sequence[Change]
    racer: Racer | None  # None if only a child of the branch races


def _branch_lines(racers: Sequence[Racer]) -> Sequence[_BranchLine]:
    """Return the racing branches, preceded by parents that do not race."""
    names = {racer.name for racer in racers}
    lines, parents = [], {}
    for one in racers:
        first, parent = one.forked_at, one.parent
        if parent is None or first is None:
            parent, first = None, 0
        last = one.begun + len(one.steps)
        lines.append(_BranchLine(one.name, parent, first, one.begun, last, _edits(one, one.name), one))
        if parent is not None and parent not in names:
            last = max(first, parents[parent].last if parent in parents else 0)
            parents[parent] = _BranchLine(parent, None, 0, last, last, _edits(one, parent), None)
    return [*parents.values(), *lines]


def _edits(racer: Racer, branch: str) -> Sequence[Change]:
    return [change for change in racer.changes if change.branch == branch and change.entry is not None][-MAX_EDITS:]


def _tree(lines: Sequence[_BranchLine], colours: Mapping[str, str], top: float) -> Iterator[str]:
    x = Scale(0, max((line.last for line in lines), default=1) or 1, *TREE)
    rows = {line.name: top + LINE * (i + 0.5) for i, line in enumerate(lines)}
    yield text(LEFT, top - 8, f"branches and edits ◆, over {x.high:.0f} steps", style="dim")
    for line in lines:
        y, colour = rows[line.name], colours.get(line.name, GREY)
        yield text(LEFT - 8, y + 4, shortened(line.name, 14), style="small", anchor="end")
        if line.parent is not None:
            yield path(f"M{x(line.first):.1f} {rows[line.parent]:.1f}V{y:.1f}", style="axis")
        yield path(f"M{x(line.first):.1f} {y:.1f}H{x(line.start_step):.1f}", stroke=colour, width=1.5)
        yield path(f"M{x(line.start_step):.1f} {y:.1f}H{x(line.last):.1f}", stroke=colour, width=5)
        yield from (_diamond(x(edit.step), y, f"After step {edit.step}: {edit.what}") for edit in line.edits)
        if line.racer is not None and line.racer.left:
            yield text(x(line.last) + 6, y + 4, "left the race", style="small")


def _diamond(x: float, y: float, tip: str) -> str:
    square = rect(-4.5, -4.5, 9, 9, style="card", tip=tip)
    return f'<g transform="translate({x:.1f} {y:.1f}) rotate(45)">{square}</g>'


def _bars(lines: Sequence[_BranchLine], colours: Mapping[str, str], top: float) -> Iterator[str]:
    peaks = [line.racer.peak_bytes if line.racer is not None else None for line in lines]
    x = Scale(0.0, round_up(max((peak for peak in peaks if peak is not None), default=0)), *BARS)
    yield text(BARS[0], top - 8, "peak of device memory", style="dim")
    for i, (line, peak) in enumerate(zip(lines, peaks, strict=True)):
        if peak is not None:
            y, end = top + LINE * i + 5, x(peak)
            yield rect(BARS[0], y, end - BARS[0], LINE - 10, fill=colours[line.name], r=2, tip=line.name)
            yield text(end + 6, y + 11, format_bytes(peak), style="small")


def _describe(race: Race, axis: Axis) -> str:
    sentences = [f"{len(race.racers)} branches on the same batches, over {AXES[axis]}."]
    for racer in race.racers[:MAX_RACERS]:
        loss = f", loss {racer.steps[-1].loss:.4g}" if racer.steps else ""
        sentences.append(f"{racer.name}: {len(racer.steps)} of {race.asked} steps{loss}, {len(racer.changes)} changes.")
    return " ".join(sentences)
