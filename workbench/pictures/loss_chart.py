"""Loss over training: the curves of steps, held-out data and other branches, with levels and changes.

The held-out curve is bold and the training loss faint with a moving mean. In its place, the chart shows another value of
the steps or a metric, and any of the axes of `amount_axis.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from workbench.pictures.amount_axis import AXIS_TITLES, StepAmounts, TrainingAxis, draw_amount_axis
from workbench.pictures.loss_curve import (
    Floats,
    HasLoss,
    LossCurve,
    ValueScale,
    draw_curve,
    draw_held_out,
    draw_names,
    draw_others,
    ends_of,
    held_out_dot,
    other_colour,
)
from workbench.pictures.loss_details import draw_epochs, draw_hover_strips
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import LogScale, Scale, log_ticks, ticks
from workbench.pictures.step_axis import LEFT, MIN_GAP, RIGHT, WIDTH, draw_changes, draw_steps_axis, steps_scale
from workbench.pictures.svg import document, group, outlined_text, path, rect, text
from workbench.pictures.theme import BLUE, VERMILION
from workbench.session import LOSS, Change, HeldOutRow

HEIGHT, TOP, BOTTOM = 336, 66, 288
LABEL_ROWS = (36.0, 47.5, 59.0)  # px, baselines of the labels of changes
MAX_OTHERS = 8  # maximum number of other branches
METRIC = "held_out/"  # prefix of the values that are measured on held-out data alone

Point = tuple[float, float]  # step, value


class LossView(NamedTuple):
    """Choices of a loss chart.

    Attributes:
        shown: "loss", "lr" (learning rate), "speed" (tokens or rows per second), or "held_out/" and the name of a metric.
        axis: horizontal axis.
        log: logarithmic scale, if all values are positive.
    """

    shown: str = LOSS
    axis: TrainingAxis = "steps"
    log: bool = False

    @property
    def metric(self) -> str:
        """The held-out value that is drawn; "" if there is none."""
        return self.shown.removeprefix(METRIC) if self.shown.startswith(METRIC) else LOSS if self.shown == LOSS else ""


_STEP_VALUES: Mapping[str, Callable[[Any], float | None]] = {
    LOSS: lambda row: row.loss,
    "lr": lambda row: row.lr,
    "speed": lambda row: row.per_s,
}
_VALUE_TITLES = {"lr": "learning rate", "speed": "{unit} per second"}


def held_out_points(rows: Sequence[HeldOutRow], metric: str = LOSS) -> list[Point]:
    """Return steps and values of measurements on held-out data."""
    return [(row.step, row.values[metric]) for row in rows if metric in row.values]


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
    view: LossView = LossView(),  # noqa: B008 - immutable
) -> str:
    """Draw the loss, or another value, over training, as an SVG.

    Args:
        steps: finished steps, in order; losses that are not finite are marked on the axis. All but the default view needs
            `StepRow`s.
        changes: drawn as dashed vertical lines, labelled where there is room.
        title: title above the plot.
        held_out: steps and held-out values, drawn as a bold line.
        levels: names and losses, drawn as dashed lines.
        unit: unit of the loss.
        branch: branch of `steps`, named in the legend if there are others.
        others: steps of other branches since they split off, by name, drawn as thin dashed lines; at most eight.
        view: value, axis and scale.
    """
    amounts = StepAmounts(steps, view.axis)
    curve = _curve_of(steps, amounts, view.shown)
    branches = {
        name: _curve_of(rows, StepAmounts(rows, view.axis, amounts(rows[0].step - 1) if rows else 0.0), view.shown)
        for name, rows in list((others or {}).items())[:MAX_OTHERS]
    }
    points = [(step, value) for step, value in held_out if math.isfinite(value)]
    curves = [curve, *branches.values()]
    values = [*(value for one in curves for value in one.range()), *(value for _, value in points)]
    values += [level for _, level in levels]
    arrays = [places for one in curves for places in (one.step, one.non_finite) if len(places)]
    ends = [float(end) for places in arrays for end in (places[0], places[-1])]
    places = [(amounts(step), value) for step, value in points]
    x = _axis_scale([*ends, *(place for place, _ in places)], changes, view.axis)
    y, marks = _value_scale(values, view.log)
    at_step = lambda step: x(amounts(step))  # noqa: E731
    parts = [
        text(LEFT, 20, title, style="strong") if title else "",
        *draw_loss_axis(y, marks, _value_title(view, steps, unit), named=bool(values)),
        *_draw_axis(x, view.axis, steps),
        *draw_epochs(steps, at_step, TOP, BOTTOM),
        *draw_changes(changes, at_step, TOP - 5, BOTTOM, LABEL_ROWS),
        *(_level(y, name, level) for name, level in levels),
        *draw_others(branches, x, y),
        *draw_names(ends_of(branches, {name: other_colour(i) for i, name in enumerate(branches)}, x, y), RIGHT, BOTTOM),
        *draw_curve(curve, x, y, faint=bool(points)),
        *draw_held_out(places, x, y),
        *_draw_non_finite(curve.non_finite, x),
        *_legend(curve, points, branch if branches and branch else "training"),
        *_draw_last(curve, places, x, y),
        *draw_hover_strips(steps, points, view.metric, at_step, TOP, BOTTOM),
    ]
    if not len(curve.step) and not len(curve.non_finite) and not points:
        words = "no step yet" if not steps else "not measured yet"
        parts.append(text((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, words, style="dim", anchor="middle"))
    return document(WIDTH, HEIGHT, title or "Loss", _describe(curve, branches, view, points, levels, changes), parts)


def _curve_of(steps: Sequence[HasLoss], amounts: StepAmounts, shown: str) -> LossCurve:
    value_of = _STEP_VALUES.get(shown)
    if value_of is None:  # a metric, of held-out data alone
        return LossCurve.of(np.empty(0), np.empty(0))
    values = [value_of(row) for row in steps]
    known = np.array([value is not None for value in values], bool)
    return LossCurve.of(amounts.of_rows[known], np.array(values, np.float64)[known], smooths=shown != "lr")


def _axis_scale(ends: Sequence[float], changes: Sequence[Change], axis: TrainingAxis) -> Scale:
    return steps_scale(ends, changes) if axis == "steps" else Scale(0.0, max(ends, default=0.0) or 1.0, LEFT, RIGHT)


def _draw_axis(x: Scale, axis: TrainingAxis, steps: Sequence[Any]) -> Iterator[str]:
    if axis == "steps":
        return draw_steps_axis(x, TOP, BOTTOM)
    title = steps[-1].unit if axis == "tokens" and steps else AXIS_TITLES[axis]
    return draw_amount_axis(x, axis, title, TOP, BOTTOM)


def _value_title(view: LossView, steps: Sequence[Any], unit: str) -> str:
    if view.shown in _VALUE_TITLES:
        return _VALUE_TITLES[view.shown].format(unit=steps[-1].unit if steps else "rows")
    return f"{view.metric} ({unit})" if unit else view.metric


def _value_scale(values: Sequence[float], log: bool) -> tuple[ValueScale, list[float]]:
    """Return a scale and its marks; linear if a value is not positive."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if not log or not 0 < low < high * (1 - 1e-9):
        return loss_scale(values)
    marks = log_ticks(low, high, 9)
    return LogScale(low, high, BOTTOM, TOP), marks if len(marks) > 2 else ticks(low, high, 7)


def loss_scale(values: Sequence[float]) -> tuple[Scale, list[float]]:
    """Return a scale between two round values, and its marks."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    # equal values get room around them
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-30):
        room = max(0.5 * abs(high), 1e-12) if high else 0.5
        low, high = low - room, high + room
    marks = ticks(low, high, 7)
    pace = marks[1] - marks[0] if len(marks) > 1 else high - low
    # 1e-9: an end that equals a mark up to rounding is that mark
    first, last = math.floor(low / pace + 1e-9), math.ceil(high / pace - 1e-9)
    return Scale(first * pace, last * pace, BOTTOM, TOP), [i * pace for i in range(first, last + 1)]


def draw_loss_axis(y: ValueScale, marks: Sequence[float], name: str, named: bool) -> Iterator[str]:
    """Draw a rule and a number at every mark, and the axis label."""
    smallest = min((b - a for a, b in pairwise(marks)), default=1.0)
    digits = max(0, -math.floor(math.log10(smallest) + 1e-9))
    is_even = len(marks) < 2 or abs((marks[-1] - marks[0]) / (len(marks) - 1) - smallest) < 1e-6 * smallest
    yield path("".join(f"M{LEFT} {y(mark):.1f}H{RIGHT}" for mark in marks), style="rule")
    for mark in marks if named else ():
        shown = f"{mark:.{digits}f}" if is_even and digits <= 4 and abs(mark) < 1e6 else f"{mark:.3g}"
        yield text(LEFT - 8, y(mark) + 4, shown, style="small dim", anchor="end")
    yield (
        f'<text x="24" y="{(TOP + BOTTOM) / 2:g}" text-anchor="middle" class="dim" '
        f'transform="rotate(-90 24 {(TOP + BOTTOM) / 2:g})">{escape(name)}</text>'
    )


def _draw_last(curve: LossCurve, places: Sequence[Point], x: Scale, y: ValueScale) -> Iterator[str]:
    """Draw the last values of the steps, with a dot, and of held-out data as numbers."""
    drawn = [(float(curve.step[-1]), float(curve.loss[-1]), BLUE)] if len(curve.step) else []
    drawn += [(*places[-1], VERMILION)] if places else []
    labels = [[x(at), y(value) - 10 if y(value) > TOP + 20 else y(value) + 20] for at, value, _ in drawn]
    if len(labels) == 2 and abs(labels[0][1] - labels[1][1]) < 16:  # both are at the right end
        lower = 0 if y(drawn[0][1]) >= y(drawn[1][1]) else 1
        labels[lower][1] = max(labels[1 - lower][1] + 16, y(drawn[lower][1]) + 20)
    for (at, value, colour), (label_x, label_y) in zip(drawn, labels, strict=True):
        if colour == BLUE:
            yield rect(x(at) - 3.5, y(value) - 3.5, 7, 7, fill=BLUE, r=3.5)
        anchor = "end" if label_x > LEFT + 80 else "start"
        words = f"{value:.4g}" if colour == BLUE else f"held out {value:.4g}"
        label = text(min(label_x + 3, RIGHT - 2), label_y, words, style="strong", anchor=anchor)
        yield outlined_text(label)


def _draw_non_finite(broken: Floats, x: Scale) -> Iterator[str]:
    """Mark steps whose loss is not finite on the axis, with crosses at least `MIN_GAP` apart."""
    xs = sorted({MIN_GAP * round(x(step) / MIN_GAP) for step in broken.tolist()})
    d = "".join(f"M{a - 4:.1f} {BOTTOM - 4}l8 8m0 -8l-8 8" for a in xs)
    if d:
        yield path(d, stroke=VERMILION, width=2)


def _level(y: ValueScale, name: str, level: float) -> str:
    line = path(f"M{LEFT} {y(level):.1f}H{RIGHT}", style="axis", width=1.5, dash="6 4")
    return line + outlined_text(text(RIGHT - 6, y(level) - 6, f"{name}: {level:.2f}", anchor="end"))


def _legend(curve: LossCurve, points: Sequence[Point], name: str) -> Iterator[str]:
    faint = ' stroke-opacity=".5"' if curve.window or points else ""
    entries = []
    if len(curve.step) or len(curve.non_finite) or not points:
        entries.append((shortened(name, 24), f'<path d="M0 -4h22" stroke="{BLUE}" stroke-width="2"{faint}/>'))
    if curve.window:
        entries.append((f"mean of {curve.window}", f'<path d="M0 -4h22" stroke="{BLUE}" stroke-width="2.2"/>'))
    if points:
        line = f'<path d="M0 -4h26" stroke="{VERMILION}" stroke-width="3"/>'
        entries.append(("held out", line + held_out_dot(13, -4)))
    if len(curve.non_finite):
        entries.append(("not finite", path("M10 -8l8 8m0 -8l-8 8", stroke=VERMILION, width=2)))
    x = RIGHT + 20 - sum(48 + 6.8 * len(name) for name, _ in entries)
    for name, mark in entries:
        yield group([mark, text(28, 0, name)], transform=f"translate({x:.1f} 20)")
        x += 48 + 6.8 * len(name)


def _describe(
    curve: LossCurve,
    others: Mapping[str, LossCurve],
    view: LossView,
    points: Sequence[Point],
    levels: Sequence[tuple[str, float]],
    changes: Sequence[Change],
) -> str:
    train = list(zip(curve.step[[0, -1]], curve.loss[[0, -1]], strict=True)) if len(curve.step) else []
    where = "step" if view.axis == "steps" else AXIS_TITLES[view.axis]
    own = "Training loss" if view.shown == LOSS else view.shown
    sentences = [
        f"{name}: {line[0][1]:.4g} at {at} {line[0][0]:g}, {line[-1][1]:.4g} at {at} {line[-1][0]:g}."
        for name, line, at in ((own, train, where), (f"Held-out {view.metric}", points, "step"))
        if line
    ]
    if count := len(curve.non_finite):
        sentences.append(f"Not finite in {count} steps, the first is {curve.non_finite[0]:g}.")
    for name, other in others.items():
        if len(other.step):
            sentences.append(f"Branch {name}: {other.loss[-1]:.4g} at {where} {other.step[-1]:g}.")
    sentences += [f"{name}: {level:.2f}." for name, level in levels]
    sentences += [f"After step {change.step}: {change.what}." for change in changes[:20]]
    return " ".join(sentences) or "No step yet."
