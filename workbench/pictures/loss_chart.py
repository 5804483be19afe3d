"""The loss over steps: a curve with held-out points, named levels and marked changes, and the table behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from workbench.pictures.loss_curve import Floats, HasLoss, LossCurve, draw_curve, draw_others
from workbench.pictures.picture import Table
from workbench.pictures.scale import Scale, format_seconds, ticks
from workbench.pictures.step_axis import (
    LEFT,
    MIN_GAP,
    RIGHT,
    WIDTH,
    change_lines,
    draw_steps_axis,
    locate_changes,
    name_changes,
    steps_scale,
    truncate,
)
from workbench.pictures.svg import document, group, outlined_text, path, rect, text
from workbench.pictures.theme import BLUE, VERMILION
from workbench.session import Change, StepRow

HEIGHT, TOP, BOTTOM = 336, 66, 288
LABEL_ROWS = (36.0, 47.5, 59.0)  # px, baselines of the names of changes
MAX_POINTS, MAX_OTHERS = 200, 8  # held-out losses, other branches

Point = tuple[float, float]  # step, loss


def draw_loss(
    steps: Sequence[HasLoss],
    changes: Sequence[Change] = (),
    *,
    title: str = "",
    held_out: Sequence[Point] = (),
    levels: Sequence[tuple[str, float]] = (),
    unit: str = "",
    branch: str = "",
    others: Mapping[str, Sequence[HasLoss]] | None = None,
) -> str:
    """Draw the loss over steps, as an SVG.

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
    curve = LossCurve.of(steps)
    aside = {name: LossCurve.of(rows) for name, rows in list((others or {}).items())[:MAX_OTHERS]}
    points = [(step, loss) for step, loss in held_out if math.isfinite(loss)]
    ends = [end for one in (curve, *aside.values()) for end in one.range()]
    losses = [*ends, *(loss for _, loss in points), *(level for _, level in levels)]
    x, (y, marks) = _steps_scale([curve, *aside.values()], points, changes), loss_scale(losses)
    parts = [
        text(LEFT, 20, title, style="strong") if title else "",
        *draw_loss_axis(y, marks, f"loss ({unit})" if unit else "loss", named=bool(losses)),
        *draw_steps_axis(x, TOP, BOTTOM),
        *_draw_changes(changes, x),
        *(_level(y, name, level) for name, level in levels),
        *draw_others(aside, x, y),
        *draw_curve(curve, x, y),
        *(_dot(x(step), y(loss)) for step, loss in _thin_out(points)),
        *_draw_non_finite(curve.non_finite, x),
        *_legend(curve, bool(points), branch if aside and branch else "training"),
        *_draw_last(curve, x, y),
    ]
    if not len(curve.step) and not len(curve.non_finite):
        parts.append(text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, "no step yet", style="dim", anchor="middle"))
    return document(WIDTH, HEIGHT, title or "Loss", _describe(curve, aside, points, levels, changes), parts)


def loss_table(steps: Sequence[StepRow], changes: Sequence[Change] = ()) -> Table:
    """List at most 20 steps: the first, the last, and some between; and what changed since the row before."""
    shown = sorted({round(i * (len(steps) - 1) / 19) for i in range(20)}) if len(steps) > 20 else range(len(steps))
    rows, since = [], -math.inf
    for row in (steps[i] for i in shown):
        said = ", ".join(change.what for change in changes if since <= change.step < row.step)
        since = row.step
        rows.append((str(row.step), f"{row.loss:.4g}", format_seconds(row.seconds), truncate(said, 60)))
    note = f"{len(rows)} of {len(steps)} steps." if len(rows) < len(steps) else ""
    return Table("Loss", ("step", "loss", "time", "changed before"), rows, note)


# Scales --------------------------------------------------------------------------------------------------------------


def _steps_scale(curves: Sequence[LossCurve], points: Sequence[Point], changes: Sequence[Change]) -> Scale:
    seen = [end for curve in curves for steps in (curve.step, curve.non_finite) if len(steps) for end in steps[[0, -1]]]
    seen += [step for step, _ in points]
    return steps_scale(seen, changes)


def loss_scale(losses: Sequence[float]) -> tuple[Scale, list[float]]:
    """Return an axis from one round value to another, and the round values between."""
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    # losses that are all the same get room around them
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-30):
        room = max(0.5 * abs(high), 1e-12) if high else 0.5
        low, high = low - room, high + room
    marks = ticks(low, high, 7)
    pace = marks[1] - marks[0] if len(marks) > 1 else high - low
    # 1e-9: an end that is round but for its last bits is a mark itself
    first, last = math.floor(low / pace + 1e-9), math.ceil(high / pace - 1e-9)
    return Scale(first * pace, last * pace, BOTTOM, TOP), [i * pace for i in range(first, last + 1)]


# Parts ---------------------------------------------------------------------------------------------------------------


def draw_loss_axis(y: Scale, marks: Sequence[float], name: str, named: bool) -> Iterator[str]:
    """Draw a rule and a number at every mark, and what is measured along them."""
    digits = max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9))
    yield path("".join(f"M{LEFT} {y(mark):.1f}H{RIGHT}" for mark in marks), style="rule")
    for mark in marks if named else ():
        shown = f"{mark:.{digits}f}" if digits <= 4 and abs(mark) < 1e6 else f"{mark:.3g}"
        yield text(LEFT - 8, y(mark) + 4, shown, style="small dim", anchor="end")
    yield (
        f'<text x="24" y="{(TOP + BOTTOM) / 2:g}" text-anchor="middle" class="dim" '
        f'transform="rotate(-90 24 {(TOP + BOTTOM) / 2:g})">{escape(name)}</text>'
    )


def _draw_last(curve: LossCurve, x: Scale, y: Scale) -> Iterator[str]:
    """The last finite loss, as a dot and a number."""
    if not len(curve.step):
        return
    at, over = x(float(curve.step[-1])), y(float(curve.loss[-1]))
    yield rect(at - 3.5, over - 3.5, 7, 7, fill=BLUE, r=3.5)
    up = over - 10 if over > TOP + 20 else over + 20
    anchor = "end" if at > LEFT + 80 else "start"
    yield outlined_text(text(min(at + 3, RIGHT - 2), up, f"{curve.loss[-1]:.4g}", style="strong", anchor=anchor))


def _draw_non_finite(broken: Floats, x: Scale) -> Iterator[str]:
    """Steps whose loss is not finite, on the axis."""
    # rounded to places 4 px apart: of thousands of steps no more crosses are drawn than can be told apart
    at = sorted({MIN_GAP * round(x(step) / MIN_GAP) for step in broken.tolist()})
    d = "".join(f"M{a - 4:.1f} {BOTTOM - 4}l8 8m0 -8l-8 8" for a in at)
    if d:
        yield path(d, stroke=VERMILION, width=2)


def _draw_changes(changes: Sequence[Change], x: Scale) -> Iterator[str]:
    """A dashed line where something changed, with names as far as there is room."""
    places = locate_changes(changes, x)
    if places:
        yield path(change_lines(places, TOP - 5, BOTTOM), style="axis", dash="3 4")
    yield from name_changes(places, LABEL_ROWS)


def _level(y: Scale, name: str, level: float) -> str:
    line = path(f"M{LEFT} {y(level):.1f}H{RIGHT}", style="axis", width=1.5, dash="6 4")
    return line + outlined_text(text(RIGHT - 6, y(level) - 6, f"{name}: {level:.2f}", anchor="end"))


def _legend(curve: LossCurve, points: bool, name: str) -> Iterator[str]:
    faint = ' stroke-opacity=".38"' if curve.window else ""
    entries = [(truncate(name, 24), f'<path d="M0 -4h22" stroke="{BLUE}" stroke-width="2"{faint}/>')]
    if curve.window:
        entries.append((f"mean of {curve.window}", f'<path d="M0 -4h22" stroke="{BLUE}" stroke-width="2.2"/>'))
    if points:
        entries.append(("held out", _dot(14, -4)))
    if len(curve.non_finite):
        entries.append(("not finite", path("M10 -8l8 8m0 -8l-8 8", stroke=VERMILION, width=2)))
    x = RIGHT + 20 - sum(48 + 6.8 * len(name) for name, _ in entries)
    for name, mark in entries:
        yield group([mark, text(28, 0, name)], transform=f"translate({x:.1f} 20)")
        x += 48 + 6.8 * len(name)


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{VERMILION}"/>'


def _thin_out(points: Sequence[Point]) -> Sequence[Point]:
    """At most so many, the last among them."""
    return points[:: -(-len(points) // MAX_POINTS)][:-1] + points[-1:] if len(points) > MAX_POINTS else points


def _describe(
    curve: LossCurve,
    others: Mapping[str, LossCurve],
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
    said += (
        [f"Not finite in {len(curve.non_finite)} steps, the first is {curve.non_finite[0]:g}."]
        if len(curve.non_finite)
        else []
    )
    said += [
        f"Branch {name}: {other.loss[-1]:.4g} at step {other.step[-1]:g}."
        for name, other in others.items()
        if len(other.step)
    ]
    said += [f"{name}: {level:.2f}." for name, level in levels]
    said += [f"After step {change.step}: {change.what}." for change in changes[:20]]
    return " ".join(said) or "No step yet."
