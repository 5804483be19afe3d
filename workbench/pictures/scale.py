"""From values to pixels: linear scales, round marks on an axis, numbers for people."""

from __future__ import annotations

import math
from typing import NamedTuple


class Scale(NamedTuple):
    """Maps values to pixels, linearly."""

    low: float  # value at `first`
    high: float  # value at `last`
    first: float  # px
    last: float

    def __call__(self, value: float) -> float:
        """Return where `value` lies, in pixels; values outside lie outside."""
        # of an empty range every value lies at `first`
        return self.first + (self.last - self.first) * (value - self.low) / ((self.high - self.low) or 1.0)


def ticks(low: float, high: float, at_most: int) -> list[float]:
    """Return round values from `low` to `high`, in steps of 1, 2 or 5 times a power of ten, `at_most` of them (2 or more)."""
    rough = (high - low) / (at_most - 1)
    if not rough > 0:  # not `<=`: NaN ends here as well
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def round_up(value: float) -> float:
    """Return the next of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten: the end of an axis that should not jump."""
    if not value > 0:  # NaN as well
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next((step * power for step in steps if step * power >= value * (1 - 1e-9)), 10 * power)


def format_seconds(seconds: float) -> str:
    """Write `seconds` for people: three digits with s, ms or µs."""
    size = abs(seconds)
    if size >= 0.9995:  # three digits of 999.6 ms would be "1e+03"
        return f"{seconds:.3g} s" if size < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 0.9995e-3 or size == 0 else f"{seconds * 1e6:.3g} µs"
