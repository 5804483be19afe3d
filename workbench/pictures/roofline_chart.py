"""Roofline chart: speed over arithmetic intensity, the bounds of device and link, and measured points.

Speed is at most that of the device, and at most intensity times the link's bandwidth. Both axes are logarithmic. Source:
Williams, Waterman, Patterson, https://doi.org/10.1145/1498765.1498785. `l2l_core.analysis.roofline` computes the roofline
of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, format_prefixed
from workbench.pictures.svg import document, path, rect, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 330, 136, 900, 44, 272


class RooflinePoint(NamedTuple):
    """A measured point of a roofline."""

    name: str
    intensity: float  # operations per byte of the link
    flops_per_s: float


def show_roofline(title: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RooflinePoint]) -> Picture:
    """Return a roofline chart with its table.

    Args:
        title: title of the chart.
        flops_per_s: peak speed of the device.
        bytes_per_s: bandwidth of the link.
        points: measured points, at least one.

    Raises:
        ValueError: a number is not positive and finite, or `points` is empty.
    """
    figures = {"flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s}
    for point in points:
        figures |= {f"intensity of {point.name}": point.intensity, f"flops_per_s of {point.name}": point.flops_per_s}
    for name, value in figures.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} is not on a logarithmic axis: give a positive, finite number")
    if not points:
        raise ValueError(f"points={points!r} is empty: give at least one measured point")
    return Picture(_draw(title, flops_per_s, bytes_per_s, points), _table(title, flops_per_s, bytes_per_s, points))


def _draw(title: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RooflinePoint]) -> str:
    ridge = flops_per_s / bytes_per_s  # operations per byte at which link and device limit equally
    intensities, speeds = [ridge, *(p.intensity for p in points)], [flops_per_s, *(p.flops_per_s for p in points)]
    low, high = min(intensities) / 2, max(intensities) * 2
    x = Scale(math.log10(low), math.log10(high), LEFT, RIGHT)
    least = min(*speeds, low * bytes_per_s)
    y = Scale(math.log10(least) - 0.1, math.log10(max(speeds)) + 0.2, BOTTOM, TOP)

    def at(intensity: float, speed: float) -> str:
        return f"{x(math.log10(intensity)):.1f} {y(math.log10(speed)):.1f}"

    parts = [text(16, 18, title, style="strong"), rect(LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP, style="well")]
    parts += _axes(x, y)
    roof = f"M{at(low, low * bytes_per_s)}L{at(ridge, flops_per_s)}L{at(high, flops_per_s)}"
    parts.append(path(roof, style="axis", width=2))
    parts.append(path(f"M{at(ridge, flops_per_s)}V{BOTTOM}", style="axis", dash="3 4"))
    middle, top = x(math.log10(ridge)), y(math.log10(flops_per_s))
    parts.append(text(middle - 12, top - 8, "the link binds ◂", anchor="end", style="dim"))
    parts.append(text(middle + 12, top - 8, f"▸ the device binds, {format_prefixed(flops_per_s)}FLOP/s", style="dim"))
    descriptions = []
    for point in points:
        px, py = x(math.log10(point.intensity)), y(math.log10(point.flops_per_s))
        # opacity as a style, which takes precedence over the class
        dot = f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" class="card" stroke-width="2" style="stroke-opacity:1"/>'
        parts += [dot, text(px + 10, py + 16, point.name)]
        bound = format_prefixed(_speed_bound(point, flops_per_s, bytes_per_s))
        descriptions.append(f"{point.name}: {format_prefixed(point.flops_per_s)}FLOP/s of at most {bound}")
    return document(WIDTH, HEIGHT, title, "; ".join(descriptions), parts)


def _axes(x: Scale, y: Scale) -> Iterator[str]:
    marks_x, marks_y = list(_decades(x)), list(_decades(y))
    lines = [f"M{x(math.log10(m)):.1f} {TOP}V{BOTTOM}" for m in marks_x]
    lines += [f"M{LEFT} {y(math.log10(m)):.1f}H{RIGHT}" for m in marks_y]
    yield path("".join(lines), style="rule")
    for mark in marks_x:
        yield text(x(math.log10(mark)), BOTTOM + 16, f"{mark:g}", style="small dim", anchor="middle")
    for mark in marks_y:
        yield text(LEFT - 8, y(math.log10(mark)) + 4, f"{format_prefixed(mark)}FLOP/s", style="small dim", anchor="end")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 38, "operations per byte over the link", style="dim", anchor="middle")


def _decades(scale: Scale) -> Iterator[float]:
    """Yield 1, 2 and 5 times the powers of ten on an axis."""
    for power in range(math.floor(scale.low), math.ceil(scale.high) + 1):
        yield from (f * 10.0**power for f in (1, 2, 5) if scale.low <= math.log10(f * 10.0**power) <= scale.high)


def _speed_bound(point: RooflinePoint, flops_per_s: float, bytes_per_s: float) -> float:
    return min(flops_per_s, point.intensity * bytes_per_s)


def _table(title: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RooflinePoint]) -> Table:
    rows = []
    for point in points:
        roof = _speed_bound(point, flops_per_s, bytes_per_s)
        speeds = (f"{format_prefixed(speed)}FLOP/s" for speed in (roof, point.flops_per_s))
        rows.append((point.name, f"{point.intensity:.4g}", *speeds, f"{point.flops_per_s / roof:.0%}"))
    note = f"The device: {format_prefixed(flops_per_s)}FLOP/s. The link: {format_prefixed(bytes_per_s)}B/s."
    return Table(f"In numbers: {title}", ("", "operations per byte", "roofline", "measured", "of it"), rows, note)
