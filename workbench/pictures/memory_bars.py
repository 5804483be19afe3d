"""Bars of memory by category in several cases, on one scale, and their table.

Colours and textures are those of `memory_chart.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from l2l_core.trace import format_bytes
from workbench.pictures.memory_areas import CATEGORY_ORDER, draw_category_legend, texture
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, round_up, ticks
from workbench.pictures.svg import document, path, rect, text
from workbench.pictures.theme import category_colour

WIDTH, LEFT, RIGHT = 960, 216, 880
TOP, PITCH, HEIGHT = 56, 30, 20  # px: top of the first bar, distance between bars, height of a bar

Cases = Mapping[str, Mapping[str, int]]  # name of a case -> bytes by category


def show_memory_bars(title: str, cases: Cases, budget_bytes: int | None = None) -> Picture:
    """Return a bar chart of several cases and its table.

    Args:
        title: title of the comparison.
        cases: bytes by category of each case, mostly at its peak.
        budget_bytes: memory of the device, drawn as a line within the axis.

    Raises:
        ValueError: `cases` is empty.
    """
    if not cases:
        raise ValueError(f"cases={cases!r} is empty: give at least one, as in {{'relay': {{'weights': 1000}}}}")
    return Picture(draw_memory_bars(title, cases, budget_bytes), _table(title, cases, budget_bytes))


def draw_memory_bars(title: str, cases: Cases, budget_bytes: int | None = None) -> str:
    """Draw the bars as an SVG; arguments are those of `show_memory_bars`."""
    bottom = TOP + PITCH * len(cases)
    most = max(map(_total_bytes, cases.values()))
    bytes_to_px = Scale(0.0, round_up(max(most, budget_bytes or 0)), LEFT, RIGHT)
    parts = [text(16, 18, title, style="strong"), *draw_category_legend(_categories(cases), LEFT, 29)]
    parts += _axis(bytes_to_px, bottom)
    for i, (name, bytes_by_category) in enumerate(cases.items()):
        y, total = TOP + PITCH * i, _total_bytes(bytes_by_category)
        parts.append(text(LEFT - 10, y + 14.5, name, anchor="end"))
        parts += _bar(bytes_to_px, bytes_by_category, y)
        parts.append(text(bytes_to_px(total) + 8, y + 14.5, format_bytes(total), style="strong"))
    if budget_bytes is not None:
        x = bytes_to_px(budget_bytes)
        parts.append(path(f"M{x:.1f} {TOP - 8}V{bottom}", style="axis", width=1.5))
        parts.append(text(x + 5, bottom - 2, f"budget {format_bytes(budget_bytes)}", style="small"))
    description = ". ".join(f"{name}: {_describe_case(case)}" for name, case in cases.items())
    return document(WIDTH, bottom + 26, title, description, parts)


def _axis(scale: Scale, bottom: float) -> Iterator[str]:
    marks = ticks(0.0, scale.high, 8)
    yield path("".join(f"M{scale(mark):.1f} {TOP - 6}V{bottom}" for mark in marks), style="rule")
    for mark in marks:
        yield text(scale(mark), bottom + 16, format_bytes(mark) if mark else "0", style="small dim", anchor="middle")


def _bar(scale: Scale, bytes_by_category: Mapping[str, int], y: float) -> Iterator[str]:
    below = 0
    for category in CATEGORY_ORDER:
        nbytes = bytes_by_category.get(category, 0)
        left, right = scale(below), scale(below + nbytes)
        below += nbytes
        if right - left >= 0.05:  # px
            tip = f"{category} {format_bytes(nbytes)}"
            yield rect(left, y, right - left, HEIGHT, fill=category_colour(category), tip=tip)
            yield texture(category, left, right, y, HEIGHT)


def _table(title: str, cases: Cases, budget_bytes: int | None) -> Table:
    shown = _categories(cases)
    rows = [
        (name, *(format_bytes(case.get(category, 0)) for category in shown), format_bytes(_total_bytes(case)))
        for name, case in cases.items()
    ]
    note = "" if budget_bytes is None else f"The budget is {format_bytes(budget_bytes)}."
    return Table(f"In numbers: {title}", ("", *shown, "all"), rows, note)


def _categories(cases: Cases) -> list[str]:
    return [category for category in CATEGORY_ORDER if any(case.get(category) for case in cases.values())]


def _total_bytes(bytes_by_category: Mapping[str, int]) -> int:
    return sum(bytes_by_category.get(category, 0) for category in CATEGORY_ORDER)


def _describe_case(bytes_by_category: Mapping[str, int]) -> str:
    parts = ", ".join(
        f"{category} {format_bytes(bytes_by_category[category])}"
        for category in CATEGORY_ORDER
        if bytes_by_category.get(category)
    )
    return f"{format_bytes(_total_bytes(bytes_by_category))} ({parts})"
