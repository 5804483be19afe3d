"""The axis of steps that the loss and the heat map share, so that they line up, and the changes marked on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from workbench.pictures.scale import Scale, ticks
from workbench.pictures.svg import path, text
from workbench.session import Change

WIDTH, LEFT, RIGHT = 960, 96, 944
MIN_GAP = 4.0  # px, between marks
LETTER = 6.2  # px, of a small letter, at most

ChangeMark = tuple[float, str]  # px, what was changed


def steps_scale(seen: Sequence[float], changes: Sequence[Change] = ()) -> Scale:
    """Make a scale from the first of these steps to the last, with room for all of the last: half a step to either side."""
    first, last = min(seen, default=0.0), max([*seen, *(change.step for change in changes)], default=1.0)
    # not from 0 where that would leave a fifth of the axis empty, as in a run that is continued
    low = 0.0 if first <= max(last / 5, 1.0) else first - 1.0
    return Scale(low, max(last + 0.5, low + 10.0), LEFT, RIGHT)  # so that the first steps do not stretch it each


def draw_steps_axis(x: Scale, top: float, bottom: float) -> Iterator[str]:
    """Draw lines on the left and at the bottom, with numbers of steps."""
    steps = [step for step in ticks(x.low, math.floor(x.high), 11) if step == int(step)]
    yield path(
        f"M{LEFT} {top:g}V{bottom:g}H{RIGHT}" + "".join(f"M{x(step):.1f} {bottom:g}v5" for step in steps), style="axis"
    )
    for step in steps:
        anchor = "end" if x(step) > RIGHT - 14 else "middle"
        yield text(x(step), bottom + 19, f"{step:.0f}", style="small dim", anchor=anchor)
    yield text((LEFT + RIGHT) / 2, bottom + 38, "step", style="dim", anchor="middle")


def locate_changes(changes: Sequence[Change], x: Scale) -> list[ChangeMark]:
    """Return where each change lies, between two steps; changes in one place are one."""
    by_step: dict[int, list[str]] = {}
    for change in changes:
        by_step.setdefault(change.step, []).append(change.what)
    return [(min(max(x(step + 0.5), LEFT), RIGHT), ", ".join(what)) for step, what in sorted(by_step.items())]


def change_lines(places: Sequence[ChangeMark], top: float, bottom: float) -> str:
    """Return commands of a path: an upright line at every place, where they are not too close."""
    lines, end = [], -math.inf
    for at, _ in places:
        if at >= end + MIN_GAP:
            lines.append(f"M{at:.1f} {top:g}V{bottom:g}")
            end = at
    return "".join(lines)


def name_changes(places: Sequence[ChangeMark], baselines: Sequence[float]) -> Iterator[str]:
    """Write each name into the first row that has room for it; a name that fits in none is left out."""
    free = [0.0] * len(baselines)
    for at, what in places:
        words = truncate(what, 34)
        width = LETTER * len(words)
        left = min(at, RIGHT - width)
        for row, baseline in enumerate(baselines):
            if left >= free[row]:
                yield text(left, baseline, words, style="small")
                free[row] = left + width + 10
                break


def truncate(words: str, letters: int) -> str:
    """Return at most so many letters, with an ellipsis instead of the rest."""
    return words if len(words) <= letters else words[: letters - 1].rstrip() + "…"
