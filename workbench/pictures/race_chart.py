"""A race of branches: their losses on one axis, where each comes from and was edited, and the memory that each needed.

Thin curves are training losses; rings are means over the probe, measured on the same batches for all. Below, on the left,
the branches as a tree over the steps of each, thick where they raced, with a diamond for every edit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from l2l_core.trace import format_bytes
from workbench.pictures.loss_chart import BOTTOM, TOP, draw_loss_axis, loss_scale
from workbench.pictures.loss_curve import OTHER_STYLES, LossCurve, draw_curve, draw_others
from workbench.pictures.picture import Picture, Table
from workbench.pictures.roofline_chart import format_prefixed
from workbench.pictures.scale import Scale, format_seconds, round_up, ticks
from workbench.pictures.step_axis import LEFT, RIGHT, WIDTH, truncate
from workbench.pictures.svg import document, path, rect, text
from workbench.pictures.theme import BLUE, GREY
from workbench.session import FLOP_FORMULA, Change, Race, Racer, describe_change

Axis = Literal["steps", "flop", "seconds"]

AXES: Mapping[Axis, str] = {"steps": "steps", "flop": "compute (FLOP)", "seconds": "seconds of the branch's own steps"}
MAX_RACERS = 8  # branches that are drawn
MAX_EDITS = 40  # of a branch
TREE = (LEFT, 560.0)  # px, from left to right
BARS = (620.0, 860.0)
LINE = 24.0  # px, of a branch


def show_race(race: Race, axis: Axis = "steps") -> Picture:
    """Return the picture and its table."""
    return Picture(draw_race(race, axis), race_table(race))


def draw_race(race: Race, axis: Axis = "steps") -> str:
    """Draw a race over this axis, as an SVG.

    Raises:
        ValueError: there is no such axis.
    """
    if axis not in AXES:
        raise ValueError(f"axis={axis!r}: there are {', '.join(map(repr, AXES))}")
    shown = race.racers[:MAX_RACERS]
    colours = [BLUE, *(OTHER_STYLES[i % len(OTHER_STYLES)][0] for i in range(len(shown) - 1))]
    curves = {racer.name: _curve(racer, axis) for racer in shown}
    points = {racer.name: _points(racer, axis) for racer in shown}
    means = [mean for of in points.values() for _, mean in of]
    y, marks = loss_scale([end for curve in curves.values() for end in curve.range()] + means)
    x = Scale(
        0.0, max([at for racer in shown for at in _spent_so_far(racer, axis)[-1:]], default=0.0) or 1.0, LEFT, RIGHT
    )
    first, *others = shown
    lines = _branch_lines(shown)
    height = BOTTOM + 74 + LINE * len(lines) + 24
    parts = [
        text(LEFT, 20, "Race: loss", style="strong"),
        text(LEFT, 40, f"{truncate(first.name, 24)} is the solid line; rings are means over the probe", style="dim"),
        *draw_loss_axis(y, marks, "loss", named=bool(means) or any(len(curve.step) for curve in curves.values())),
        *_axis(x, axis),
        *(
            _draw_equal(race, other, x, colour)
            for other, colour in zip(others, colours[1:], strict=True)
            if axis == "flop"
        ),
        *draw_others({racer.name: curves[racer.name] for racer in others}, x, y),
        *draw_curve(curves[first.name], x, y),
        *(_ring(x(at), y(mean), c) for r, c in zip(shown, colours, strict=True) for at, mean in points[r.name]),
        *_tree(lines, dict(zip(curves, colours, strict=True)), BOTTOM + 74),
        *_bars(lines, dict(zip(curves, colours, strict=True)), BOTTOM + 74),
    ]
    return document(WIDTH, height, "Race", _describe(race, axis), parts)


def race_table(race: Race) -> Table:
    """List a row per branch, the difference at equal compute among it, and what has to be known to read it."""
    first = race.racers[0]
    header = ("branch", "layers", "steps", "loss", "probe", "FLOP", "seconds", "peak memory",
              "probe at equal FLOP", "training loss there")  # fmt: skip
    rows = [_row(race, racer) for racer in race.racers]
    done = f"The race has ended: {race.ended}." if race.ended else ""
    equal = (
        f"At equal compute: the loss of a branch minus that of {first.name} after as many FLOP, ± the standard deviation over "
        "the probe's batches. Between two measurements it is read off a straight line. ▼ lower and ▲ higher by more than that."
    )
    why = [f"{r.name} has left, {r.left}." if r.left else "" for r in race.racers]
    why += [f"{r.name}: the probe was not measured, {r.not_measured}." if r.not_measured else "" for r in race.racers]
    return Table(
        "Race", header, rows, " ".join(filter(None, [done, *why, equal, f"{FLOP_FORMULA} Seconds: own steps only."]))
    )


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


# Curves --------------------------------------------------------------------------------------------------------------


def _spent_so_far(racer: Racer, axis: Axis) -> Sequence[float]:
    """What was spent after so many steps, from none on."""
    if axis == "flop":
        return racer.spent_flop
    return racer.spent_s if axis == "seconds" else range(len(racer.steps) + 1)


def _curve(racer: Racer, axis: Axis) -> LossCurve:
    at = np.array(_spent_so_far(racer, axis)[1:], np.float64)
    loss = np.array([row.loss for row in racer.steps], np.float64)
    fine = np.isfinite(loss)
    return LossCurve(at[fine], loss[fine], at[~fine])


def _points(racer: Racer, axis: Axis) -> list[tuple[float, float]]:
    spent = _spent_so_far(racer, axis)
    return [(spent[at], found.mean) for at, found in racer.measured if math.isfinite(found.mean)]


def _axis(x: Scale, axis: Axis) -> Iterator[str]:
    marks = [mark for mark in ticks(x.low, x.high, 9) if axis != "steps" or mark == int(mark)]
    yield path(
        f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" + "".join(f"M{x(mark):.1f} {BOTTOM}v5" for mark in marks), style="axis"
    )
    for mark in marks:
        said = {"steps": f"{mark:.0f}", "flop": format_prefixed(mark).strip(), "seconds": f"{mark:.4g}"}[axis]
        anchor = "end" if x(mark) > RIGHT - 14 else "middle"
        yield text(x(mark), BOTTOM + 19, said, style="small dim", anchor=anchor)
    yield text((LEFT + RIGHT) / 2, BOTTOM + 38, AXES[axis], style="dim", anchor="middle")


def _draw_equal(race: Race, other: Racer, x: Scale, colour: str) -> str:
    """Where a branch and the first one have spent the same."""
    return path(f"M{x(race.equal_flop(other.name)):.1f} {TOP}V{BOTTOM}", stroke=colour, dash="1 4", width=1.5)


def _ring(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="page" stroke="{colour}" stroke-width="2"/>'


# Tree and bars -------------------------------------------------------------------------------------------------------


class _BranchLine(NamedTuple):
    """A branch in the tree."""

    name: str
    parent: str | None
    first: int  # steps when it was forked
    start_step: int  # when the race began
    last: int  # steps now
    edits: Sequence[Change]
    racer: Racer | None  # None of a branch that does not race, but has a child that does


def _branch_lines(racers: Sequence[Racer]) -> Sequence[_BranchLine]:
    """Those that race, and before them the branches that these were forked from."""
    names = {racer.name for racer in racers}
    lines, above = [], {}
    for one in racers:
        first, parent = one.forked_at, one.parent
        if parent is None or first is None:
            parent, first = None, 0
        lines.append(
            _BranchLine(one.name, parent, first, one.begun, one.begun + len(one.steps), _edits(one, one.name), one)
        )
        if parent is not None and parent not in names:
            old = above.get(parent)
            last = max(first, old.last if old is not None else 0)
            above[parent] = _BranchLine(parent, None, 0, last, last, _edits(one, parent), None)
    return [*above.values(), *lines]


def _edits(racer: Racer, branch: str) -> Sequence[Change]:
    return [change for change in racer.changes if change.branch == branch and change.entry is not None][-MAX_EDITS:]


def _tree(lines: Sequence[_BranchLine], colours: Mapping[str, str], top: float) -> Iterator[str]:
    x = Scale(0, max((line.last for line in lines), default=1) or 1, *TREE)
    rows = {line.name: top + LINE * (i + 0.5) for i, line in enumerate(lines)}
    yield text(LEFT, top - 8, f"branches and edits ◆, over {x.high:.0f} steps", style="dim")
    for line in lines:
        y, colour = rows[line.name], colours.get(line.name, GREY)
        yield text(LEFT - 8, y + 4, truncate(line.name, 14), style="small", anchor="end")
        if line.parent is not None:
            yield path(f"M{x(line.first):.1f} {rows[line.parent]:.1f}V{y:.1f}", style="axis")
        yield path(f"M{x(line.first):.1f} {y:.1f}H{x(line.start_step):.1f}", stroke=colour, width=1.5)
        yield path(f"M{x(line.start_step):.1f} {y:.1f}H{x(line.last):.1f}", stroke=colour, width=5)
        yield from (_diamond(x(edit.step), y, f"After step {edit.step}: {edit.what}") for edit in line.edits)
        if line.racer is not None and line.racer.left:
            yield text(x(line.last) + 6, y + 4, "✕ left", style="small")


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
    said = [f"{len(race.racers)} branches on the same batches, over {AXES[axis]}."]
    for racer in race.racers[:MAX_RACERS]:
        loss = f", loss {racer.steps[-1].loss:.4g}" if racer.steps else ""
        said.append(f"{racer.name}: {len(racer.steps)} of {race.asked} steps{loss}, {len(racer.changes)} changes.")
    return " ".join(said)
