"""Pictures of strategies show the numbers of their table, and a strategy's timeline shows its trace."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from some_ways import ROWS, recomputing

from l2l_core.strategies import StrategyResult, StrategyTable
from workbench.pictures.strategy_comparison import (
    BOTTOM,
    best_strategy,
    draw_strategies,
    show_strategies,
    strategies_html,
    strategies_table,
)
from workbench.pictures.strategy_comparison import LEFT as FIRST
from workbench.pictures.strategy_comparison import RIGHT as LAST
from workbench.pictures.strategy_comparison import TOP as UPPER
from workbench.pictures.strategy_timeline import CHART, LANE, LEFT, RIGHT, TOP, show_strategy, strategy_table

LIMIT = 60_000
TABLE = StrategyTable(ROWS, 6_000_000)


def marks(svg: str) -> dict[int, tuple[float, float, str]]:
    """Return position and tooltip of every mark by its row."""
    root = ElementTree.fromstring(svg)
    circles = [e for e in root.iter() if e.tag.endswith("}circle") and "data-key" in e.attrib]
    return {
        int(e.attrib["data-key"].removeprefix("way-")): (float(e.attrib["cx"]), float(e.attrib["cy"]), e[0].text or "")
        for e in circles
    }


def words(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


def test_a_mark_has_the_position_and_the_cells_of_its_row() -> None:
    picture = show_strategies(TABLE)
    found = marks(picture.svg)
    assert found.keys() == {0, 1, 2, 4}, "a way without a step has no mark"
    xs = {i: (row.peak_device_bytes, found[i][0]) for i, row in enumerate(ROWS) if i in found}
    ys = {i: (row.seconds, found[i][1]) for i, row in enumerate(ROWS) if i in found}
    for values in (xs, ys):  # linear: any three lie on one line
        (a, pa), (b, pb) = values[0], values[4]
        for value, px in values.values():
            assert px == pytest.approx(pa + (pb - pa) * (value - a) / (b - a), abs=0.2)
    assert all(FIRST < x < LAST and UPPER < y < BOTTOM for x, y, _ in found.values())
    for i, (_, _, tip) in found.items():
        name, device, _, _, step, _ = picture.table.rows[i]
        assert tip == f"{name}: device {device} measured, step {step} simulated"
    assert picture.table.header[1:] == ("device, measured", "host, measured", "layer forwards", "step, simulated", "")


def test_the_table_and_its_page_agree_and_separate_measured_from_simulated() -> None:
    (rows, note), html = (strategies_table(TABLE).rows, strategies_table(TABLE).note), strategies_html(TABLE, chosen=1)
    assert rows[0] == ("Plain", "9 MB", "–", "4", "10 ms", "front, does not fit")
    assert rows[1] == ("Full <b>", "3 MB", "–", "8", "16 ms", "front")
    assert rows[2][-1] == "" and rows[3] == ("Rotor", "–", "–", "–", "–", "no plan") and ROWS[3].why in note
    assert "<b>" not in html and "<b>" not in draw_strategies(TABLE)
    for i, row in enumerate(rows):
        (body,) = re.findall(rf'<tr data-key="way-{i}"[^>]*>(.*?)</tr>', html)
        cells = re.findall(r"<td[^>]*>(.*?)</td>", body)
        assert cells == ([ROWS[3].why] if i == 3 else list(row[1:]))
    groups = re.findall(r'<th[^>]*class="l2l-how">(\w+)</th>', html)
    assert groups == ["measured", "counted", "simulated"] and html.count("l2l-chosen") == 1


def test_the_front_joins_the_unbeaten_strategies() -> None:
    svg = draw_strategies(TABLE)
    (x4, y4, _), (x1, y1, _), (x0, y0, _) = (marks(svg)[i] for i in (4, 1, 0))
    stairs = f"M{x4:.1f} {UPPER}V{y4:.1f}H{x1:.1f}V{y1:.1f}H{x0:.1f}V{y0:.1f}H{LAST}"
    assert f'd="{stairs}"' in svg
    assert any("budget 6 MB" in each for each in words(svg))


@pytest.mark.parametrize(("budget", "best"), [(None, 0), (6_000_000, 1), (2_500_000, 4), (1_000, 4), (10**12, 0)])
def test_the_best_way_is_the_fastest_that_fits_or_the_smallest(budget: int | None, best: int) -> None:
    table = StrategyTable(ROWS, budget)
    assert best_strategy(table) == best and ROWS[best].name in strategies_table(table).note
    assert ("None of these ways fits" in strategies_table(table).note) == (budget == 1_000)
    svg = draw_strategies(table, best)
    assert len(svg) < LIMIT and all(FIRST - 1 < x < LAST + 1 for x, _, _ in marks(svg).values())
    assert ("far above" in svg) == (budget == 10**12)


def test_a_table_without_a_step_is_still_a_picture() -> None:
    table = StrategyTable([ROWS[3]], 5)
    assert best_strategy(table) is None and "no way has a step" in words(draw_strategies(table))


def test_labels_of_ways_that_need_about_the_same_do_not_meet() -> None:
    rows = [StrategyResult(f"way of length {i}", 10**6 + i, 0, 4, 0.01 + 1e-9 * i) for i in range(9)]
    root = ElementTree.fromstring(
        draw_strategies(StrategyTable([*rows, StrategyResult("other", 2 * 10**6, 0, 4, 0.1)]))
    )
    texts = [e for e in root.iter() if e.tag.endswith("}text") and "way of" in "".join(e.itertext())]
    ys = sorted(float(e.attrib["y"]) for e in texts if float(e.attrib["x"]) == float(texts[0].attrib["x"]))
    assert len(ys) > 2 and all(b - a >= 13 for a, b in zip(ys, ys[1:], strict=False))


def test_the_plan_of_a_way_is_drawn_over_its_time_above_its_bytes() -> None:
    picture = show_strategy(recomputing(), 100, span_s=0.008, top_bytes=200)
    px = (RIGHT - LEFT) / 0.008
    bars = re.findall(r'<path d="((?:M[\d.]+ [\d.]+v-24h[\d.]+v24z)+)"', picture.svg)
    drawn = sorted((float(x), float(w)) for d in bars for x, w in re.findall(r"M([\d.]+) [\d.]+v-24h([\d.]+)", d))
    assert LANE == 24 and drawn[-1] == pytest.approx((LEFT + 0.003 * px, 0.001 * px), abs=0.2)
    assert sum(w for _, w in drawn) == pytest.approx(0.004 * px, abs=1)
    output = words(picture.svg)
    assert "forward again: recompute" in output and "update" in output and "budget 100 B" in output
    assert (
        "○ peak 90 B, measured" in output
        and "90 B of the device (measured), 4 ms (simulated), 2 layer forwards" in output
    )
    (ring,) = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4"', picture.svg)
    bottom = TOP + 30 + 34 + CHART
    assert float(ring[0]) == pytest.approx(LEFT + 0.00175 * px, abs=0.2)
    assert float(ring[1]) == pytest.approx(bottom - CHART * 90 / 200, abs=0.2)
    assert "data-key" not in picture.svg and "<b>" not in picture.svg and len(picture.svg) < LIMIT
    assert picture.table.rows == [("compute", "5, 1 of them recompute", "4 ms", "–")]
    assert picture.table.note == "Plan: Fck0 Fall1."


def test_a_relay_has_no_plan_and_no_update_behind_its_end() -> None:
    relay = replace(recomputing(), plan=None)
    assert "update" not in words(show_strategy(relay, None).svg) and strategy_table(relay).note == ""


def test_a_way_without_a_step_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match="no plan within 1 B"):
        show_strategy(ROWS[3], None)
