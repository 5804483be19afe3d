"""Where a step failed in the memory picture: the allocation that the device had no room for, as a mark beyond its budget."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from l2l_core.trace import StepFailure, format_bytes
from workbench.pictures.relay_drawing import shortened
from workbench.pictures.scale import Scale, format_seconds
from workbench.pictures.svg import outlined_text, path, rect, text
from workbench.pictures.theme import VERMILION

_HALF = 4.5  # px, of the cross
_MAX_REACH = 2.0  # an allocation is drawn up to so many times what was in use; a larger one is cut off
_HALF_WIDTH = 424  # px, of the picture
_CHARACTERS = 112  # that fit beside "failed at"


def reach_bytes(failed: StepFailure | None) -> int:
    """Return how high the device's axis must reach to show the failure, in bytes; 0 without one."""
    if failed is None or not failed.asked_bytes:
        return 0
    return min(failed.held_bytes + failed.asked_bytes, round(_MAX_REACH * max(failed.held_bytes, 1)))


def draw_failure(failed: StepFailure, scale: Scale, cursor: float, left: float, title_y: float) -> Iterator[str]:
    """Draw a cross at what would have been in use, the way there, and what was asked for.

    Args:
        failed: how the step ended.
        scale: bytes of the device to pixels.
        cursor: px, where the step ended.
        left, title_y: px, where the words begin.
    """
    yield (
        f'<text x="{left:g}" y="{title_y:g}"><tspan class="strong">✕ failed at {format_seconds(failed.t_s)}</tspan> '
        f'<tspan dx="4">{escape(shortened(_describe_failure(failed), _CHARACTERS))}</tspan></text>'
    )
    if not failed.asked_bytes:
        return
    held_y, asked_y = scale(failed.held_bytes), max(scale(failed.held_bytes + failed.asked_bytes), scale.last)
    yield rect(cursor - 2.5, asked_y, 5, held_y - asked_y, fill=VERMILION)
    x, y, d = cursor, asked_y, _HALF
    cross = f"M{x - d:.1f} {y - d:.1f}L{x + d:.1f} {y + d:.1f}M{x - d:.1f} {y + d:.1f}L{x + d:.1f} {y - d:.1f}"
    yield path(cross, style="page", stroke="var(--jp-layout-color1,Canvas)", width=5)
    yield path(cross, stroke=VERMILION, width=2.5)
    is_left = cursor < left + _HALF_WIDTH
    words = f"{format_bytes(failed.missing_bytes)} too much"
    y = scale(failed.held_bytes + failed.asked_bytes - failed.missing_bytes)  # the budget's line
    yield outlined_text(
        text(x + 10 if is_left else x - 10, y + 15, words, style="strong", anchor="start" if is_left else "end")
    )


def _describe_failure(failed: StepFailure) -> str:
    if not failed.asked_bytes:
        return failed.error
    return f"asking for {format_bytes(failed.asked_bytes)} of {failed.asked_for}"
