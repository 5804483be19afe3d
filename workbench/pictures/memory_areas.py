"""Bytes in use over time as areas, one on top of the other by category, with a texture each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import CATEGORIES
from workbench.pictures.scale import Scale
from workbench.pictures.svg import path
from workbench.pictures.theme import category_colour
from workbench.readings import MemoryLevels

CATEGORY_ORDER = ("weights", "optimizer", "gradients", "stash", "activations", "other")  # from the bottom up
TEXTURES = {"optimizer": (16, ""), "gradients": (8, ""), "stash": (8, "5 3"), "activations": (8, "2 6")}  # pitch, dash
MAX_POINTS = 3000  # of all areas together; beyond, columns are two or four pixels wide


def stacked_areas(
    levels: MemoryLevels, scale: Scale, time: Scale, left: float, right: float, plain: bool = False
) -> Iterator[str]:
    """Draw the areas between two edges in pixels, one path each; `plain` ones have no textures."""
    if not len(levels.totals) or right <= left:
        return
    for pixels in (1, 2, 4):
        edges = np.append(np.arange(left, right, pixels), right)
        ys = _heights(scale, time, levels, edges)
        if np.count_nonzero(np.diff(ys, axis=0)) <= MAX_POINTS // 2 or pixels == 4:
            break
    for index in reversed(range(len(CATEGORY_ORDER))):  # the one at the top first, the others over it
        below = ys[:, index - 1] if index else np.full(len(ys), scale.first)
        if (ys[:, index] < below).any():
            yield path(_outline(edges, ys[:, index], scale.first), fill=category_colour(CATEGORY_ORDER[index]))
    if plain:
        return
    for index, category in enumerate(CATEGORY_ORDER):
        if category in TEXTURES:
            below = ys[:, index - 1] if index else np.full(len(ys), scale.first)
            yield from _texture(edges, ys[:, index], below, *TEXTURES[category])


def _heights(scale: Scale, time: Scale, levels: MemoryLevels, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """(columns, categories): upper edges of the stacked areas in pixels, rounded to halves."""
    per_px = (time.high - time.low) / (time.last - time.first)
    edges_s = time.low + (edges - time.first) * per_px
    edges_s[-1] = np.inf if edges[-1] > edges[0] else edges_s[-1]  # what comes after the last event counts, too
    order = [CATEGORIES.index(category) for category in CATEGORY_ORDER]
    stacked = np.cumsum(levels.column_maxima(edges_s)[:, order], axis=1)
    ys = scale.first + (scale.last - scale.first) * stacked / scale.high
    return np.maximum(np.round(2 * ys) / 2, scale.last - 2)  # beyond the axis, it is cut off just above


def _outline(edges: NDArray[np.float64], ys: NDArray[np.float64], bottom: float) -> str:
    turns = np.flatnonzero(np.diff(ys)) + 1
    steps = "".join(f"H{x:g}V{y:g}" for x, y in zip(np.round(edges[turns], 1), ys[turns], strict=True))
    return f"M{edges[0]:.4g} {bottom:g}V{ys[0]:g}{steps}H{edges[-1]:.4g}V{bottom:g}Z"


def _texture(
    edges: NDArray[np.float64], upper: NDArray[np.float64], lower: NDArray[np.float64], pitch: int, dash: str
) -> Iterator[str]:
    """Upright lines in one area, so that it is known without its hue; dashes lie on common heights."""
    xs = np.arange(edges[0] - edges[0] % pitch + pitch, edges[-1], pitch)
    at = np.searchsorted(edges, xs, "right") - 1
    tops = np.ceil(upper[at] / 8) * 8 if dash else upper[at]
    seen = lower[at] - tops > 2
    d = "".join(f"M{x:g} {a:g}V{b:g}" for x, a, b in zip(xs[seen], tops[seen], lower[at][seen], strict=True))
    if d:
        yield path(d, style="hatch", dash=dash)
