"""The race chart shows its numbers over every axis and the tree of branches, and stays small."""

import itertools
import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from workbench.pictures.loss_curve import MIN_NAME_GAP
from workbench.pictures.race_chart import AXES, BARS, END, MAX_RACERS, TREE, Axis, draw_race, race_table, show_race
from workbench.pictures.step_axis import LEFT, LETTER, WIDTH
from workbench.pictures.theme import BLUE, GREEN, ORANGE
from workbench.session.probe_verdict import ProbeLosses
from workbench.session.race_result import Race, Racer
from workbench.session.snapshot_values import Change, StepRow

LIMIT = 60_000


def racer(name: str, count: int, flop: int, seconds: float, peak: int, probe: Sequence[float], **more: object) -> Racer:
    losses = [2 + 1 / (i + 1) + 0.1 * math.sin(7 * i) for i in range(count)]
    steps = [StepRow(i + 3, loss, seconds, 6, peak, 1, 1, 0.5, name) for i, loss in enumerate(losses)]
    measured = tuple((round(i * count / (len(probe) - 1)), ProbeLosses((p, p + 0.5), 0.1)) for i, p in enumerate(probe))
    return Racer(name, 2, 4, steps, [flop] * count, measured, **more)  # type: ignore[arg-type]


def slim(count: int = 40) -> Racer:
    changes = (
        Change(1, "before", "main", 0),
        Change(2, "forked slim <b>", "slim <b>"),
        Change(2, "drop layer 2", "slim <b>", 1),
    )
    return racer("slim <b>", count, 3_000_000, 0.5, 1_000_000, (3.0, 2.25, 2.0), parent="main", changes=changes)


def main(count: int = 40) -> Racer:
    changes = (Change(1, "before", "main", 0),)
    return racer("main", count, 4_000_000, 0.25, 4_000_000, (3.0, 2.0, 1.0), changes=changes)


def words(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]


@pytest.mark.parametrize("axis", AXES)
def test_curves_end_where_their_branch_has_spent_so_much(axis: Axis) -> None:
    race = Race(40, [main(), slim()], is_over=True)
    svg = draw_race(race, axis)
    ends = [
        float(re.findall(r"([\d.]+) [\d.]+", d)[-1]) for d in re.findall(r'<path d="(M[\d. L]+)" fill="none" str', svg)
    ]
    spent = {"steps": (40, 40), "flop": (120, 160), "seconds": (20, 10)}[axis]  # slim, main
    assert ends == pytest.approx([LEFT + (END - LEFT) * each / max(spent) for each in spent], abs=0.1)
    assert AXES[axis] in words(svg)
    assert svg.count("<circle") == 6, "a ring for every measurement"


@pytest.mark.parametrize("axis", AXES)
def test_every_line_has_its_name_at_its_end_in_its_colour(axis: Axis) -> None:
    twins = [
        racer(name, 40, 4_000_000, 0.25, 1, (3.0, 1.0)) for name in ("main", "a name of many, many letters", "twin")
    ]
    svg = draw_race(Race(40, twins), axis)
    names = [
        e for e in ElementTree.fromstring(svg).iter() if e.attrib.get("font-weight") == "600" and "fill" in e.attrib
    ]
    assert {e.text: e.attrib["fill"] for e in names} == {
        "main": BLUE,
        "a name of many, many le…": ORANGE,
        "twin": GREEN,
    }
    boxes = []
    for e in names:
        x, width, is_end = float(e.attrib["x"]), LETTER * len(e.text or ""), e.attrib.get("text-anchor") == "end"
        left = x - width if is_end else x
        assert LEFT < left and left + width <= WIDTH and abs(x - END) <= 8
        boxes.append((left, left + width, float(e.attrib["y"])))
    for (a, b, y), (c, d, z) in itertools.combinations(boxes, 2):
        assert b <= c or d <= a or abs(y - z) >= MIN_NAME_GAP - 0.2, "names do not overlap"


def test_the_tree_shows_forks_and_edits() -> None:
    svg = draw_race(Race(40, [main(), slim()]))
    fork = TREE[0] + (TREE[1] - TREE[0]) * 2 / 42
    assert re.search(rf'd="M{fork:.1f} [\d.]+V[\d.]+"', svg)
    assert svg.count("rotate(45)") == 2 and "After step 2: drop layer 2" in svg
    assert "slim &lt;b&gt;" in svg and "<b>" not in svg.replace("&lt;b&gt;", "")


def test_a_parent_that_does_not_race_is_in_the_tree() -> None:
    other = racer("other", 40, 1, 1.0, 1, (1.0, 1.0))
    assert "main" in words(draw_race(Race(40, [slim(), other])))


def test_bars_are_in_proportion_to_the_peak_of_memory() -> None:
    svg = draw_race(Race(40, [main(), slim()]))
    widths = [float(w) for w in re.findall(rf'<rect x="{BARS[0]:.2f}" y="[\d.]+" width="([\d.]+)"', svg)]
    assert len(widths) == 2 and widths[0] == pytest.approx(4 * widths[1], abs=0.05)


def test_the_table_has_the_difference_at_equal_compute_and_its_formula() -> None:
    table = race_table(Race(40, [main(), slim()], is_over=True, ended="it was stopped"))
    first, other = table.rows
    assert first[:3] == ("main", "4", "40 of 40") and first[5:8] == ("160 M", "10 s", "4 MB")
    # slim ends at 120 M: main was at 2.0 at 80 M and at 1.0 at 160 M
    assert other[8] == "▲ +0.5 ± 0 over 2 batches"
    assert "attention's included" in table.note and "estimated: 2 forward and 4 in backward" in table.note
    assert "it was stopped" in table.note


def test_departures_and_missing_measurements_are_noted() -> None:
    gone = Racer("gone", 0, 3, left="OSError in step 1 of the race: full", not_measured="the probe is off")
    picture = show_race(Race(4, [main(4), gone]))
    assert "gone has left, OSError in step 1" in picture.table.note and "the probe is off" in picture.table.note
    assert picture.table.rows[1][3:] == ("–", "–", "0", "0 ms", "–", "–", "–")
    assert "left the race" in words(picture.svg)


def test_before_the_first_step_there_is_a_picture_too() -> None:
    svg = draw_race(Race(4, [Racer("a", 0, 3), Racer("b", 0, 3)]))
    assert {"a", "b", "step", "steps"} & set(words(svg)) >= {"a", "b", "steps"}


def test_losses_that_are_not_finite_are_left_out() -> None:
    steps = [StepRow(i, loss, 1.0, 1, 1, 1, 1, 1.0) for i, loss in enumerate((1.0, math.nan, math.inf, 2.0))]
    broken = Racer("a", 0, 3, steps, [1] * 4, ((4, ProbeLosses((math.nan,), 0.0)),))
    svg = draw_race(Race(4, [broken, main(4)]))
    assert "nan" not in svg and "inf" not in svg


@pytest.mark.parametrize("axis", AXES)
def test_a_long_race_of_many_branches_is_a_small_picture(axis: Axis) -> None:
    many = [racer(f"branch {i}", 20_000, 1 + i, 0.1 + i, 10, (1.0, 2.0)) for i in range(MAX_RACERS + 4)]
    assert len(draw_race(Race(20_000, many), axis)) < LIMIT


def test_another_axis_is_refused() -> None:
    with pytest.raises(
        ValueError, match="axis='days' is not an axis of a race: give one of 'steps', 'flop', 'seconds'"
    ):
        draw_race(Race(4, [main(), slim()]), "days")  # type: ignore[arg-type]
