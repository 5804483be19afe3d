"""Picture of a learning-rate finder: losses over the rate on a logarithmic axis, and the suggested rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workbench.pictures.loss_chart import BOTTOM, HEIGHT, TOP, draw_loss_axis, loss_scale
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import LogScale, log_ticks
from workbench.pictures.step_axis import LEFT, RIGHT, WIDTH
from workbench.pictures.svg import document, outlined_text, path, polyline, text
from workbench.pictures.theme import BLUE, GREEN
from workbench.session import LR_RULE, LRFinding

CEILING = 1.5  # times the first smoothed loss; losses above it are cut off, so that the fall remains visible


class LRCurve(LRFinding):
    """Result of the learning-rate finder that displays itself as a picture."""

    @property
    def picture(self) -> Picture:
        """The curve with a table."""
        return Picture(draw_lr_curve(self), lr_table(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.picture._repr_mimebundle_(include, exclude)


def draw_lr_curve(found: LRFinding) -> str:
    """Draw losses and their exponential mean over the learning rate, as an SVG."""
    words = describe_finding(found)
    if len(found.rates) < 2:
        return document(WIDTH, 60, "Learning-rate finder", words, [text(LEFT, 30, words)])
    smoothed = found.smoothed
    top = max(CEILING * smoothed[0], min(smoothed)) if smoothed[0] > 0 else max(smoothed)
    y, marks = loss_scale([min(loss, top) for loss in (*found.losses, *smoothed)])
    x = LogScale(found.rates[0], found.rates[-1], LEFT, RIGHT)
    raw = polyline((x(rate), max(TOP, y(loss))) for rate, loss in found.curve)
    mean = polyline((x(rate), max(TOP, y(loss))) for rate, loss in zip(found.rates, smoothed, strict=True))
    parts = [
        text(LEFT, 20, "Learning-rate finder", style="strong"),
        text(LEFT, 40, words, style="dim"),
        *draw_loss_axis(y, marks, "loss", named=True),
        *_draw_rates(x),
        path(raw, stroke=BLUE, fill="none", width=1).replace("<path", '<path stroke-opacity=".5"', 1),
        path(mean, stroke=BLUE, fill="none", width=2.4),
        *_draw_suggestion(found, x),
    ]
    return document(WIDTH, HEIGHT, "Learning-rate finder", words, parts)


def describe_finding(found: LRFinding) -> str:
    """Describe the suggestion and the end of the finder in words."""
    ended = f" It ended early: {found.ended}." if found.ended else ""
    if found.suggestion is None:
        return f"No suggestion: the loss does not fall between these rates; try others.{ended}"
    return f"Suggested: {found.suggestion:.2g}, where the smoothed loss falls fastest.{ended}"


def lr_table(found: LRFinding) -> Table:
    """Return a table of rates, losses and smoothed losses."""
    rows = [
        (f"{rate:.3g}", f"{loss:.4g}", f"{mean:.4g}")
        for rate, loss, mean in zip(found.rates, found.losses, found.smoothed, strict=True)
    ]
    note = f"{describe_finding(found)} The rule: {LR_RULE}. Training continues as if the finder had not run."
    return Table("Learning-rate finder", ("learning rate", "loss", "smoothed"), rows, note)


def _draw_rates(x: LogScale) -> Iterator[str]:
    marks = log_ticks(x.low, x.high, 12)
    yield path(
        f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" + "".join(f"M{x(mark):.1f} {BOTTOM}v5" for mark in marks), style="axis"
    )
    for mark in marks:
        anchor = "end" if x(mark) > RIGHT - 14 else "middle"
        yield text(
            x(mark),
            BOTTOM + 19,
            f"{mark:.0e}".replace("e-0", "e-").replace("e+0", "e"),
            style="small dim",
            anchor=anchor,
        )
    yield text((LEFT + RIGHT) / 2, BOTTOM + 38, "learning rate", style="dim", anchor="middle")


def _draw_suggestion(found: LRFinding, x: LogScale) -> Iterator[str]:
    if found.suggestion is not None:
        at = x(found.suggestion)
        yield path(f"M{at:.1f} {TOP}V{BOTTOM}", stroke=GREEN, width=2, dash="6 4")
        anchor, left = ("end", at - 6) if at > (LEFT + RIGHT) / 2 else ("start", at + 6)
        yield outlined_text(text(left, TOP + 14, f"{found.suggestion:.2g}", style="strong", anchor=anchor))
