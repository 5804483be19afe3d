"""The loss chart: no spike is lost, labels do not overlap, and 100,000 steps give a small picture."""

import math
import re
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import pytest

from workbench.pictures.loss_chart import BOTTOM, LEFT, RIGHT, TOP, draw_loss
from workbench.pictures.loss_details import loss_table
from workbench.pictures.scale import ticks
from workbench.session.snapshot_values import Change, StepRow

LIMIT = 60_000


def steps(losses: Sequence[float], first: int = 1) -> list[StepRow]:
    return [StepRow(first + i, loss, 0.5, 16, 3_000_000, 1, 1, 0.9) for i, loss in enumerate(losses)]


def curve(count: int) -> list[float]:
    return [2 + 4 / (1 + 10 * i / count) + 0.1 * math.sin(37 * i) for i in range(count)]


def words(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]


def strokes(svg: str) -> list[str]:
    """Return the path commands of the curves in the plot, without the legend's relative ones."""
    return re.findall(r'<path d="(M[\d.]+ [\d.VLM ]+)" fill="none" stroke="#0072B2"', svg)


def heights(d: str) -> list[float]:
    return [float(y) for y in re.findall(r"(?: |V)([\d.]+)", d)]


def test_every_loss_is_in_the_curve() -> None:
    svg = draw_loss(steps([5.0, 3.0, 4.0]))
    ys = heights(strokes(svg)[0])
    assert len(ys) == 3 and ys[0] < ys[2] < ys[1]
    assert ys[0] == TOP and ys[1] == BOTTOM  # the axis ends at round losses, 5 and 3
    assert {"step", "loss", "4"} <= {word.removesuffix(".0") for word in words(svg)}


def test_a_spike_among_many_steps_is_not_lost() -> None:
    losses = curve(100_000)
    losses[77_777] = 50.0
    svg = draw_loss(steps(losses))
    raw, smooth = strokes(svg)
    assert len(svg) < LIMIT
    assert min(heights(raw)) == pytest.approx(TOP, abs=0.1)
    assert min(heights(smooth)) > (TOP + BOTTOM) / 2
    assert len(heights(raw)) <= 2 * (RIGHT - LEFT + 1)


@pytest.mark.parametrize(("count", "lines"), [(2, 1), (40, 1), (41, 2), (5000, 2)])
def test_mean_runs_over_more_than_forty_steps(count: int, lines: int) -> None:
    svg = draw_loss(steps(curve(count)))
    assert len(strokes(svg)) == lines
    assert any(word.startswith("mean of") for word in words(svg)) == (lines == 2)


def test_mean_of_a_constant_is_the_constant() -> None:
    raw, smooth = (heights(d) for d in strokes(draw_loss(steps([3.0] * 500))))
    assert {*raw} == {*smooth} and len({*raw}) == 1


def test_losses_that_are_not_finite_are_marked_on_the_axis() -> None:
    svg = draw_loss(steps([4.0, math.nan, 3.0, math.inf, 2.0]))
    assert len(heights(strokes(svg)[0])) == 3
    assert svg.count(f" {BOTTOM - 4}l8 8") == 2 and "not finite" in words(svg)
    assert "not finite" not in words(draw_loss(steps([4.0, 3.0])))
    assert "Not finite in 2 steps, the first is 2." in svg


def test_the_last_value_is_labelled() -> None:
    assert "2.345" in words(draw_loss(steps([5.0, 2.3451])))
    assert "3.25" in words(draw_loss(steps([5.0, 3.25, math.nan])))


def test_changes_are_marked_between_steps_and_names_do_not_overlap() -> None:
    changes = [Change(i, f"change number {i}") for i in range(0, 200, 3)] + [Change(0, "and another")]
    root = ElementTree.fromstring(draw_loss(steps(curve(200)), changes))
    named = [e for e in root.iter() if e.tag.endswith("}text") and "change number" in (e.text or "")]
    assert len(named) >= 6 and any("change number 0, and another" in (e.text or "") for e in named)
    rows: dict[str, list[tuple[float, str]]] = {}
    for element in named:
        rows.setdefault(element.attrib["y"], []).append((float(element.attrib["x"]), element.text or ""))
    for row in rows.values():
        for (x, text), (following, _) in zip(sorted(row), sorted(row)[1:], strict=False):
            assert x + 5.8 * len(text) < following
        assert max(x + 5.8 * len(text) for x, text in row) <= RIGHT
    (dashed,) = (e for e in root.iter() if e.get("stroke-dasharray") == "3 4")
    xs = [float(x) for x in re.findall(r"M([\d.]+) ", dashed.attrib["d"])]
    assert len(xs) == 67 and xs[0] == pytest.approx(LEFT + (RIGHT - LEFT) * 0.5 / 200, abs=0.1)


def test_very_many_changes_stay_a_small_picture() -> None:
    changes = [Change(i, f"change {i}") for i in range(20_000)]
    svg = draw_loss(steps(curve(20_000)), changes, held_out=[(i, 3.0) for i in range(1, 20_000)])
    assert len(svg) < LIMIT and svg.count("<circle") <= 201


def test_other_branches_are_lines_with_names() -> None:
    own, other = steps([3.0, 2.0, 1.5]), steps([2.0, 9.0, 0.5, 0.25], first=2)
    alone = draw_loss(own, branch="main", others={})
    svg = draw_loss(own, branch="main", others={"<wide>": other, "empty": []})
    assert "training" in alone and "main" not in alone
    assert "&lt;wide&gt;" in svg and ">main<" in svg and "training" not in svg
    assert svg.count('stroke-dasharray="6 3"') == 1
    assert "Branch &lt;wide&gt;: 0.25 at step 5." in svg
    (line,) = re.findall(r'<path d="(M[^"]+)"[^>]+stroke-dasharray="6 3"', svg)
    assert len(heights(line)) == 4 and min(heights(line)) >= TOP, "the axis reaches as far as the other branch"


def test_very_many_branches_stay_a_small_picture() -> None:
    others = {f"branch {i}": steps([float(i % 7)] * 5000) for i in range(50)}
    assert len(draw_loss(steps([1.0] * 5000), others=others)) < LIMIT


def test_levels_and_held_out_points_are_named() -> None:
    svg = draw_loss(
        steps([5.0, 4.0]), title="a < b & c", held_out=[(2, 4.5)], levels=[("goal & more", 3.0)], unit="nats"
    )
    assert {"a < b & c", "goal & more: 3.00", "held out", "loss (nats)"} <= set(words(svg))
    assert "Held-out loss: 4.5 at step 2" in svg


def test_a_continued_run_does_not_begin_at_zero() -> None:
    assert "0" not in words(draw_loss(steps(curve(50), first=5001)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_loss([]),
        lambda: draw_loss([], [Change(0, "micro_batches 4 → 8")]),
        lambda: draw_loss(steps([5.0])),
        lambda: draw_loss(steps([math.nan])),
        lambda: draw_loss(steps([0.0, 0.0])),
        lambda: draw_loss(steps([-1e-12, 1e-12])),
        lambda: draw_loss(steps([1e9, 1e-9])),
        lambda: draw_loss(steps([3.0, 3.0]), held_out=[(2, 3.0)], levels=[("three", 3.0)]),
        lambda: draw_loss(steps([math.nan, 3.0, math.inf]), held_out=[(3, math.nan)]),
        lambda: draw_loss([], levels=[("three", 3.0)]),
    ],
)
def test_curves_of_few_points_are_drawn(draw: Callable[[], str]) -> None:
    svg = draw()
    ElementTree.fromstring(svg)
    drawn = "".join(re.findall(r' (?:d|x|y|cx|cy|width|height)="([^"]*)"', svg))
    assert "nan" not in drawn and "inf" not in drawn
    assert draw() == svg


def test_names_of_changes_are_escaped() -> None:
    svg = draw_loss(steps([3.0, 2.0]), [Change(1, "<b>&")])
    assert "<b>" not in svg and "<b>&" in words(svg)


def test_table_has_at_most_twenty_rows() -> None:
    table = loss_table(steps(curve(1000)), [Change(0, "start"), Change(999, "ahead 1 → 2"), Change(1000, "later")])
    assert len(table.rows) == 20 and table.rows[0][0] == "1" and table.rows[-1][0] == "1000"
    assert table.rows[0][3] == "start" and table.rows[-1][3] == "ahead 1 → 2" and "20 of 1000" in table.note
    assert len(loss_table(steps(curve(7))).rows) == 7 and loss_table([]).rows == []
    assert loss_table(steps([math.nan])).rows[0][1] == "nan"


def test_every_change_is_in_the_table_once() -> None:
    changes = [Change(i, f"<{i}>") for i in range(100)]
    table = loss_table(steps(curve(20)), changes[:20])
    assert [row[3] for row in table.rows] == [f"<{i}>" for i in range(20)]


@pytest.mark.parametrize(("low", "high"), [(0, 220), (0, 1), (2.0, 6.0), (0, 7), (0.5, 1.0), (0, 100_000)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    marks = ticks(low, high, 9)
    assert 2 <= len(marks) <= 9
    assert low - 1e-9 <= marks[0] and marks[-1] <= high + 1e-9
    step = marks[1] - marks[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5)
