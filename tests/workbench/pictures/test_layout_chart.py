"""Ways to train over ranks as picture and table: bars on one scale, cut where they are longer, and no way left out."""

from __future__ import annotations

from functools import cache
from xml.etree import ElementTree

import pytest

from l2l_core.pipelines import MEGATRON_ROWS, PARTS, RankCluster, WayTable, compare_ways, find_layout
from l2l_core.trace import format_bytes
from workbench.pictures.layout_chart import (
    BYTES_LEFT,
    BYTES_RIGHT,
    CATEGORIES,
    HEADER,
    SECONDS_LEFT,
    SECONDS_RIGHT,
    describe_best_layout,
    draw_layouts,
    finder_table,
    layout_html,
    layouts_html,
    layouts_table,
)
from workbench.pictures.theme import category_colour

SVG = "{http://www.w3.org/2000/svg}"
SHAPE = MEGATRON_ROWS[0].shape  # 1.7 B


@cache
def table_of(ranks: int = 8, gigabytes: float = 80) -> WayTable:
    return compare_ways(SHAPE, RankCluster(ranks, gigabytes * 1e9), 64)


def test_bars_are_bytes_on_one_scale_and_end_at_the_axis() -> None:
    table = table_of()
    svg = draw_layouts(table, 0)
    per_byte = (BYTES_RIGHT - BYTES_LEFT) / 150e9  # the axis ends at the next round value above 1.6 budgets
    drawn: dict[float, list[float]] = {}
    for box in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        x, width, y = float(box.attrib["x"]), float(box.attrib["width"]), float(box.attrib["y"])
        is_bar = y > 60 and x < BYTES_RIGHT and box.attrib.get("fill") in map(category_colour, CATEGORIES)
        if is_bar:
            drawn.setdefault(y, []).append(width)
    assert len(drawn) == len(table.ways)
    for widths, cost in zip((drawn[y] for y in sorted(drawn)), table.costs, strict=True):
        assert cost is not None and sum(widths) == pytest.approx(min(cost.device_bytes, 150e9) * per_byte, abs=0.3)
    assert BYTES_RIGHT < SECONDS_LEFT < SECONDS_RIGHT and "▸" in svg  # one rank takes eight times as long


def test_every_way_can_be_pressed_and_is_explained() -> None:
    table = table_of()
    svg, html = draw_layouts(table), layouts_html(table, "a <title>")
    for at, way in enumerate(table.ways):
        assert f'data-key="layout-{at}"' in svg and f'<tr data-key="layout-{at}"' in html
        words = layout_html(table, at)
        assert f"<strong>{way.name}</strong> ({way.method})" in words
        cost = table.costs[at]
        assert cost is not None and format_bytes(cost.memory["activations"]) in words
        assert ("<pre>" in words) == (cost.layout.pipeline > 1 or cost.layout.is_relay), way.name
        assert ("It sends nothing" in words) == (way.name == "one rank")
    assert "a &lt;title&gt;" in html and "simulated" in svg


def test_the_table_has_all_figures() -> None:
    table = layouts_table(table_of(), "ways")
    assert table.header == HEADER and all(len(row) == len(HEADER) for row in table.rows)
    by_name = {row[0]: row for row in table.rows}
    assert by_name["one rank"][1] == "one rank" and by_name["one rank"][3] == "–"
    assert by_name["1F1B"][6].endswith("%") and by_name["data parallel"][6] == "–"
    assert [row[-1] for row in table.rows].count("the fastest that fits") == 1
    assert "Nothing here was run" in table.note


def test_where_nothing_fits_the_smallest_is_named() -> None:
    table = table_of(1, 0.05)
    words = describe_best_layout(table)
    assert words.startswith("None of these ways fits. The smallest, one rank, Relay, does not fit by"), words
    html, picture = layouts_html(table, ""), draw_layouts(table)
    assert "needs several ranks" in html and "needs several ranks" in picture
    assert 'class="l2l-lacks"' in html and "the fastest that fits" not in html
    assert layout_html(table, len(table.ways) - 1).endswith("<p>needs several ranks.</p></div>")


def test_the_finders_table_says_why() -> None:
    found = find_layout(SHAPE, RankCluster(8), 64)
    table = finder_table(found)
    assert table.rows[0][-1] == "the fastest that fits" and len(table.rows) > 5
    assert all(row[-1].startswith(("fits; ", "does not fit by")) for row in table.rows[1:])
    assert str(found.too_slow) in table.note


def test_parts_of_a_step_add_up() -> None:
    for cost in table_of().costs:
        assert cost is not None and {*cost.seconds} == {*PARTS} and min(cost.seconds.values()) >= 0
