"""Charts of a layer card: a histogram of its weights, and its figures over the steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from workbench.pictures import svg
from workbench.pictures.colour_map import format_figure
from workbench.pictures.heat_cells import FIGURE_KINDS
from workbench.pictures.layer_card import describe_spread
from workbench.pictures.scale import Scale
from workbench.pictures.theme import BLUE, GREEN, VERMILION
from workbench.session import FIGURES, LayerFacts, Statistics

WIDTHS = 300, 636  # px of the histogram and of the figures, side by side on a wide page
HEIGHT = 106
_TOP, _BOTTOM = 22, 84  # px of the plot area
_GAP = 24
_END = 56  # px reserved for the labels at either end
COLOURS = {"grad_norm": VERMILION, "update_ratio": BLUE, "influence": GREEN}


def draw_histogram(facts: LayerFacts) -> str:
    """Draw the histogram of a layer's weights as an SVG."""
    width, words = WIDTHS[0], f"weights: {describe_spread(facts)}"
    title, drawn = words, []
    if facts.counts:
        title = f"{format_figure(facts.mean)} ± {format_figure(facts.deviation)} over the weights"
        title += f", {facts.non_finite:,} not finite" if facts.non_finite else ""
        drawn = [
            svg.path(_bars(facts.counts, width), fill=BLUE),
            svg.text(0, _BOTTOM + 15, format_figure(facts.low), style="small"),
            svg.text(width, _BOTTOM + 15, format_figure(facts.high), style="small", anchor="end"),
            svg.text(width, 12, f"up to {max(facts.counts):,} a bar", style="small dim", anchor="end"),
        ]
        if facts.low < 0 < facts.high:
            zero = Scale(facts.low, facts.high, 0, width)(0)
            drawn += [svg.path(f"M{zero:.1f} {_TOP}V{_BOTTOM}", style="axis", dash="3 3")]
            if _END < zero < width - _END:
                drawn += [svg.text(zero, _BOTTOM + 15, "0", style="small", anchor="middle")]
    axis = svg.path(f"M0 {_BOTTOM}H{width}", style="axis")
    return svg.document(width, HEIGHT, "Weights", words, [svg.text(0, 12, title, style="small"), *drawn, axis])


def draw_figures(statistics: Statistics, key: str) -> str:
    """Draw a layer's gradient norm, update / weight ratio and influence over the steps, side by side, as an SVG."""
    tracks = [track for track in statistics.stack if track.key == key]
    wide = (WIDTHS[1] - _GAP * (len(FIGURES) - 1)) / len(FIGURES)
    parts = []
    for i, figure in enumerate(FIGURES):
        values = statistics.values(figure, tracks)[0] if tracks else np.array([], np.float32)
        drawn = _curve(figure, statistics.first, statistics.last, values, wide)
        parts.append(svg.group(drawn, transform=f"translate({i * (wide + _GAP):.1f} 0)"))
    return svg.document(WIDTHS[1], HEIGHT, "Figures over the steps", f"{', '.join(FIGURES)} of {key}", parts)


def _bars(counts: tuple[int, ...], width: float) -> str:
    # at least one px, so that a single weight among millions is visible
    height, wide = Scale(0, max(counts), 0, _BOTTOM - _TOP), width / len(counts)
    tops = ((i * wide + 0.5, max(height(count), 1)) for i, count in enumerate(counts) if count)
    return "".join(f"M{x:.1f} {_BOTTOM}v{-high:.1f}h{wide - 1:.1f}V{_BOTTOM}z" for x, high in tops)


def _curve(
    figure: str, first: NDArray[np.int64], last: NDArray[np.int64], values: NDArray[np.float32], wide: float
) -> Iterator[str]:
    """Yield the chart of one figure, on a logarithmic scale if the heat map uses one."""
    kind, fine = FIGURE_KINDS[figure], np.isfinite(values)
    logarithmic = kind.logarithmic
    if logarithmic:
        fine &= values > 0
    steps = ((first + last) / 2)[fine]  # a column may cover several steps
    y = np.log10(values[fine].astype(np.float64)) if logarithmic else values[fine].astype(np.float64)
    if not len(steps):
        yield svg.text(0, 12, f"{kind.label}: none yet", style="small dim")
        return
    low, high = float(y.min()), float(y.max())
    across = Scale(float(steps[0]), float(steps[-1]), 4, wide - 4)
    up = Scale(low, high, _BOTTOM - 4, _TOP + 4) if high > low else Scale(low - 1, low + 1, _BOTTOM - 4, _TOP + 4)
    points = [(across(x), up(v)) for x, v in zip(steps.tolist(), y.tolist(), strict=True)]
    newest = format_figure(float(values[fine][-1]))
    yield svg.text(0, 12, f"{kind.label} {newest}{', log scale' if logarithmic else ''}", style="small")
    yield svg.rect(0, _TOP, wide, _BOTTOM - _TOP, style="well")
    yield svg.path(svg.polyline(points), stroke=COLOURS[figure], fill="none", width=1.8)
    yield svg.rect(points[-1][0] - 2.5, points[-1][1] - 2.5, 5, 5, fill=COLOURS[figure], r=2.5)
    ends = f"{format_figure(float(values[fine].min()))} to {format_figure(float(values[fine].max()))}"
    yield svg.text(0, _BOTTOM + 15, f"steps {int(first[fine][0])}–{int(last[fine][-1])}", style="small dim")
    yield svg.text(wide, _BOTTOM + 15, ends, style="small dim", anchor="end")
