"""Loss over steps: a curve with held-out points, levels and changes, and its table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from workbench.pictures.loss_curve import Floats, HasLoss, LossCurve, draw_curve, draw_others
from workbench.pictures.picture import Table
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale, format_seconds, ticks
from workbench.pictures.step_axis import (
    LEFT,
    MIN_GAP,
    RIGHT,
    WIDTH,
    draw_changes,
    draw_steps_axis,
    steps_scale,
)
from workbench.pictures.svg import document, group, outlined_text, path, rect, text
from workbench.pictures.theme import BLUE, VERMILION
from workbench.session import Change, StepRow

HEIGHT, TOP, BOTTOM = 336, 66, 288
LABEL_ROWS = (36.0, 47.5, 59.0)  # px, baselines of the labels of changes
MAX_POINTS, MAX_OTHERS = 200, 8  # maximum numbers of held-out losses and of other branches

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
        steps: finished steps, in order; losses that are not finite are marked on the axis.
        changes: drawn as dashed vertical lines, labelled where there is room.
        title: title above the plot.
        held_out: steps and losses, drawn as points.
        levels: names and losses, drawn as dashed lines.
        unit: unit of the loss.
        branch: branch of `steps`, named in the legend if there are others.
        others: steps of other branches since they split off, by name, drawn as thin dashed lines; at most eight.
    """
    curve = LossCurve.of(steps)
    branches = {name: LossCurve.of(rows) for name, rows in list((others or {}).items())[:MAX_OTHERS]}
    points = [(step, loss) for step, loss in held_out if math.isfinite(loss)]
    curves = [curve, *branches.values()]
    losses = [*(loss for one in curves for loss in one.range()), *(loss for _, loss in points)]
    losses += [level for _, level in levels]
    arrays = [steps for one in curves for steps in (one.step, one.non_finite) if len(steps)]
    ends = [float(end) for steps in arrays for end in (steps[0], steps[-1])]
    x, (y, marks) = steps_scale([*ends, *(step for step, _ in points)], changes), loss_scale(losses)
    parts = [
        text(LEFT, 20, title, style="strong") if title else "",
        *draw_loss_axis(y, marks, f"loss ({unit})" if unit else "loss", named=bool(losses)),
        *draw_steps_axis(x, TOP, BOTTOM),
        *draw_changes(changes, x, TOP - 5, BOTTOM, LABEL_ROWS),
        *(_level(y, name, level) for name, level in levels),
        *draw_others(branches, x, y),
        *draw_curve(curve, x, y),
        *(_dot(x(step), y(loss)) for step, loss in _thin_out(points)),
        *_draw_non_finite(curve.non_finite, x),
        *_legend(curve, bool(points), branch if branches and branch else "training"),
        *_draw_last(curve, x, y),
    ]
    if not len(curve.step) and not len(curve.non_finite):
        parts.append(text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, "no step yet", style="dim", anchor="middle"))
    return document(WIDTH, HEIGHT, title or "Loss", _describe(curve, branches, points, levels, changes), parts)


def loss_table(steps: Sequence[StepRow], changes: Sequence[Change] = ()) -> Table:
    """Return a table of at most 20 evenly spaced steps, with the changes since the previous row."""
    shown = sorted({round(i * (len(steps) - 1) / 19) for i in range(20)}) if len(steps) > 20 else range(len(steps))
    rows, since = [], -math.inf
    for row in (steps[i] for i in shown):
        changed = ", ".join(change.what for change in changes if since <= change.step < row.step)
        since = row.step
        rows.append((str(row.step), f"{row.loss:.4g}", format_seconds(row.seconds), shortened(changed, 60)))
    note = f"{len(rows)} of {len(steps)} steps." if len(rows) < len(steps) else ""
    return Table("Loss", ("step", "loss", "time", "changed before"), rows, note)


def loss_scale(losses: Sequence[float]) -> tuple[Scale, list[float]]:
    """Return a scale between two round values, and its marks."""
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    # equal losses get room around them
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-30):
        room = max(0.5 * abs(high), 1e-12) if high else 0.5
        low, high = low - room, high + room
    marks = ticks(low, high, 7)
    pace = marks[1] - marks[0] if len(marks) > 1 else high - low
    # 1e-9: an end that equals a mark up to rounding is that mark
    first, last = math.floor(low / pace + 1e-9), math.ceil(high / pace - 1e-9)
    return Scale(first * pace, last * pace, BOTTOM, TOP), [i * pace for i in range(first, last + 1)]


def draw_loss_axis(y: Scale, marks: Sequence[float], name: str, named: bool) -> Iterator[str]:
    """Draw a rule and a number at every mark, and the axis label."""
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
    """Draw the last finite loss as a dot and a number."""
    if not len(curve.step):
        return
    dot_x, dot_y = x(float(curve.step[-1])), y(float(curve.loss[-1]))
    yield rect(dot_x - 3.5, dot_y - 3.5, 7, 7, fill=BLUE, r=3.5)
    label_y = dot_y - 10 if dot_y > TOP + 20 else dot_y + 20
    anchor, words = "end" if dot_x > LEFT + 80 else "start", f"{curve.loss[-1]:.4g}"
    yield outlined_text(text(min(dot_x + 3, RIGHT - 2), label_y, words, style="strong", anchor=anchor))


def _draw_non_finite(broken: Floats, x: Scale) -> Iterator[str]:
    """Mark steps whose loss is not finite on the axis, with crosses at least `MIN_GAP` apart."""
    xs = sorted({MIN_GAP * round(x(step) / MIN_GAP) for step in broken.tolist()})
    d = "".join(f"M{a - 4:.1f} {BOTTOM - 4}l8 8m0 -8l-8 8" for a in xs)
    if d:
        yield path(d, stroke=VERMILION, width=2)


def _level(y: Scale, name: str, level: float) -> str:
    line = path(f"M{LEFT} {y(level):.1f}H{RIGHT}", style="axis", width=1.5, dash="6 4")
    return line + outlined_text(text(RIGHT - 6, y(level) - 6, f"{name}: {level:.2f}", anchor="end"))


def _legend(curve: LossCurve, points: bool, name: str) -> Iterator[str]:
    faint = ' stroke-opacity=".38"' if curve.window else ""
    entries = [(shortened(name, 24), f'<path d="M0 -4h22" stroke="{BLUE}" stroke-width="2"{faint}/>')]
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
    """Return at most `MAX_POINTS` points, with the last one."""
    return [*points[:: -(-len(points) // MAX_POINTS)][:-1], points[-1]] if len(points) > MAX_POINTS else points


def _describe(
    curve: LossCurve,
    others: Mapping[str, LossCurve],
    points: Sequence[Point],
    levels: Sequence[tuple[str, float]],
    changes: Sequence[Change],
) -> str:
    train = list(zip(curve.step[[0, -1]], curve.loss[[0, -1]], strict=True)) if len(curve.step) else []
    sentences = [
        f"{name}: {line[0][1]:.4g} at step {line[0][0]:g}, {line[-1][1]:.4g} at step {line[-1][0]:g}."
        for name, line in (("Training loss", train), ("Held-out loss", points))
        if line
    ]
    if count := len(curve.non_finite):
        sentences.append(f"Not finite in {count} steps, the first is {curve.non_finite[0]:g}.")
    for name, other in others.items():
        if len(other.step):
            sentences.append(f"Branch {name}: {other.loss[-1]:.4g} at step {other.step[-1]:g}.")
    sentences += [f"{name}: {level:.2f}." for name, level in levels]
    sentences += [f"After step {change.step}: {change.what}." for change in changes[:20]]
    return " ".join(sentences) or "No step yet."
