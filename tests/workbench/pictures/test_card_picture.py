"""Pictures of the layer card show their numbers, stay small, and mark old measurements."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from workbench.pictures.card_charts import draw_figures, draw_histogram
from workbench.pictures.layer_card import MAX_PARAMETERS, card_table, describe_age, describe_spread, facts_html
from workbench.pictures.trials_chart import MAX_LAYERS, show_trials
from workbench.readings import number_layers
from workbench.session.layer_facts import LayerFacts, ParameterFacts
from workbench.session.layer_trial import LayerTrial, StateVersion, TrialKind
from workbench.session.probe_verdict import LossChange, ProbeLosses
from workbench.session.snapshot_values import LayerRow
from workbench.session.statistics import StatisticsLog

NOW = StateVersion("main", 7, 1, 1)


def layer(i: int, norm: float | None = 0.5, stack: str | None = "h") -> LayerRow:
    return LayerRow(f"L{i:03d}", f"h.{i}", 12, 48, 3, False, norm, 1e-3, 0.2, stack, i, num_trained=12)


def facts(counts: tuple[int, ...] = (1, 0, 4, 2), parts: int = 1, broken: int = 0) -> LayerFacts:
    made = tuple(ParameterFacts(f"<w{i}>", (2, 3), "float32", bool(i % 2)) for i in range(parts))
    return LayerFacts("L001", "Block", made, counts, -1.0, 1.0, 0.25, 0.5, broken, 7, "main")


def trial(key: str, how: TrialKind, change: float, spread: float = 0.1, moment: StateVersion = NOW) -> LayerTrial:
    before, after = (1.0, 1.0), (1 + change - spread, 1 + change + spread)
    return LayerTrial(key, how, LossChange(ProbeLosses(before, 0.1), ProbeLosses(after, 0.1)), "", moment)


def bars(svg: str) -> dict[str, tuple[float, float]]:
    """Return top and height of every bar by its tooltip."""
    found = re.findall(
        r'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"[^>]*><title>([^<]+)</title>', svg
    )
    return {tip: (float(y), float(height)) for y, height, tip in found}


def test_the_histogram_has_a_bar_for_every_bin_with_weights_in_proportion() -> None:
    svg = draw_histogram(facts())
    ElementTree.fromstring(svg)
    assert [float(h) for h in re.findall(r"v-([\d.]+)h", svg)] == pytest.approx([15.5, 62, 31], abs=0.05)
    assert "0.25 ± 0.5 over the weights, from -1 to 1, after step 7" in svg and "up to 4 a bar" in svg


def test_weights_without_a_finite_one_are_reported() -> None:
    words = describe_spread(facts((), broken=1200))
    assert words == "1,200 weights are not finite; no finite weights, after step 7"
    assert words in draw_histogram(facts((), broken=1200))


def test_figures_are_drawn_over_the_steps_without_those_that_are_not_finite() -> None:
    log = StatisticsLog()
    for step, norm in enumerate((0.1, math.nan, 10.0, None, 1.0), start=1):
        log.append(step, [layer(0), layer(1, norm)])
    svg = draw_figures(log.view(), "L001")
    ElementTree.fromstring(svg)
    curve = re.search(r'<path d="M([^"]+)" stroke="#D55E00"', svg)
    assert curve is not None
    y = [float(point.split()[1]) for point in curve[1].split("L")]
    assert len(y) == 3 and y[2] == pytest.approx((y[0] + y[1]) / 2, abs=0.1), "1 is in the middle of 0.1 and 10"
    assert "gradient norm 1, log scale" in svg and "steps 1–5" in svg and "0.1 to 10" in svg
    assert draw_figures(log.view(), "L009").count("none yet") == 3


def test_names_are_escaped_and_many_parameters_cut_short() -> None:
    numbers = number_layers(["L000", "L001"])
    output = facts_html(layer(1, stack=None), numbers, facts(parts=MAX_PARAMETERS + 3))
    assert "<w0>" not in output and "&lt;w0&gt;" in output and "… 3 more" in output and "2 × 3" in output
    assert "1 · L001" in output and "cannot be edited" in output and "Block" in output
    text = card_table(layer(1), numbers, facts(), [trial("L001", "twice", 0.5)], NOW).to_text()
    assert "loss with it twice" in text and "▲ +0.5" in text and "after step 7" in text


@pytest.mark.parametrize(
    "moment, words",
    [
        (NOW, "after step 7"),
        (StateVersion("main", 5, 1, 1), "old: after step 5, now it is step 7"),
        (StateVersion("main", 7, 0, 0), "old: after step 7 and edits or settings since"),
        (StateVersion("wide", 7, 1, 1), "old: after step 7 of wide, now it is step 7"),
    ],
)
def test_measurements_of_another_state_are_marked_old(moment: StateVersion, words: str) -> None:
    assert describe_age(moment, NOW) == words
    assert words in show_trials([layer(0)], [trial("L000", "without", 0.5, moment=moment)], {"L000": 0}, NOW).svg


def test_bars_of_several_steps_name_them_and_count_old_ones() -> None:
    found = [trial(f"L00{i}", "without", 0.5, moment=StateVersion("main", 5 + i, 1, 1)) for i in range(3)]
    rows = [layer(i) for i in range(3)]
    svg = show_trials(rows, found, number_layers(row.key for row in rows), NOW).svg
    assert "after steps 5–7; 2 of 3 are old, now it is step 7" in svg


def test_bars_are_as_high_as_the_change_and_have_their_spread() -> None:
    rows = [layer(i) for i in range(3)]
    found = [trial("L000", "without", 0.4), trial("L000", "twice", -0.2), trial("L002", "without", 0.2, 0.0)]
    picture = show_trials(rows, found, number_layers(row.key for row in rows), NOW)
    ElementTree.fromstring(picture.svg)
    (tall, down, small) = bars(picture.svg).values()
    assert tall[1] == pytest.approx(2 * down[1], abs=0.2) and tall[1] == pytest.approx(2 * small[1], abs=0.2)
    assert down[0] == pytest.approx(tall[0] + tall[1], abs=0.2), "below zero"
    assert picture.svg.count('stroke-width="1.4"') == 2, "one has no spread"
    assert [(row[0], row[1]) for row in picture.table.rows] == [("0", "L000"), ("0", "L000"), ("2", "L002")]


def test_what_could_not_be_measured_is_listed_and_not_drawn() -> None:
    failed = LayerTrial("L000", "without", None, "one must stay", NOW)
    broken = LayerTrial("L000", "twice", LossChange(ProbeLosses((1.0,), 0.1), ProbeLosses((math.inf,), 0.1)), "", NOW)
    picture = show_trials([layer(0)], [failed, broken], {"L000": 0}, NOW)
    assert "no finite measurement" in picture.svg and not bars(picture.svg)
    assert "not measured: one must stay" in picture.table.to_text() and "not finite" in picture.table.to_text()


def test_of_many_layers_those_that_change_most_are_shown_in_little_room() -> None:
    rows = [layer(i) for i in range(1000)]
    found = [
        trial(row.key, how, math.sin(i) * (1 + i / 1000)) for i, row in enumerate(rows) for how in ("without", "twice")
    ]  # type: ignore[arg-type]
    picture = show_trials(rows, found, number_layers(row.key for row in rows), NOW)
    assert len(bars(picture.svg)) == len(picture.table.rows) == MAX_LAYERS and len(picture.svg.encode()) < 60_000
    assert f"the {MAX_LAYERS} of 2000 that change most" in picture.svg
    assert picture.table.note in picture.table.to_text()
