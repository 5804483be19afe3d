"""What the boxes of the relay picture share: words of a size, and the bar of a stash."""

from __future__ import annotations

from html import escape

from l2l_core.trace import format_bytes
from workbench.pictures import svg
from workbench.pictures.theme import PURPLE
from workbench.readings import StepState


def sized_text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    strong: bool = False,
    style: str = "",
    anchor: str = "start",
    fill: str = "",
) -> str:
    """Write words of any size in px; `svg.text` has the sizes of the theme only."""
    # the size is an attribute, and a class that has a size would win over it: `small` has no place here
    named = f' class="{style}"' if style else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    heavy = ' font-weight="600"' if strong else ""
    filled = f' fill="{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{heavy}{named}{placed}{filled}>{escape(text)}</text>'


def micro_batch_label(k: int, micro_batches: int) -> str:
    """Say which micro-batch it is, counted from 1: "3/8"; nothing if there is none."""
    return f"{k + 1}/{micro_batches}" if k >= 0 else ""


def shortened(text: str, max_length: int) -> str:
    """Return at most so many characters, the last one an ellipsis if some are left out."""
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def draw_stash(x: float, y: float, width: float, state: StepState, place: str) -> list[str]:
    """Draw the stash bytes at one place; the number of inputs stands where they are kept."""
    nbytes = (state.device if place == "device" else state.host).get("stash", 0)
    # both places by one measure, so that their bars can be compared
    share = nbytes / state.stash_peak_bytes if state.stash_peak_bytes else 0.0
    words = [f"{state.num_stashed} inputs"] if state.stash == place and state.num_stashed else []
    words += [format_bytes(nbytes)] if nbytes else []
    wide = width - 56 - 134
    return [
        sized_text(x, y + 10, "stash", size=11, style="dim"),
        svg.rect(x + 56, y, wide, 12, style="well"),
        *([svg.rect(x + 56, y, wide * share, 12, fill=PURPLE)] if share > 0 else []),
        sized_text(x + width, y + 10, ", ".join(words) or "empty", size=11, anchor="end"),
    ]
