"""The loss chart with held-out data, metrics, other axes and epochs, and the picture of a learning-rate finder."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from sessions import make_relay

from workbench.pictures.amount_axis import StepAmounts, axis_options
from workbench.pictures.loss_chart import BOTTOM, LEFT, METRIC, RIGHT, TOP, LossView, draw_loss, held_out_points
from workbench.pictures.loss_details import loss_table
from workbench.pictures.lr_curve import LRCurve
from workbench.pictures.scale import LogScale, log_ticks
from workbench.pictures.session_header import header_facts, header_html, progress_html
from workbench.session.background_work import WorkRow
from workbench.session.snapshot_rows import snapshot_of
from workbench.session.snapshot_values import HeldOutRow, StepRow

VERMILION, BLUE = "#D55E00", "#0072B2"


def rows(count: int, first: int = 1, per_epoch: int = 20) -> list[StepRow]:
    """Steps that take longer and longer."""
    return [
        replace(
            StepRow(first + i, 4.0 / (i + 1) ** 0.3, 0.1 * (i + 1), 8, 1, 1, 1, 1.0),
            lr=0.1 / (i + 1),
            epoch=1 + i // per_epoch,
            tokens=64,
            flop=1000,
        )
        for i in range(count)
    ]


HELD_OUT = [HeldOutRow(step, {"loss": 3.5 - step / 50, "accuracy": step / 100}) for step in range(0, 61, 10)]


def words(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


def lines(svg: str, colour: str) -> list[tuple[list[tuple[float, float]], str]]:
    """Return the points of the polylines of a colour, each with its attributes."""
    found = re.findall(rf'<path d="(M[\d.]+ [^"]+)" fill="none" (stroke="{colour}"[^>]*)/>', svg)
    return [([(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", d)], style) for d, style in found]


def test_held_out_curve_is_bold_and_the_training_loss_faint() -> None:
    plain = draw_loss(rows(60))
    svg = draw_loss(rows(60), held_out=held_out_points(HELD_OUT))
    ((points, style),) = lines(svg, VERMILION)
    assert len(points) == 7 and 'stroke-width="3"' in style
    assert "held out" in words(svg) and "held out" not in words(plain)
    raw, smooth = (style for _, style in lines(svg, BLUE))
    assert "stroke-opacity" in raw and "stroke-opacity" not in smooth
    (short,) = (style for _, style in lines(draw_loss(rows(20), held_out=held_out_points(HELD_OUT[:2])), BLUE))
    assert "stroke-opacity" in short, "faint without a mean, too"
    assert "Held-out loss: 3.5 at step 0, 2.3 at step 60." in svg


def test_metrics_have_their_own_chart() -> None:
    view = LossView(f"{METRIC}accuracy")
    svg = draw_loss(rows(60), held_out=held_out_points(HELD_OUT, view.metric), view=view)
    assert "accuracy" in words(svg) and not lines(svg, BLUE) and "held out 0.6" in words(svg)
    assert "not measured yet" in words(draw_loss(rows(5), view=view))


def test_learning_rate_and_speed_are_drawn() -> None:
    svg = draw_loss(rows(60), view=LossView("lr"))
    assert "learning rate" in words(svg) and len(lines(svg, BLUE)) == 1
    steps = [replace(row, lr=None) if row.step == 3 else row for row in rows(6)]
    ((points, _),) = lines(draw_loss(steps, view=LossView("lr")), BLUE)
    assert len(points) == 5, "a step without a rate has no point"
    assert "tokens per second" in words(draw_loss(rows(6), view=LossView("speed")))


def test_axes_place_steps_by_what_they_spent() -> None:
    steps = rows(4)
    for axis, spent in (("tokens", 64 * 2 / 256), ("seconds", 0.3 / 1.0), ("flop", 0.5)):
        view = LossView(axis=axis)  # type: ignore[arg-type]
        ((points, _),) = lines(draw_loss(steps, view=view), BLUE)
        assert points[1][0] == pytest.approx(LEFT + (RIGHT - LEFT) * spent, abs=0.1)
        ((held_out, _),) = lines(draw_loss(steps, held_out=[(0, 3.0), (2, 2.0)], view=view), VERMILION)
        assert held_out[0][0] == LEFT and held_out[1][0] == points[1][0], "a measurement stands at its step"
    assert [label for label, _ in axis_options(steps)] == ["steps", "tokens", "seconds", "FLOP"]
    assert [label for label, _ in axis_options([replace(steps[0], tokens=8, flop=0)])] == ["steps", "rows", "seconds"]


def test_another_branch_begins_at_what_the_first_has_spent() -> None:
    other = [replace(row, branch="wide", seconds=2.0) for row in rows(2, first=3)]
    assert StepAmounts(rows(2), "seconds")(2) == pytest.approx(0.3)
    svg = draw_loss(rows(4), others={"wide": other}, view=LossView(axis="seconds"))
    (d,) = re.findall(r'<path d="(M[^"]+)"[^>]+stroke-dasharray="6 3"', svg)
    xs = [float(x) for x, _ in re.findall(r"([\d.]+) ([\d.]+)", d)]
    assert xs == pytest.approx([LEFT + (RIGHT - LEFT) * at / 4.3 for at in (2.3, 4.3)], abs=0.1)


def test_log_scale_needs_positive_values() -> None:
    steps = [replace(row, loss=10.0 ** (2 - row.step)) for row in rows(4)]
    ((points, _),) = lines(draw_loss(steps, view=LossView(log=True)), BLUE)
    ys = [y for _, y in points]
    assert (ys[0], ys[-1]) == (TOP, BOTTOM)
    assert [b - a for a, b in zip(ys, ys[1:], strict=False)] == pytest.approx([(BOTTOM - TOP) / 3] * 3, abs=0.2)
    steps[1] = replace(steps[1], loss=0.0)
    assert draw_loss(steps, view=LossView(log=True)) == draw_loss(steps), "0 has no logarithm: the scale is linear"
    near = draw_loss([replace(row, loss=2.0 + row.step / 10) for row in rows(4)], view=LossView(log=True))
    assert {"2.15", "2.40"} <= {*words(near)}


@pytest.mark.parametrize(("low", "high"), [(1e-7, 1.0), (0.02, 3.0), (1.0, 1e40), (0.1, 10.0)])
def test_marks_of_a_logarithmic_axis_are_round_and_inside(low: float, high: float) -> None:
    marks = log_ticks(low, high, 9)
    assert 2 <= len(marks) <= 9 and low * 0.999 <= marks[0] and marks[-1] <= high * 1.001
    assert {f"{mark:.0e}"[0] for mark in marks} <= {"1", "2", "5"}
    scale = LogScale(low, high, 0.0, 100.0)
    assert (scale(low), scale(high)) == pytest.approx((0.0, 100.0))


def test_epochs_are_marked_and_short_ones_thinned_out() -> None:
    assert [word for word in words(draw_loss(rows(60))) if word.startswith("epoch")] == ["epoch 2", "epoch 3"]
    many = [word for word in words(draw_loss(rows(2000, per_epoch=5))) if word.startswith("epoch")]
    assert "epoch 50" in many and len(many) <= 16
    without = [replace(row, epoch=None) for row in rows(60)]
    assert not [word for word in words(draw_loss(without)) if word.startswith("epoch")]


def test_values_can_be_read_under_the_pointer() -> None:
    svg = draw_loss(rows(60), held_out=held_out_points(HELD_OUT))
    tips = [e.text or "" for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}title")]
    (tip,) = (tip for tip in tips if tip.startswith("step 25 ·"))
    assert "held-out loss 3.1 (step 20)" in tip and "lr 0.004" in tip and "epoch 2" in tip and "tokens/s" in tip
    assert len(draw_loss(rows(5000), held_out=held_out_points(HELD_OUT))) < 60_000


def test_table_has_measurements_since_the_row_before() -> None:
    table = loss_table(rows(60), (), HELD_OUT)
    assert table.header[:5] == ("step", "loss", "held-out loss", "held-out accuracy", "learning rate")
    by_step = {row[0]: row for row in table.rows}
    assert by_step["60"][2:4] == ("2.3", "0.6") and by_step["1"][2:4] == ("3.5", "0")
    assert "Lowest held-out loss: 2.3 after step 60." in table.note


def test_header_has_rates_and_the_reason_of_a_pause() -> None:
    with make_relay() as relay:
        now = snapshot_of(relay, rows(3))
    now = replace(now, held_out=HELD_OUT[:1], notice="Stopped early: <why>.")
    facts = header_facts(now)
    assert {"held out 3.5", "epoch 1", "lr 0.0333"} <= {*facts} and any(fact.endswith("tokens/s") for fact in facts)
    assert "Stopped early: &lt;why&gt;." in progress_html(now)
    work = WorkRow("evaluating", "held-out batches", 2, 8, 3.0)
    now = replace(now, work=work)
    assert "2 of 8 held-out batches, 9 s left" in progress_html(now) and "▶ evaluating" in header_html(now)
    unknown = replace(now, work=replace(work, total=None))
    assert "2 held-out batches<" in progress_html(unknown)


# The learning-rate finder ---------------------------------------------------------------------------------------------

RATES = [10.0 ** (i / 4 - 5) for i in range(21)]


def test_a_finding_displays_its_curve_and_its_rule() -> None:
    found = LRCurve(RATES, [3.0 - 1.5 / (1 + math.exp(10 - i)) for i in range(21)])
    assert found.suggestion is not None and 1e-3 < found.suggestion < 3e-2
    bundle = found._repr_mimebundle_()
    assert "Suggested: " in bundle["text/html"] and "arXiv 1506.01186" in bundle["text/html"]
    assert f"{found.suggestion:.2g}" in words(found.picture.svg)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "found",
    [
        LRCurve([], [], "the loss is not finite at a rate of 1e-07"),
        LRCurve([1e-3], [2.0], "the loss diverged at a rate of 0.001"),
        LRCurve(RATES, [2.0] * 21),
        LRCurve(RATES, [-1.0 * i for i in range(21)]),
        LRCurve(RATES, [2.0] * 20 + [1e30], "the loss diverged at a rate of 1"),
    ],
)
def test_findings_of_all_kinds_are_drawn(found: LRCurve) -> None:
    svg = found.picture.svg
    ElementTree.fromstring(svg)
    drawn = "".join(re.findall(r' (?:d|x|y|width|height)="([^"]*)"', svg))
    assert "nan" not in drawn and "inf" not in drawn and found.ended in found.picture.table.note
