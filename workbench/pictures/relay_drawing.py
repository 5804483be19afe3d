"""Drawing functions shared by the boxes of the relay picture."""

from __future__ import annotations

from l2l_core.trace import format_bytes
from workbench.pictures import svg
from workbench.pictures.theme import PURPLE
from workbench.readings import StepState


def micro_batch_label(k: int, micro_batches: int) -> str:
    """Return the number of a micro-batch, counted from 1, as in "3/8"; empty if `k` is negative."""
    return f"{k + 1}/{micro_batches}" if k >= 0 else ""


def shortened(text: str, max_length: int) -> str:
    """Return at most `max_length` characters, the last one an ellipsis if some are left out."""
    return text if len(text) <= max_length else text[: max_length - 1].rstrip() + "…"


def draw_stash(x: float, y: float, width: float, state: StepState, place: str) -> list[str]:
    """Draw the stash bytes at one place, with the number of stashed inputs if they are there."""
    nbytes = (state.device if place == "device" else state.host).get("stash", 0)
    # both places share one scale, so that their bars are comparable
    share = nbytes / state.stash_peak_bytes if state.stash_peak_bytes else 0.0
    words = [f"{state.num_stashed} inputs"] if state.stash == place and state.num_stashed else []
    words += [format_bytes(nbytes)] if nbytes else []
    wide = width - 56 - 134
    return [
        svg.text(x, y + 10, "stash", size=11, style="dim"),
        svg.rect(x + 56, y, wide, 12, style="well"),
        *([svg.rect(x + 56, y, wide * share, 12, fill=PURPLE)] if share > 0 else []),
        svg.text(x + width, y + 10, ", ".join(words) or "empty", size=11, anchor="end"),
    ]
