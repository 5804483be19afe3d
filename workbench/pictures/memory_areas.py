"""Stacked areas of bytes in use over time, by category, each with a texture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import CATEGORIES
from workbench.pictures.scale import Scale
from workbench.pictures.svg import path, rect, text
from workbench.pictures.theme import category_colour
from workbench.readings import MemoryLevels

CATEGORY_ORDER = ("weights", "optimizer", "gradients", "stash", "activations", "other")  # from the bottom up
TEXTURES = {"optimizer": (16, ""), "gradients": (8, ""), "stash": (8, "5 3"), "activations": (8, "2 6")}  # pitch, dash
MAX_POINTS = 3000  # of all areas; beyond it, columns are two or four pixels wide


def stacked_areas(
    levels: MemoryLevels, scale: Scale, time: Scale, left: float, right: float, plain: bool = False
) -> Iterator[str]:
    """Draw the areas between two edges in pixels, one path per category; `plain` omits textures."""
    if not len(levels.totals) or right <= left:
        return
    for pixels in (1, 2, 4):
        edges = np.append(np.arange(left, right, pixels), right)
        ys = _heights(scale, time, levels, edges)
        if np.count_nonzero(np.diff(ys, axis=0)) <= MAX_POINTS // 2 or pixels == 4:
            break
    for index in reversed(range(len(CATEGORY_ORDER))):  # from the top down; lower areas cover higher ones
        below = ys[:, index - 1] if index else np.full(len(ys), scale.first)
        if (ys[:, index] < below).any():
            yield path(_outline(edges, ys[:, index], scale.first), fill=category_colour(CATEGORY_ORDER[index]))
    if plain:
        return
    for index, category in enumerate(CATEGORY_ORDER):
        if category in TEXTURES:
            below = ys[:, index - 1] if index else np.full(len(ys), scale.first)
            yield from _texture(edges, ys[:, index], below, *TEXTURES[category])


def texture(category: str, left: float, right: float, y: float, height: float) -> str:
    """Return the texture of a category in a box, so that it is recognizable without colour."""
    pitch, dash = TEXTURES.get(category, (0, ""))
    count = int((right - left) // pitch) if pitch else 0
    lines = "".join(f"M{left + pitch * (i + 0.5):.1f} {y:g}v{height:g}" for i in range(count))
    return path(lines, style="hatch", dash=dash) if lines else ""


def draw_category_legend(
    categories: Iterable[str], x: float, y: float, names: Mapping[str, str] | None = None, small: bool = False
) -> Iterator[str]:
    """Draw colour, texture and name of categories from left to right; `names` replaces names."""
    gap, letter = (36, 6.2) if small else (46, 7)
    for category in categories:
        yield rect(x, y, 16, 12, fill=category_colour(category))
        yield texture(category, x, x + 16, y, 12)
        yield text(x + 22, y + 10, (names or {}).get(category, category), style="small" if small else "")
        x += gap + letter * len(category)


def _heights(scale: Scale, time: Scale, levels: MemoryLevels, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (columns, categories): upper edges of the stacked areas in pixels, rounded to halves."""
    per_px = (time.high - time.low) / (time.last - time.first)
    edges_s = time.low + (edges - time.first) * per_px
    edges_s[-1] = np.inf if edges[-1] > edges[0] else edges_s[-1]  # with samples after the last event
    order = [CATEGORIES.index(category) for category in CATEGORY_ORDER]
    stacked = np.cumsum(levels.column_maxima(edges_s)[:, order], axis=1)
    ys = scale.first + (scale.last - scale.first) * stacked / scale.high
    return np.maximum(np.round(2 * ys) / 2, scale.last - 2)  # clipped just above the axis


def _outline(edges: NDArray[np.float64], ys: NDArray[np.float64], bottom: float) -> str:
    turns = np.flatnonzero(np.diff(ys)) + 1
    steps = "".join(f"H{x:g}V{y:g}" for x, y in zip(np.round(edges[turns], 1), ys[turns], strict=True))
    return f"M{edges[0]:.4g} {bottom:g}V{ys[0]:g}{steps}H{edges[-1]:.4g}V{bottom:g}Z"


def _texture(
    edges: NDArray[np.float64], upper: NDArray[np.float64], lower: NDArray[np.float64], pitch: int, dash: str
) -> Iterator[str]:
    """Draw vertical lines in one area, so that it is recognizable without colour; dashes are aligned."""
    xs = np.arange(edges[0] - edges[0] % pitch + pitch, edges[-1], pitch)
    columns = np.searchsorted(edges, xs, "right") - 1
    bottoms = lower[columns]
    tops = np.ceil(upper[columns] / 8) * 8 if dash else upper[columns]
    long = bottoms - tops > 2
    if d := "".join(f"M{x:g} {a:g}V{b:g}" for x, a, b in zip(xs[long], tops[long], bottoms[long], strict=True)):
        yield path(d, style="hatch", dash=dash)
