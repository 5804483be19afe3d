"""What fills a memory in several cases, one bar each, on one scale: a picture, and the table behind it.

The moment is the caller's choice, mostly each case's peak; how memory goes over a step is drawn in `memory_chart.py`, in the same
colours and textures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from l2l_core.trace import format_bytes
from workbench.pictures.memory_areas import CATEGORY_ORDER, TEXTURES
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import Scale, round_up, ticks
from workbench.pictures.svg import document, path, rect, text
from workbench.pictures.theme import category_colour

WIDTH, LEFT, RIGHT = 960, 216, 880
TOP, PITCH, HEIGHT = 56, 30, 20  # px: of the first bar, from bar to bar, of a bar

Cases = Mapping[str, Mapping[str, int]]  # by the name of a case: bytes by category


def show_memory_bars(title: str, cases: Cases, budget_bytes: int | None = None) -> Picture:
    """Return picture and table of several cases.

    Args:
        title: what is compared.
        cases: bytes by category, by the name of the case.
        budget_bytes: memory of the device, drawn as a line; the axis reaches it.

    Raises:
        ValueError: no cases.
    """
    if not cases:
        raise ValueError("no cases to draw: give at least one, such as {'by relay': {'weights': 1000}}")
    return Picture(draw_memory_bars(title, cases, budget_bytes), _table(title, cases, budget_bytes))


def draw_memory_bars(title: str, cases: Cases, budget_bytes: int | None = None) -> str:
    """Draw the picture; arguments are those of `show_memory_bars`."""
    bottom = TOP + PITCH * len(cases)
    most = max(_total_bytes(held) for held in cases.values())
    bytes_to_px = Scale(0.0, round_up(max(most, budget_bytes or 0)), LEFT, RIGHT)
    parts = [text(16, 18, title, style="strong"), *_legend(cases), *_axis(bytes_to_px, bottom)]
    for i, (name, held) in enumerate(cases.items()):
        y = TOP + PITCH * i
        parts.append(text(LEFT - 10, y + 14.5, name, anchor="end"))
        parts += _bar(bytes_to_px, held, y)
        parts.append(
            text(bytes_to_px(_total_bytes(held)) + 8, y + 14.5, format_bytes(_total_bytes(held)), style="strong")
        )
    if budget_bytes is not None:
        x = bytes_to_px(budget_bytes)
        parts.append(path(f"M{x:.1f} {TOP - 8}V{bottom}", style="axis", width=1.5))
        parts.append(text(x + 5, bottom - 2, f"budget {format_bytes(budget_bytes)}", style="small"))
    said = ". ".join(f"{name}: {_describe_case(held)}" for name, held in cases.items())
    return document(WIDTH, bottom + 26, title, said, parts)


def _legend(cases: Cases) -> Iterator[str]:
    x = float(LEFT)
    for category in (c for c in CATEGORY_ORDER if any(held.get(c) for held in cases.values())):
        yield rect(x, 29, 16, 12, fill=category_colour(category))
        yield _texture(category, x, x + 16, 29, 12)
        yield text(x + 22, 39, category)
        x += 46 + 7 * len(category)


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
            yield _texture(category, left, right, y, HEIGHT)


def _texture(category: str, left: float, right: float, y: float, height: float) -> str:
    """Upright lines, so that a category is known without its hue."""
    pitch, dash = TEXTURES.get(category, (0, ""))
    if not pitch:
        return ""
    count = int((right - left) // pitch)
    lines = "".join(f"M{left + pitch * (i + 0.5):.1f} {y:g}v{height:g}" for i in range(count))
    return path(lines, style="hatch", dash=dash) if lines else ""


def _table(title: str, cases: Cases, budget_bytes: int | None) -> Table:
    shown = [category for category in CATEGORY_ORDER if any(held.get(category) for held in cases.values())]
    rows = [
        (name, *(format_bytes(held.get(category, 0)) for category in shown), format_bytes(_total_bytes(held)))
        for name, held in cases.items()
    ]
    note = "" if budget_bytes is None else f"The budget is {format_bytes(budget_bytes)}."
    return Table(f"In numbers: {title}", ("", *shown, "all"), rows, note)


def _total_bytes(bytes_by_category: Mapping[str, int]) -> int:
    return sum(bytes_by_category.get(category, 0) for category in CATEGORY_ORDER)


def _describe_case(bytes_by_category: Mapping[str, int]) -> str:
    parts = ", ".join(
        f"{category} {format_bytes(bytes_by_category[category])}"
        for category in CATEGORY_ORDER
        if bytes_by_category.get(category)
    )
    return f"{format_bytes(_total_bytes(bytes_by_category))} ({parts})"
