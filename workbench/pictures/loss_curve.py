"""Loss curves of the active branch and, thinner, of other branches.

A curve is drawn from the lowest and the highest loss of every pixel column, so that no spike is lost. From `SMOOTH_FROM`
steps on, a moving mean is drawn over the faint values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale
from workbench.pictures.step_axis import LETTER
from workbench.pictures.svg import outlined_text, polyline, rect, text
from workbench.pictures.theme import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

SMOOTH_FROM = 41  # steps
OTHER_STYLES = ((ORANGE, "6 3"), (GREEN, "2 3"), (PURPLE, "8 3 2 3"), (SKY, "4 2"))  # colour and dashes
MAX_OTHER_POINTS, MAX_POINTS = 250, 200  # of another branch, and of held-out values
MIN_NAME_GAP = 13.0  # px, vertically between names of branches

Floats = NDArray[np.float64]
ValueScale = Callable[[float], float]  # `Scale` or `LogScale`


class HasLoss(Protocol):
    """Number and loss of a finished step."""

    @property
    def step(self) -> int: ...  # from 1

    @property
    def loss(self) -> float: ...


class LossCurve(NamedTuple):
    """Finite values of steps with their positions on the axis, and the positions of those that are not finite."""

    step: Floats
    loss: Floats
    non_finite: Floats
    smooths: bool = True  # whether a moving mean is drawn

    @staticmethod
    def of(step: Floats, loss: Floats, smooths: bool = True) -> LossCurve:
        """Return the curve of values at ascending positions."""
        finite = np.isfinite(loss)
        return LossCurve(step[finite], loss[finite], step[~finite], smooths)

    def range(self) -> list[float]:
        """Return the lowest and the highest loss; empty without losses."""
        return [float(self.loss.min()), float(self.loss.max())] if len(self.loss) else []

    @property
    def window(self) -> int:
        """Number of steps of the moving mean, odd; 0 without one."""
        return max(9, len(self.loss) // 50) | 1 if self.smooths and len(self.loss) >= SMOOTH_FROM else 0

    @property
    def drawn(self) -> Floats:
        """The moving mean, or the values if there is none."""
        return self.moving_mean() if self.window else self.loss

    def moving_mean(self) -> Floats:
        """Return (steps,): the mean of `window` steps around each, fewer at the ends."""
        centre = np.arange(len(self.loss))
        first = np.maximum(centre - self.window // 2, 0)
        last = np.minimum(centre + self.window // 2 + 1, len(self.loss))
        sums = np.append(0.0, np.cumsum(self.loss))
        return (sums[last] - sums[first]) / (last - first)


def draw_curve(curve: LossCurve, x: Scale, y: ValueScale, faint: bool = False) -> Iterator[str]:
    """Draw the curve, faint below its moving mean if there is one, or below other curves."""
    if len(curve.step) < 2:
        return
    columns = np.floor(x.first + (x.last - x.first) * (curve.step - x.low) / (x.high - x.low)).astype(np.int64)
    firsts = np.flatnonzero(np.append(True, columns[1:] != columns[:-1]))
    if len(firsts) * 2 >= len(columns):  # at most two steps per column: draw every loss
        d = polyline(zip(map(x, curve.step.tolist()), map(y, curve.loss.tolist()), strict=True))
    else:
        lows, highs = (map(y, each.reduceat(curve.loss, firsts).tolist()) for each in (np.minimum, np.maximum))
        spans = zip(columns[firsts].tolist(), lows, highs, strict=True)
        d = "M" + "L".join(f"{column} {low:.1f}V{high:.1f}" for column, low, high in spans)
    if not curve.window:
        shade = ' stroke-opacity=".5"' if faint else ""
        yield f'<path d="{d}" fill="none" stroke="{BLUE}"{shade} stroke-width="1.8" stroke-linejoin="round"/>'
        return
    yield f'<path d="{d}" fill="none" stroke="{BLUE}" stroke-opacity=".5"/>'
    smooth, chosen = curve.moving_mean(), np.append(firsts[::2], len(columns) - 1)
    d = polyline(zip(map(x, curve.step[chosen].tolist()), map(y, smooth[chosen].tolist()), strict=True))
    yield f'<path d="{d}" fill="none" stroke="{BLUE}" stroke-width="{1.6 if faint else 2.2}" stroke-linejoin="round"/>'


def other_colour(i: int) -> str:
    """Return the colour of the i-th other branch."""
    return OTHER_STYLES[i % len(OTHER_STYLES)][0]


class LineEnd(NamedTuple):
    """The end of a line, with its name."""

    name: str
    x: float  # px
    y: float
    colour: str


def ends_of(curves: Mapping[str, LossCurve], colours: Mapping[str, str], x: Scale, y: ValueScale) -> list[LineEnd]:
    """Return the ends of lines as `draw_curve` and `draw_others` draw them; none of a curve without values."""
    return [
        LineEnd(name, x(float(curve.step[-1])), y(float(curve.drawn[-1])), colours[name])
        for name, curve in curves.items()
        if len(curve.step)
    ]


def draw_names(ends: Sequence[LineEnd], right: float, bottom: float) -> Iterator[str]:
    """Draw names of lines at their ends, in their colours, without overlaps, left of `right` and above `bottom`."""
    named: list[tuple[float, float, float]] = []  # left and right end, baseline
    for end in sorted(ends, key=lambda each: each.y):
        words = shortened(end.name, 24)
        width = LETTER * len(words)
        fits = end.x + 8 + width <= right
        left = end.x + 8 if fits else end.x - width
        baseline = end.y + 4 if fits else end.y - 9
        beside = [other for start, stop, other in named if left < stop and start < left + width]
        down = _free(baseline, beside, MIN_NAME_GAP)
        baseline = down if down <= bottom - 3 else _free(bottom - 3, beside, -MIN_NAME_GAP)
        named.append((left, left + width, baseline))
        at = left if fits else end.x
        name = text(at, baseline, words, style="small", anchor="start" if fits else "end", fill=end.colour, strong=True)
        yield outlined_text(name)


def _free(baseline: float, taken: Sequence[float], pace: float) -> float:
    """Return the first baseline on the way by `pace` that is far enough from those taken."""
    while any(abs(baseline - other) < MIN_NAME_GAP - 0.01 for other in taken):
        baseline += pace / 4
    return baseline


def draw_others(others: Mapping[str, LossCurve], x: Scale, y: ValueScale) -> Iterator[str]:
    """Draw other branches as thin dashed lines; `ends_of` has the places of their names."""
    for i, curve in enumerate(others.values()):
        if not len(curve.step):
            continue
        colour, dashes = OTHER_STYLES[i % len(OTHER_STYLES)]
        chosen = np.linspace(0, len(curve.step) - 1, min(len(curve.step), MAX_OTHER_POINTS)).astype(np.int64)
        points = list(zip(map(x, curve.step[chosen].tolist()), map(y, curve.drawn[chosen].tolist()), strict=True))
        line, style = polyline(points), f'stroke-width="1.6" stroke-dasharray="{dashes}"'
        yield f'<path d="{line}" fill="none" stroke="{colour}" {style}/>'
        end_x, end_y = points[-1]
        yield rect(end_x - 2.5, end_y - 2.5, 5, 5, fill=colour, r=2.5)


def draw_held_out(points: Sequence[tuple[float, float]], x: Scale, y: ValueScale) -> Iterator[str]:
    """Draw a bold line and dots through at most `MAX_POINTS` values on held-out data."""
    if len(points) > MAX_POINTS:
        points = [*points[:: -(-len(points) // MAX_POINTS)][:-1], points[-1]]
    places = [(x(at), y(value)) for at, value in points]
    if len(places) > 1:
        d = polyline(places)
        yield f'<path d="{d}" fill="none" stroke="{VERMILION}" stroke-width="3" stroke-linejoin="round"/>'
    for px, py in places:
        yield held_out_dot(px, py, 4 if len(places) <= 60 else 2)


def held_out_dot(x: float, y: float, r: float = 4) -> str:
    """Return the dot of a value on held-out data."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" fill="{VERMILION}"/>'
