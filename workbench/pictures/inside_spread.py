"""Histograms of each layer's output activations, on one axis."""

from __future__ import annotations

from collections.abc import Iterator

from l2l_core import Inside
from l2l_core.inside import ActivationStats
from workbench.pictures import svg
from workbench.pictures.colour_map import format_figure
from workbench.pictures.inside_stream import WIDTH, drawn_layers
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, ticks
from workbench.pictures.theme import BLUE
from workbench.readings import LayerNumbers, full_name, short_name

_LEFT, _TOP, _PITCH, _HIGH = 44, 40, 24, 34  # px; a ridge may reach into the one above it


def show_spreads(inside: Inside, numbers: LayerNumbers) -> Picture:
    """Return histograms of the activations of each layer, and a table of their ranges."""
    title = "Activations after each layer"
    shown = [(one, one.left) for one in drawn_layers(inside) if one.left is not None and one.left.counts]
    rows = []
    for one, left in shown:
        ends = format_figure(left.low), format_figure(left.high)
        rows.append((full_name(one.key, numbers), *ends, f"{left.outside:,}", f"{left.zeros:.1%}"))
    note = "From and to: four standard deviations on both sides of the mean, or the smallest and the largest number."
    table = Table(title, ("layer", "from", "to", "numbers outside", "exactly 0"), rows, note)
    height = _TOP + _PITCH * len(shown) + 34
    if not shown:
        parts = [svg.text(_LEFT, _TOP, "no layer has a hidden state with finite numbers", style="dim")]
        return Picture(svg.document(WIDTH, height, title, title, parts), table)
    across = Scale(min(left.low for _, left in shown), max(left.high for _, left in shown), _LEFT, WIDTH - 8)
    bottom = _TOP + _PITCH * len(shown)
    parts = [
        svg.text(0, 12, f"{title}: micro-batch {inside.micro_batches[0]}, all of its rows", style="small"),
        *_axis(across, bottom),
    ]
    for i, (one, left) in enumerate(shown):
        foot = _TOP + _PITCH * (i + 1)
        tip = f"layer {full_name(one.key, numbers)}: {format_figure(left.mean)} ± {format_figure(left.deviation)} over the values"
        parts.append(svg.group([f"<title>{tip}</title>", svg.path(_ridge(left, across, foot), style="l2l-ridge")]))
        parts.append(svg.text(_LEFT - 6, foot, short_name(one.key, numbers), style="small", anchor="end"))
    style = f"<style>.l2l-ridge{{fill:{BLUE};fill-opacity:.55;stroke:{svg.PAGE};stroke-width:1}}</style>"
    return Picture(svg.document(WIDTH, height, title, title, [style, *parts]), table)


def _axis(across: Scale, bottom: float) -> Iterator[str]:
    for mark in ticks(across.low, across.high, 9):
        x = across(mark)
        yield svg.path(f"M{x:.1f} {_TOP - 8}V{bottom}", style="rule" if mark else "axis")
        yield svg.text(x, bottom + 16, format_figure(mark), style="small", anchor="middle")


def _ridge(spread: ActivationStats, across: Scale, foot: float) -> str:
    """Return path commands of a histogram's outline above its baseline `foot`."""
    edge = (spread.high - spread.low) / len(spread.counts)
    up = Scale(0, max(spread.counts), foot, foot - _HIGH)
    tops = "".join(
        f"V{up(count):.1f}H{across(spread.low + (i + 1) * edge):.1f}" for i, count in enumerate(spread.counts)
    )
    return f"M{across(spread.low):.1f} {foot}{tops}V{foot}z"
