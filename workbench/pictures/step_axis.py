"""Axes shared by several pictures: seconds, steps, and the marks of changes between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale, format_seconds, ticks
from workbench.pictures.svg import PAGE, path, text
from workbench.session import Change

WIDTH, LEFT, RIGHT = 960, 96, 944
MIN_GAP = 4.0  # px, between marks
LETTER = 6.2  # px, maximum width of a small letter


def steps_scale(seen: Sequence[float], changes: Sequence[Change] = ()) -> Scale:
    """Return a scale for these steps and changes, with half a step of room after the last."""
    first, last = min(seen, default=0.0), max([*seen, *(change.step for change in changes)], default=1.0)
    # not from 0 if more than a fifth of the axis would be empty, as in a resumed run
    low = 0.0 if first <= max(last / 5, 1.0) else first - 1.0
    return Scale(low, max(last + 0.5, low + 10.0), LEFT, RIGHT)  # at least 10 steps, so that it is stable at first


def time_marks(time: Scale, at_most: int) -> list[float]:
    """Return at most `at_most` marks of an axis of seconds, so few that their labels do not touch."""
    while True:
        marks = ticks(time.low, time.high, at_most)
        spans = [_label_span(time, mark) for mark in marks]
        if at_most <= 2 or all(left[1] + LETTER <= right[0] for left, right in pairwise(spans)):
            return marks
        at_most -= 1


def draw_time_axis(time: Scale, y: float, at_most: int, style: str = "") -> Iterator[str]:
    """Draw an axis of seconds with at most `at_most` marks and their labels."""
    marks = time_marks(time, at_most)
    lines = "".join(f"M{time(mark):.1f} {y:g}v5" for mark in marks)
    yield path(f"M{time.first:g} {y:g}H{time.last:g}{lines}", style="axis")
    for mark in marks:
        anchor = "end" if _is_at_end(time, mark) else "middle"
        yield text(time(mark), y + 18, _time_label(mark), style=style, anchor=anchor)


def _time_label(mark: float) -> str:
    return format_seconds(mark) if mark else "0"


def _is_at_end(time: Scale, mark: float) -> bool:
    return time(mark) > time.last - 20


def _label_span(time: Scale, mark: float) -> tuple[float, float]:
    """Return the left and right end of a label, in px."""
    at, width = time(mark), LETTER * len(_time_label(mark))
    return (at - width, at) if _is_at_end(time, mark) else (at - width / 2, at + width / 2)


def draw_steps_axis(x: Scale, top: float, bottom: float) -> Iterator[str]:
    """Draw lines on the left and at the bottom, with numbers of steps."""
    steps = [step for step in ticks(x.low, math.floor(x.high), 11) if step == int(step)]
    marks = "".join(f"M{x(step):.1f} {bottom:g}v5" for step in steps)
    yield path(f"M{LEFT} {top:g}V{bottom:g}H{RIGHT}{marks}", style="axis")
    for step in steps:
        anchor = "end" if x(step) > RIGHT - 14 else "middle"
        yield text(x(step), bottom + 19, f"{step:.0f}", style="small dim", anchor=anchor)
    yield text((LEFT + RIGHT) / 2, bottom + 38, "step", style="dim", anchor="middle")


def draw_changes(
    changes: Sequence[Change],
    scale: Callable[[float], float],
    top: float,
    bottom: float,
    baselines: Sequence[float],
    outlined: bool = False,
) -> Iterator[str]:
    """Draw a dashed line at each change, with a label in the first row with room for it.

    Changes after the same step share a line, and lines are at least `MIN_GAP` apart. `scale` maps steps to px; `outlined`
    separates the lines from colours behind them.
    """
    by_step: dict[int, list[str]] = {}
    for change in changes:
        by_step.setdefault(change.step, []).append(change.what)
    lines, labels, previous, free = "", [], -math.inf, [0.0] * len(baselines)
    for step, what in sorted(by_step.items()):
        x, words = min(max(scale(step + 0.5), LEFT), RIGHT), shortened(", ".join(what), 34)
        if x >= previous + MIN_GAP:
            lines += f"M{x:.1f} {top:g}V{bottom:g}"
            previous = x
        width = LETTER * len(words)
        left = min(x, RIGHT - width)
        row = next((row for row, end in enumerate(free) if left >= end), None)
        if row is not None:
            labels.append(text(left, baselines[row], words, style="small"))
            free[row] = left + width + 10
    if lines and outlined:
        yield f'<g opacity=".6">{path(lines, stroke=PAGE, width=3)}</g>'
    if lines:
        yield path(lines, style="axis", dash="3 4")
    yield from labels
