"""Losses by step as curves: the one of the present branch, and thinner ones of others.

However many steps there are, a curve is drawn from the lowest and the highest loss of every pixel column, so no spike is
lost; with more than a hundred steps a moving mean runs over the faint values themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.scale import Scale
from workbench.pictures.step_axis import LETTER, RIGHT, truncate
from workbench.pictures.svg import outlined_text, rect, text
from workbench.pictures.theme import BLUE, GREEN, ORANGE, PURPLE, SKY

SMOOTH_FROM = 101  # steps
OTHER_STYLES = ((ORANGE, "6 3"), (GREEN, "2 3"), (PURPLE, "8 3 2 3"), (SKY, "4 2"))  # colour and dashes, in turn
MAX_OTHER_POINTS = 250
MIN_NAME_GAP = 13.0  # px, between names of branches one above the other

Floats = NDArray[np.float64]


class HasLoss(Protocol):
    """Has the number and the loss of a finished step."""

    @property
    def step(self) -> int: ...  # from 1

    @property
    def loss(self) -> float: ...


class LossCurve(NamedTuple):
    """Holds finite losses with their steps, and the steps whose loss is not finite."""

    step: Floats
    loss: Floats
    non_finite: Floats

    @staticmethod
    def of(steps: Sequence[HasLoss]) -> LossCurve:
        """Read the losses of steps, which are in order."""
        step = np.fromiter(map(attrgetter("step"), steps), np.float64, len(steps))
        loss = np.fromiter(map(attrgetter("loss"), steps), np.float64, len(steps))
        fine = np.isfinite(loss)
        return LossCurve(step[fine], loss[fine], step[~fine])

    def range(self) -> list[float]:
        """Return the lowest and the highest loss, nothing if there is none."""
        return [float(self.loss.min()), float(self.loss.max())] if len(self.loss) else []

    @property
    def window(self) -> int:
        """Number of steps of the moving mean, 0 without one."""
        return max(9, len(self.loss) // 50) | 1 if len(self.loss) >= SMOOTH_FROM else 0  # odd: as many before as after

    def moving_mean(self) -> Floats:
        """Return (steps,): the mean of `window` steps around each, fewer at the ends."""
        reach = np.arange(len(self.loss))
        first = np.maximum(reach - self.window // 2, 0)
        last = np.minimum(reach + self.window // 2 + 1, len(self.loss))
        sums = np.append(0.0, np.cumsum(self.loss))
        return (sums[last] - sums[first]) / (last - first)


def draw_curve(curve: LossCurve, x: Scale, y: Scale) -> Iterator[str]:
    """Draw the curve, faint under its moving mean if there is one."""
    if len(curve.step) < 2:
        return
    columns = np.floor(x.first + (x.last - x.first) * (curve.step - x.low) / (x.high - x.low)).astype(np.int64)
    firsts = np.flatnonzero(np.append(True, columns[1:] != columns[:-1]))
    if len(firsts) * 2 >= len(columns):  # two steps in a column, or fewer: every loss is drawn
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
    smooth, chosen = curve.moving_mean(), np.append(firsts[::2], len(columns) - 1)
    d = _line([x(s) for s in curve.step[chosen].tolist()], [y(v) for v in smooth[chosen].tolist()])
    yield f'<path d="{d}" fill="none" stroke="{BLUE}" stroke-width="2.2" stroke-linejoin="round"/>'


def draw_others(others: Mapping[str, LossCurve], x: Scale, y: Scale) -> Iterator[str]:
    """Draw other branches, each with its name at its end, and names apart from each other."""
    named: list[tuple[float, float]] = []
    for i, (name, curve) in enumerate(others.items()):
        if not len(curve.step):
            continue
        colour, dashes = OTHER_STYLES[i % len(OTHER_STYLES)]
        chosen = np.linspace(0, len(curve.step) - 1, min(len(curve.step), MAX_OTHER_POINTS)).astype(np.int64)
        losses = curve.moving_mean() if curve.window else curve.loss
        xs, ys = [x(step) for step in curve.step[chosen].tolist()], [y(loss) for loss in losses[chosen].tolist()]
        yield f'<path d="{_line(xs, ys)}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dashes}"/>'
        words = truncate(name, 24)
        anchor, at = ("end", xs[-1]) if xs[-1] > RIGHT - LETTER * len(words) - 8 else ("start", xs[-1] + 5)
        over = ys[-1] - 7 if anchor == "end" else ys[-1] + 4
        while any(abs(at - left) < 160 and abs(over - other) < MIN_NAME_GAP for left, other in named):
            over += MIN_NAME_GAP
        named.append((at, over))
        yield rect(xs[-1] - 2.5, ys[-1] - 2.5, 5, 5, fill=colour, r=2.5)
        yield outlined_text(text(at, over, words, style="small", anchor=anchor))


def _line(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
