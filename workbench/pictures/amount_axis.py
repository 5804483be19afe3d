"""Horizontal axes of curves over training: steps, tokens or rows, seconds, and floating-point operations.

Rows and changes are numbered by step. `StepAmounts` converts a step to the amount that was spent up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from workbench.pictures.scale import Scale, format_prefixed, ticks
from workbench.pictures.step_axis import LEFT, RIGHT
from workbench.pictures.svg import path, text
from workbench.session import StepRow

TrainingAxis = Literal["steps", "tokens", "seconds", "flop"]

AXIS_TITLES: Mapping[TrainingAxis, str] = {
    "steps": "step",
    "tokens": "tokens",
    "seconds": "seconds of the steps",
    "flop": "compute (FLOP)",
}
_SPENT: Mapping[TrainingAxis, Callable[[Any], float]] = {
    "tokens": lambda row: max(row.tokens, row.samples),
    "seconds": lambda row: row.seconds,
    "flop": lambda row: row.flop,
}


def axis_options(steps: Sequence[StepRow]) -> list[tuple[str, TrainingAxis]]:
    """Return the axes over which these steps can be drawn, with their labels."""
    has_flop = bool(steps) and all(row.flop for row in (steps[0], steps[-1]))
    return [
        ("steps", "steps"),
        (steps[-1].unit if steps else "rows", "tokens"),
        ("seconds", "seconds"),
        *([("FLOP", "flop")] if has_flop else []),
    ]


class StepAmounts:
    """Amounts that were spent up to each step of a branch; linear between steps.

    Args:
        steps: finished steps, in order.
        axis: kind of the amount.
        start: amount before the first of them.

    Attributes:
        of_rows: (steps,), the amount after each step.
    """

    def __init__(self, steps: Sequence[Any], axis: TrainingAxis, start: float = 0.0) -> None:
        numbers = np.fromiter((row.step for row in steps), np.float64, len(steps))
        self._is_step = axis == "steps"
        if self._is_step:
            self.of_rows: NDArray[np.float64] = numbers
            return
        spent = np.fromiter(map(_SPENT[axis], steps), np.float64, len(steps))
        self.of_rows = start + np.cumsum(spent)
        first = numbers[0] - 1 if len(numbers) else 0.0
        self._steps, self._amounts = np.append(first, numbers), np.append(start, self.of_rows)

    def __call__(self, step: float) -> float:
        """Return the amount after a number of steps, which need not be an integer."""
        return float(step) if self._is_step else float(np.interp(step, self._steps, self._amounts))


def draw_amount_axis(x: Scale, axis: TrainingAxis, title: str, top: float, bottom: float) -> Iterator[str]:
    """Draw lines on the left and at the bottom, with marks, numbers and a title."""
    marks = [mark for mark in ticks(x.low, x.high, 9) if axis != "steps" or mark == int(mark)]
    yield path(
        f"M{LEFT} {top:g}V{bottom:g}H{RIGHT}" + "".join(f"M{x(mark):.1f} {bottom:g}v5" for mark in marks), style="axis"
    )
    for mark in marks:
        words = {"steps": f"{mark:.0f}", "seconds": f"{mark:.4g}"}.get(axis, format_prefixed(mark).strip())
        anchor = "end" if x(mark) > RIGHT - 14 else "middle"
        yield text(x(mark), bottom + 19, words, style="small dim", anchor=anchor)
    yield text((LEFT + RIGHT) / 2, bottom + 38, title, style="dim", anchor="middle")
