"""Memory bars: widths are bytes on one scale, all categories are drawn, and names are escaped."""

from xml.etree import ElementTree

import pytest

from l2l_core.trace.events import CATEGORIES
from l2l_core.trace.formatting import format_bytes
from workbench.pictures.memory_bars import LEFT, RIGHT, draw_memory_bars, show_memory_bars
from workbench.pictures.theme import category_colour

SVG = "{http://www.w3.org/2000/svg}"
CASES = {
    "in <core>": {"weights": 400, "gradients": 400, "optimizer": 800, "activations": 2400},
    "by relay": {category: 100 for category in CATEGORIES},
}


def bars(svg: str) -> dict[float, dict[str, float]]:
    """Return the widths in pixels of all elements with a tooltip, by height and colour."""
    found: dict[float, dict[str, float]] = {}
    for box in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if box.find(f"{SVG}title") is not None:
            found.setdefault(float(box.attrib["y"]), {})[box.attrib["fill"]] = float(box.attrib["width"])
    return found


def test_widths_are_bytes_on_one_scale() -> None:
    drawn = bars(draw_memory_bars("Peaks", CASES))
    assert len(drawn) == len(CASES)
    per_byte = (RIGHT - LEFT) / 4000
    for (_, widths), held in zip(sorted(drawn.items()), CASES.values(), strict=True):
        expected = {category_colour(category): nbytes * per_byte for category, nbytes in held.items()}
        assert widths == pytest.approx(expected, abs=0.01)


def test_a_budget_beyond_the_bars_is_still_on_the_axis() -> None:
    near, far = draw_memory_bars("Peaks", CASES), draw_memory_bars("Peaks", CASES, budget_bytes=8000)
    assert "budget 8 kB" in far and "budget" not in near
    for small, large in zip(bars(far).values(), bars(near).values(), strict=True):
        assert {fill: 2 * width for fill, width in small.items()} == pytest.approx(large, abs=0.02)


def test_the_table_has_every_number_and_the_sum() -> None:
    table = show_memory_bars("Peaks", CASES, budget_bytes=5000).table
    assert table.header == ("", "weights", "optimizer", "gradients", "stash", "activations", "other", "all")
    assert table.rows[0] == ("in <core>", "400 B", "800 B", "400 B", "0 B", "2.4 kB", "0 B", "4 kB")
    assert table.rows[1][-1] == format_bytes(100 * len(CATEGORIES)) and "5 kB" in table.note


def test_categories_that_nobody_has_are_left_out() -> None:
    picture = show_memory_bars("Peaks", {"a": {"weights": 10, "stash": 0}})
    assert picture.table.header == ("", "weights", "all")
    assert "stash" not in picture.svg


def test_names_are_escaped_and_the_picture_is_a_value() -> None:
    svg = draw_memory_bars('Peaks & "more"', CASES)
    assert svg == draw_memory_bars('Peaks & "more"', dict(CASES))
    assert "in <core>" not in svg and "in &lt;core&gt;" in svg


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        show_memory_bars("Peaks", {})
