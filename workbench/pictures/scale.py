"""Linear and logarithmic scales, axis marks and the format of numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

from workbench.readings import format_prefixed as format_prefixed


class Scale(NamedTuple):
    """Linear mapping of values to pixels."""

    low: float  # value at `first`
    high: float  # value at `last`
    first: float  # px
    last: float

    def __call__(self, value: float) -> float:
        """Return the position of `value` in pixels, without clipping; `first` if the range is empty."""
        return self.first + (self.last - self.first) * (value - self.low) / ((self.high - self.low) or 1.0)


class LogScale(NamedTuple):
    """Logarithmic mapping of positive values to pixels."""

    low: float  # value at `first`
    high: float  # value at `last`
    first: float  # px
    last: float

    def __call__(self, value: float) -> float:
        """Return the position of `value` in pixels, without clipping."""
        return self.first + (self.last - self.first) * math.log(value / self.low) / math.log(self.high / self.low)


def log_ticks(low: float, high: float, at_most: int) -> list[float]:
    """Return marks of a logarithmic axis: 1, 2 and 5 times powers of ten, or powers alone."""
    powers = range(math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9) + 1)
    for factors in ((1, 2, 5), (1,)):
        marks = [factor * 10.0**power for power in powers for factor in factors]
        inside = [mark for mark in marks if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)]
        if len(inside) <= at_most:
            return inside
    return inside[:: -(-len(inside) // at_most)]


def ticks(low: float, high: float, at_most: int) -> list[float]:
    """Return at most `at_most` (2 or more) multiples of 1, 2 or 5 * 10**n from `low` to `high`."""
    rough = (high - low) / (at_most - 1)
    if not rough > 0:  # also for NaN
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def round_up(value: float) -> float:
    """Return the next larger round value, one of 1, 1.2, 1.5, ... 8 times a power of ten."""
    if not value > 0:  # also for NaN
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next((step * power for step in steps if step * power >= value * (1 - 1e-9)), 10 * power)


def format_seconds(seconds: float) -> str:
    """Return `seconds` with three digits and the unit s, ms or µs."""
    size = abs(seconds)
    if size >= 0.9995:  # three digits of 999.6 ms would be "1e+03"
        return f"{seconds:.3g} s" if size < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 0.9995e-3 or size == 0 else f"{seconds * 1e6:.3g} µs"
