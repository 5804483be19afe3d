"""Colour maps of figures: scales, palettes, the colour bar, and the format of figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.png import Colour, write_png
from workbench.pictures.scale import round_up, ticks
from workbench.pictures.svg import image, path, text
from workbench.pictures.theme import LITTLE_TO_MUCH, VERMILION

SHADES = 64
NO_VALUE, NOT_FINITE = 0, SHADES + 1  # palette indices; the shades are 1 to SHADES
_OUTSIDE = 0.5  # percent of the figures that may lie beyond either end, so that an outlier does not flatten the scale


class FigureKind(NamedTuple):
    """Display settings of a figure of layers.

    Attributes:
        label: name of the figure.
        logarithmic: True if equal shades are equal factors.
        aggregate: value of a row of several layers: "largest" or "mean".
        usual: usual range, as a rule of thumb; None if there is none.
    """

    label: str
    logarithmic: bool
    aggregate: str
    usual: tuple[float, float] | None = None


class ColourScale(NamedTuple):
    """Mapping of figures to shades, from `low`, the first shade, to `high`, the last one."""

    low: float
    high: float
    logarithmic: bool
    clipped_below: bool  # some figures lie below `low`
    clipped_above: bool

    @staticmethod
    def of(values: NDArray[np.float32], kind: FigureKind) -> ColourScale:
        """Return a scale with round ends around the finite values."""
        finite = values[np.isfinite(values)].astype(np.float64)
        if kind.logarithmic:
            low, high = _round_ends(finite[finite > 0], kind.usual)
        else:
            low, high = (
                0.0,
                round_up((1 - 1e-6) * _central_range(finite)[1] if len(finite) else 0.0),
            )  # float32 rounding
        return ColourScale(low, high, kind.logarithmic, bool((finite < low).any()), bool((finite > high).any()))

    def position(self, values: NDArray | float) -> NDArray:
        """Return the positions of values between the ends, clipped to [0, 1]; NaN stays NaN."""
        exact, low, high = np.asarray(values, np.float64), self.low, self.high
        if self.logarithmic:
            exact, low, high = np.log10(np.maximum(exact, low)), math.log10(low), math.log10(high)
        return np.clip((exact - low) / (high - low), 0.0, 1.0)

    def pixels(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the palette index of each value, in the shape of `values`."""
        finite = np.isfinite(values)
        # Casting NaN to an integer warns; `high` itself belongs to the last shade.
        shade = 1 + np.minimum(SHADES * self.position(np.where(finite, values, self.low)), SHADES - 1).astype(np.uint8)
        return np.where(finite, shade, np.where(np.isinf(values), NOT_FINITE, NO_VALUE)).astype(np.uint8)


def palette() -> list[Colour]:
    """Return the colours: transparent, the shades from low to high, and the colour of values that are not finite."""
    stops = np.array([rgb(colour) for colour in LITTLE_TO_MUCH], np.float64)
    at = np.linspace(0, len(stops) - 1, SHADES)
    red, green, blue = (
        np.interp(at, np.arange(len(stops)), stops[:, i]).round().astype(int).tolist() for i in range(3)
    )
    shades = [(r, g, b, 255) for r, g, b in zip(red, green, blue, strict=True)]
    return [(0, 0, 0, 0), *shades, (*rgb(VERMILION), 255)]


def draw_colour_bar(shades: ColourScale, kind: FigureKind, left: float, right: float, y: float) -> Iterator[str]:
    """Draw the shades from left to right, with values below them and the usual range above."""

    def x(value: float) -> float:
        return left + (right - left) * float(shades.position(value))

    yield image(left, y, right - left, 9, write_png(np.arange(1, SHADES + 1, dtype=np.uint8)[None], palette()))
    if kind.usual is not None:
        low, high = map(x, kind.usual)
        yield path(f"M{low:.1f} {y - 1:g}v-4H{high:.1f}v4", style="axis")
        yield text((low + high) / 2, y - 8, "usual", style="small dim", anchor="middle")
    marks = scale_marks(shades, right - left)
    yield path("".join(f"M{x(mark):.1f} {y + 9:g}v4" for mark in marks), style="axis")
    for mark in marks:
        sign = "≤ " if mark == shades.low and shades.clipped_below else ""
        sign = "≥ " if mark == shades.high and shades.clipped_above else sign
        yield text(x(mark), y + 23, sign + format_figure(mark), style="small dim", anchor="middle")


def scale_marks(shades: ColourScale, width: float) -> list[float]:
    """Return both ends, and round values between them that have room for a label."""
    if shades.logarithmic:
        first, last = math.floor(math.log10(shades.low)), math.ceil(math.log10(shades.high))
        inside = [10.0**power for power in range(first, last + 1)]
        if math.log10(shades.high / shades.low) < 2:
            inside = sorted(factor * power for power in inside for factor in (1, 2, 5))
    else:
        inside = ticks(shades.low, shades.high, 5)
    marks = [shades.low, shades.high]
    for mark in inside:
        distances = [abs(float(shades.position(mark)) - float(shades.position(other))) * width for other in marks]
        if shades.low < mark < shades.high and min(distances) >= 36:
            marks.append(mark)
    return sorted(marks)


def format_figure(figure: float | None) -> str:
    """Return a figure with at most three digits: 0.0123, 3.2e-4, 1.5e6; None as a dash."""
    if figure is None:
        return "–"
    if figure == 0 or not math.isfinite(figure) or 1e-2 <= abs(figure) < 1e4:
        return f"{figure:.3g}"
    digits, power = f"{figure:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _round_ends(values: NDArray[np.float64], usual: tuple[float, float] | None) -> tuple[float, float]:
    """Return ends of 1, 2 or 5 times a power of ten around nearly all values and the usual range."""
    low, high = _central_range(values) if len(values) else usual or (1e-3, 1.0)
    if usual is not None:
        low, high = min(low, 0.6 * usual[0]), max(high, 1.7 * usual[1])
    low, high = _floor(low), _ceil(high)
    return (low, high) if high >= 4 * low else (_floor(0.6 * low), _ceil(1.7 * high))


def _central_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the lowest and the highest value without outliers; fewer than 200 values have none."""
    low = np.percentile(values, _OUTSIDE, method="lower")  # an actual value, not an interpolated one
    return float(low), float(np.percentile(values, 100 - _OUTSIDE, method="higher"))


def _floor(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return next(factor * power for factor in (5, 2, 1) if factor * power <= value * (1 + 1e-6))


def _ceil(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) - 1e-9)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-6))


def rgb(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of "#rrggbb", from 0 to 255."""
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue
