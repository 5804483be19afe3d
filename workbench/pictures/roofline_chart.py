"""A roofline: speed over arithmetic intensity, the bounds of device and link, and points that were measured.

Speed is at most that of the device, and at most intensity times the link. Both axes are logarithmic, so that the bounds are
straight lines. Source: Williams, Waterman, Patterson, https://doi.org/10.1145/1498765.1498785. The roofline of a relay's step,
phase by phase, is arithmetic of `l2l_core.analysis.roofline`, not this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale
from workbench.pictures.svg import document, path, rect, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 330, 136, 900, 44, 272
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


class RooflinePoint(NamedTuple):
    """Names something that was measured, with its figures."""

    name: str
    intensity: float  # operations per byte of the link
    flops_per_s: float


def show_roofline(title: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RooflinePoint]) -> Picture:
    """Return picture and table.

    Args:
        title: what is shown.
        flops_per_s: of the device at its best.
        bytes_per_s: of the link.
        points: measured, at least one.

    Raises:
        ValueError: a number that is not positive, or no points.
    """
    figures = {"flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s}
    for point in points:
        figures |= {f"intensity of {point.name}": point.intensity, f"flops_per_s of {point.name}": point.flops_per_s}
    for name, value in figures.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: must be positive, a logarithmic axis has no place for it")
    if not points:
        raise ValueError("points is empty: a roofline needs at least one measured point")
    return Picture(_draw(title, flops_per_s, bytes_per_s, points), _table(title, flops_per_s, bytes_per_s, points))


def _draw(title: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RooflinePoint]) -> str:
    ridge = flops_per_s / bytes_per_s  # operations per byte at which link and device bind alike
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
    for point in points:  # the opacity as a style, which wins over the rule of the class
        px, py = x(math.log10(point.intensity)), y(math.log10(point.flops_per_s))
        parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" class="card" stroke-width="2" style="stroke-opacity:1"/>'
        )
        parts.append(text(px + 10, py + 16, point.name))
    said = "; ".join(
        f"{p.name}: {format_prefixed(p.flops_per_s)}FLOP/s of at most {format_prefixed(_speed_bound(p, flops_per_s, bytes_per_s))}"
        for p in points
    )
    return document(WIDTH, HEIGHT, title, said, parts)


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
    """1, 2 and 5 times the powers of ten on an axis."""
    for power in range(math.floor(scale.low), math.ceil(scale.high) + 1):
        yield from (f * 10.0**power for f in (1, 2, 5) if scale.low <= math.log10(f * 10.0**power) <= scale.high)


def _speed_bound(point: RooflinePoint, flops_per_s: float, bytes_per_s: float) -> float:
    return min(flops_per_s, point.intensity * bytes_per_s)


def _table(title: str, flops_per_s: float, bytes_per_s: float, points: Sequence[RooflinePoint]) -> Table:
    rows = []
    for point in points:
        roof = _speed_bound(point, flops_per_s, bytes_per_s)
        numbers = (
            f"{point.intensity:.4g}",
            f"{format_prefixed(roof)}FLOP/s",
            f"{format_prefixed(point.flops_per_s)}FLOP/s",
        )
        rows.append((point.name, *numbers, f"{point.flops_per_s / roof:.0%}"))
    note = f"The device: {format_prefixed(flops_per_s)}FLOP/s. The link: {format_prefixed(bytes_per_s)}B/s."
    return Table(f"In numbers: {title}", ("", "operations per byte", "roofline", "measured", "of it"), rows, note)


def format_prefixed(value: float) -> str:
    """Write a number to three digits, with the prefix of its unit."""
    factor, prefix = next((unit for unit in UNITS if value >= unit[0] * 0.9995), UNITS[-1])
    return f"{value / factor:.3g} {prefix}"
