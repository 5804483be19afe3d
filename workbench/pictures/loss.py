"""The loss over steps: a curve with held-out points, named levels and marked changes, and the table behind it.

However many steps there are, the curve is drawn from the lowest and the highest loss of every pixel column, so no spike
is lost; with more than a hundred steps a moving mean runs over the faint values themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.picture import Table
from workbench.pictures.scale import Scale, format_seconds, ticks
from workbench.pictures.steps import (
    APART,
    LEFT,
    LETTER,
    RIGHT,
    WIDTH,
    change_lines,
    cut_short,
    draw_steps_axis,
    name_changes,
    place_changes,
    steps_scale,
)
from workbench.pictures.svg import document, group, path, rect, text
from workbench.pictures.theme import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from workbench.session import Change, StepRow

HEIGHT, TOP, BOTTOM = 336, 66, 288
LABEL_ROWS = (36.0, 47.5, 59.0)  # px, baselines of the names of changes
SMOOTH_FROM = 101  # steps
MOST_POINTS = 200  # held out
OTHERS = ((ORANGE, "6 3"), (GREEN, "2 3"), (PURPLE, "8 3 2 3"), (SKY, "4 2"))  # colour and dashes, in turn
MOST_OTHERS, OTHER_POINTS = 8, 250
NAMES_APART = 13.0  # px, between names of branches one above the other

Point = tuple[float, float]  # step, loss
Floats = NDArray[np.float64]


class Lossy(Protocol):
    """A finished step, as far as its loss goes."""

    @property
    def step(self) -> int: ...  # from 1

    @property
    def loss(self) -> float: ...


def draw_loss(
    steps: Sequence[Lossy],
    changes: Sequence[Change] = (),
    *,
    title: str = "",
    held_out: Sequence[Point] = (),
    levels: Sequence[tuple[str, float]] = (),
    unit: str = "",
    branch: str = "",
    others: Mapping[str, Sequence[Lossy]] | None = None,
) -> str:
    """An SVG of the loss over steps.

    Args:
        steps: finished steps, in order; a loss that is not finite is left out of the curve and marked on the axis.
        changes: dashed upright lines, with names as far as there is room.
        title: above the plot.
        held_out: steps and losses, drawn as points.
        levels: names and losses, drawn as dashed lines.
        unit: of the loss.
        branch: name of the branch that `steps` led to, said where there are others.
        others: by other branch, its steps since it parted: thin, dashed lines with names; at most eight.
    """
    curve = _Curve.of(steps)
    aside = {name: _Curve.of(rows) for name, rows in list((others or {}).items())[:MOST_OTHERS]}
    points = [(step, loss) for step, loss in held_out if math.isfinite(loss)]
    ends = [end for one in (curve, *aside.values()) for end in one.range()]
    losses = [*ends, *(loss for _, loss in points), *(level for _, level in levels)]
    x, (y, marks) = _steps_scale([curve, *aside.values()], points, changes), _loss_scale(losses)
    parts = [
        text(LEFT, 20, title, style="strong") if title else "",
        *_axes(x, y, marks, f"loss ({unit})" if unit else "loss", named=bool(losses)),
        *_changes(changes, x),
        *(_level(y, name, level) for name, level in levels),
        *_draw_others(aside, x, y),
        *_draw_curve(curve, x, y),
        *(_dot(x(step), y(loss)) for step, loss in _thinned(points)),
        *_crosses(curve.broken, x),
        *_legend(curve, bool(points), branch if aside and branch else "training"),
        *_last(curve, x, y),
    ]
    if not len(curve.step) and not len(curve.broken):
        parts.append(text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, "no step yet", style="dim", anchor="middle"))
    return document(WIDTH, HEIGHT, title or "Loss", _describe(curve, aside, points, levels, changes), parts)


def loss_table(steps: Sequence[StepRow], changes: Sequence[Change] = ()) -> Table:
    """At most 20 steps: the first, the last, and some between; what changed since the row before."""
    shown = sorted({round(i * (len(steps) - 1) / 19) for i in range(20)}) if len(steps) > 20 else range(len(steps))
    rows, since = [], -math.inf
    for row in (steps[i] for i in shown):
        said = ", ".join(change.what for change in changes if since <= change.step < row.step)
        since = row.step
        rows.append((str(row.step), f"{row.loss:.4g}", format_seconds(row.seconds), cut_short(said, 60)))
    note = f"{len(rows)} of {len(steps)} steps." if len(rows) < len(steps) else ""
    return Table("Loss", ("step", "loss", "time", "changed before"), rows, note)


class _Curve(NamedTuple):
    """Finite losses and their steps; steps without."""

    step: Floats
    loss: Floats
    broken: Floats

    @staticmethod
    def of(steps: Sequence[Lossy]) -> _Curve:
        step = np.fromiter(map(attrgetter("step"), steps), np.float64, len(steps))
        loss = np.fromiter(map(attrgetter("loss"), steps), np.float64, len(steps))
        fine = np.isfinite(loss)
        return _Curve(step[fine], loss[fine], step[~fine])

    def range(self) -> list[float]:
        return [float(self.loss.min()), float(self.loss.max())] if len(self.loss) else []

    @property
    def window(self) -> int:
        """Steps of the moving mean, 0 without one."""
        return max(9, len(self.loss) // 50) | 1 if len(self.loss) >= SMOOTH_FROM else 0

    def smooth(self) -> Floats:
        """(steps,): the mean of so many steps around each, fewer at the ends."""
        reach = np.arange(len(self.loss))
        first = np.maximum(reach - self.window // 2, 0)
        last = np.minimum(reach + self.window // 2 + 1, len(self.loss))
        sums = np.append(0.0, np.cumsum(self.loss))
        return (sums[last] - sums[first]) / (last - first)


# Scales --------------------------------------------------------------------------------------------------------------


def _steps_scale(curves: Sequence[_Curve], points: Sequence[Point], changes: Sequence[Change]) -> Scale:
    seen = [end for curve in curves for steps in (curve.step, curve.broken) if len(steps) for end in steps[[0, -1]]]
    seen += [step for step, _ in points]
    return steps_scale(seen, changes)


def _loss_scale(losses: Sequence[float]) -> tuple[Scale, list[float]]:
    """An axis from one round value to another, and the round values between."""
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-30):
        room = max(0.5 * abs(high), 1e-12) if high else 0.5
        low, high = low - room, high + room
    marks = ticks(low, high, 7)
    pace = marks[1] - marks[0] if len(marks) > 1 else high - low
    first, last = math.floor(low / pace + 1e-9), math.ceil(high / pace - 1e-9)
    return Scale(first * pace, last * pace, BOTTOM, TOP), [i * pace for i in range(first, last + 1)]


# Parts ---------------------------------------------------------------------------------------------------------------


def _axes(x: Scale, y: Scale, marks: Sequence[float], name: str, named: bool) -> Iterator[str]:
    digits = max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9))
    yield path("".join(f"M{LEFT} {y(mark):.1f}H{RIGHT}" for mark in marks), style="rule")
    for mark in marks if named else ():
        shown = f"{mark:.{digits}f}" if digits <= 4 and abs(mark) < 1e6 else f"{mark:.3g}"
        yield text(LEFT - 8, y(mark) + 4, shown, style="small dim", anchor="end")
    yield from draw_steps_axis(x, TOP, BOTTOM)
    yield (
        f'<text x="24" y="{(TOP + BOTTOM) / 2:g}" text-anchor="middle" class="dim" '
        f'transform="rotate(-90 24 {(TOP + BOTTOM) / 2:g})">{escape(name)}</text>'
    )


def _draw_curve(curve: _Curve, x: Scale, y: Scale) -> Iterator[str]:
    if len(curve.step) < 2:
        return
    columns = np.floor(x.first + (x.last - x.first) * (curve.step - x.low) / (x.high - x.low)).astype(np.int64)
    firsts = np.flatnonzero(np.append(True, columns[1:] != columns[:-1]))
    if len(firsts) * 2 >= len(columns):
        d = _line([x(step) for step in curve.step.tolist()], [y(loss) for loss in curve.loss.tolist()])
    else:
        lows, highs = (y.first + (y.last - y.first) * (f.reduceat(curve.loss, firsts) - y.low) / (y.high - y.low)
                       for f in (np.minimum, np.maximum))  # fmt: skip
        at = columns[firsts].tolist()
        d = "M" + "L".join(f"{a} {b:.1f}V{c:.1f}" for a, b, c in zip(at, lows.tolist(), highs.tolist(), strict=True))
    if not curve.window:
        yield f'<path d="{d}" fill="none" stroke="{BLUE}" stroke-width="1.8" stroke-linejoin="round"/>'
        return
    yield f'<path d="{d}" fill="none" stroke="{BLUE}" stroke-opacity=".38"/>'
    smooth, chosen = curve.smooth(), np.append(firsts[::2], len(columns) - 1)
    d = _line([x(s) for s in curve.step[chosen].tolist()], [y(v) for v in smooth[chosen].tolist()])
    yield f'<path d="{d}" fill="none" stroke="{BLUE}" stroke-width="2.2" stroke-linejoin="round"/>'


def _draw_others(aside: Mapping[str, _Curve], x: Scale, y: Scale) -> Iterator[str]:
    """Other branches, each with its name at its end, and names apart from each other."""
    named: list[tuple[float, float]] = []
    for i, (name, curve) in enumerate(aside.items()):
        if not len(curve.step):
            continue
        colour, dashes = OTHERS[i % len(OTHERS)]
        chosen = np.linspace(0, len(curve.step) - 1, min(len(curve.step), OTHER_POINTS)).astype(np.int64)
        losses = curve.smooth() if curve.window else curve.loss
        xs, ys = [x(step) for step in curve.step[chosen].tolist()], [y(loss) for loss in losses[chosen].tolist()]
        yield f'<path d="{_line(xs, ys)}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dashes}"/>'
        words = cut_short(name, 24)
        anchor, at = ("end", xs[-1]) if xs[-1] > RIGHT - LETTER * len(words) - 8 else ("start", xs[-1] + 5)
        over = ys[-1] - 7 if anchor == "end" else ys[-1] + 4
        while any(abs(at - left) < 160 and abs(over - other) < NAMES_APART for left, other in named):
            over += NAMES_APART
        named.append((at, over))
        yield rect(xs[-1] - 2.5, ys[-1] - 2.5, 5, 5, fill=colour, r=2.5)
        yield _seamed(text(at, over, words, style="small", anchor=anchor))


def _line(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))


def _last(curve: _Curve, x: Scale, y: Scale) -> Iterator[str]:
    """The last finite loss, as a dot and a number."""
    if not len(curve.step):
        return
    at, over = x(float(curve.step[-1])), y(float(curve.loss[-1]))
    yield rect(at - 3.5, over - 3.5, 7, 7, fill=BLUE, r=3.5)
    up = over - 10 if over > TOP + 20 else over + 20
    anchor = "end" if at > LEFT + 80 else "start"
    yield _seamed(text(min(at + 3, RIGHT - 2), up, f"{curve.loss[-1]:.4g}", style="strong", anchor=anchor))


def _crosses(broken: Floats, x: Scale) -> Iterator[str]:
    """Steps whose loss is not finite, on the axis."""
    at = sorted({APART * round(x(step) / APART) for step in broken.tolist()})
    d = "".join(f"M{a - 4:.1f} {BOTTOM - 4}l8 8m0 -8l-8 8" for a in at)
    if d:
        yield path(d, stroke=VERMILION, width=2)


def _changes(changes: Sequence[Change], x: Scale) -> Iterator[str]:
    """A dashed line where something changed, with names as far as there is room."""
    places = place_changes(changes, x)
    if places:
        yield path(change_lines(places, TOP - 5, BOTTOM), style="axis", dash="3 4")
    yield from name_changes(places, LABEL_ROWS)


def _level(y: Scale, name: str, level: float) -> str:
    line = path(f"M{LEFT} {y(level):.1f}H{RIGHT}", style="axis", width=1.5, dash="6 4")
    return line + _seamed(text(RIGHT - 6, y(level) - 6, f"{name}: {level:.2f}", anchor="end"))


def _legend(curve: _Curve, points: bool, name: str) -> Iterator[str]:
    faint = ' stroke-opacity=".38"' if curve.window else ""
    entries = [(cut_short(name, 24), f'<path d="M0 -4h22" stroke="{BLUE}" stroke-width="2"{faint}/>')]
    if curve.window:
        entries.append((f"mean of {curve.window}", f'<path d="M0 -4h22" stroke="{BLUE}" stroke-width="2.2"/>'))
    if points:
        entries.append(("held out", _dot(14, -4)))
    if len(curve.broken):
        entries.append(("not finite", path("M10 -8l8 8m0 -8l-8 8", stroke=VERMILION, width=2)))
    x = RIGHT + 20 - sum(48 + 6.8 * len(name) for name, _ in entries)
    for name, mark in entries:
        yield group([mark, text(28, 0, name)], transform=f"translate({x:.1f} 20)")
        x += 48 + 6.8 * len(name)


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{VERMILION}"/>'


def _seamed(words: str) -> str:
    """Words over lines, with a seam in the colour of the page."""
    seam = "paint-order:stroke;stroke:var(--jp-layout-color1,Canvas);stroke-width:3px;stroke-linejoin:round"
    return f'<g style="{seam}">{words}</g>'


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most so many, the last among them."""
    return points[:: -(-len(points) // MOST_POINTS)][:-1] + points[-1:] if len(points) > MOST_POINTS else points


def _describe(
    curve: _Curve,
    aside: Mapping[str, _Curve],
    points: Sequence[Point],
    levels: Sequence[tuple[str, float]],
    changes: Sequence[Change],
) -> str:
    train = list(zip(curve.step[[0, -1]], curve.loss[[0, -1]], strict=True)) if len(curve.step) else []
    said = [
        f"{name}: {line[0][1]:.4g} at step {line[0][0]:g}, {line[-1][1]:.4g} at step {line[-1][0]:g}."
        for name, line in (("Training loss", train), ("Held-out loss", points))
        if line
    ]
    said += [f"Not finite in {len(curve.broken)} steps, the first is {curve.broken[0]:g}."] if len(curve.broken) else []
    said += [
        f"Branch {name}: {other.loss[-1]:.4g} at step {other.step[-1]:g}."
        for name, other in aside.items()
        if len(other.step)
    ]
    said += [f"{name}: {level:.2f}." for name, level in levels]
    said += [f"After step {change.step}: {change.what}." for change in changes[:20]]
    return " ".join(said) or "No step yet."
