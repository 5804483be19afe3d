"""The heat map: colours of cells, positions of rows and steps, and the size of the picture."""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from collections.abc import Sequence
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from workbench.pictures.colour_map import NOT_FINITE, SHADES, ColourScale, format_figure, palette, scale_marks
from workbench.pictures.heat_cells import FIGURE_KINDS
from workbench.pictures.heat_map import HIGHEST, MAX_ROWS, ROW, TOP, draw_heat, heat_table, show_heat
from workbench.pictures.loss_chart import draw_loss
from workbench.pictures.png import write_png
from workbench.pictures.stack_table import USUAL_RATIOS
from workbench.pictures.step_axis import LEFT, RIGHT, steps_scale
from workbench.session.snapshot_values import Change, LayerRow, StepRow
from workbench.session.statistics import Statistics, StatisticsLog

LIMIT = 60_000


def record(figures: Sequence[Sequence[float | None]], first: int = 1) -> Statistics:
    """Return statistics with one line of figures per layer, equal for all three kinds."""
    log = StatisticsLog()
    for step, step_figures in enumerate(zip(*figures, strict=True), start=first):
        log.append(step, [row(f"L{i:03d}", f"h.{i}", f) for i, f in enumerate(step_figures)])
    return log.view()


def stack(keys: str, norm: float | None = 1.0) -> list[LayerRow]:
    return [row(key, f"h.{i}", norm) for i, key in enumerate(keys)]


def row(key: str, name: str, figure: float | None) -> LayerRow:
    """Return a layer with equal figures; without a figure, it is frozen."""
    return LayerRow(key, name, 1, 4, 1, figure is None, figure, figure, figure, num_trained=0 if figure is None else 1)


def words(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


def description(svg: str) -> str:
    return next(e.text or "" for e in ElementTree.fromstring(svg) if e.tag.endswith("}desc"))


def tips(svg: str) -> list[str]:
    rects = [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}rect") and len(e)]
    return [rect[0].text or "" for rect in rects]


Box = tuple[float, float, float, float]  # x, y, width, height


def images(svg: str) -> list[tuple[Box, NDArray[np.uint8]]]:
    """Return boxes and pixels of the images; the first is the colour bar."""
    found = []
    for e in ElementTree.fromstring(svg).iter():
        if e.tag.endswith("}image"):
            assert "pixelated" in e.attrib["style"] and e.attrib["preserveAspectRatio"] == "none"
            kind, _, content = e.attrib["href"].partition(",")
            assert kind == "data:image/png;base64"
            box = tuple(float(e.attrib[name]) for name in ("x", "y", "width", "height"))
            found.append((box, read_png(base64.b64decode(content))))
    return found  # type: ignore[return-value]


def read_png(content: bytes) -> NDArray[np.uint8]:
    """Return the palette indices of a PNG, with the checks of a PNG reader."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, inside = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + inside),)
        chunks[kind] = inside
        at += 12 + length
    width, height, *how = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert how == [8, 3, 0, 0, 0] and list(chunks)[-1] == b"IEND"
    assert len(chunks[b"PLTE"]) == 3 * len(chunks[b"tRNS"])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def cells(svg: str) -> tuple[Box, NDArray[np.uint8]]:
    """Return the image of the layers in the stack, one row per layer."""
    return next((box, pixels) for box, pixels in images(svg)[1:] if pixels.max() > 1 or not pixels.any())


@pytest.mark.parametrize("figure", FIGURE_KINDS)
def test_more_is_a_later_shade_and_a_pixel_is_a_step(figure: str) -> None:
    values = [[0.001 * 1.3 ** ((7 * i + 3 * j) % 20) for j in range(30)] for i in range(5)]
    box, pixels = cells(draw_heat(record(values), figure))
    assert pixels.shape == (5, 30)
    order = np.argsort(np.ravel(values), kind="stable")
    assert (np.diff(pixels.ravel()[order].astype(int)) >= 0).all()
    assert pixels.min() >= 1 and pixels.max() <= SHADES and len(np.unique(pixels)) > 5
    x = steps_scale([1, 30])
    assert box == pytest.approx((x(0.5), TOP, x(30.5) - x(0.5), 5 * ROW), abs=0.06)


def test_equal_factors_are_equal_distances_for_norms_and_differences_for_influence() -> None:
    norms = cells(draw_heat(record([[1e-3 * 10 ** (i / 8) for i in range(25)]]), "grad_norm"))[1][0].astype(int)
    assert {*np.diff(norms).tolist()} <= {2, 3}
    parts = cells(draw_heat(record([[i / 40 for i in range(25)]]), "influence"))[1][0].astype(int)
    assert {*np.diff(parts).tolist()} <= {2, 3} and parts[0] == 1


def test_cells_line_up_with_the_loss() -> None:
    rows = [StepRow(step, 3.0 - step / 1000, 0.1, 4, 1, 1, 1, 1.0) for step in range(1, 151)]
    changes = [Change(70, "insert")]
    heat, loss = (
        draw_heat(record([[1.0] * 150] * 3), "grad_norm", changes),
        draw_loss(rows, changes),
    )
    numbers = [
        {e.text: float(e.attrib["x"]) for e in ElementTree.fromstring(svg).iter() if (e.text or "").isdecimal()}
        for svg in (heat, loss)
    ]
    shared = {step: x for step, x in numbers[1].items() if step in ("0", "20", "60", "100", "140")}
    assert len(shared) == 5 and all(numbers[0][step] == x for step, x in shared.items() if step != "0")
    lines = [re.findall(r'd="M([\d.]+) [\d.]+V[\d.]+" class="axis" stroke-dasharray', svg) for svg in (heat, loss)]
    assert lines[0] == lines[1] and len(lines[0]) == 1
    (left, _, width, _), _ = cells(heat)
    assert float(lines[0][0]) == pytest.approx(left + width * 70 / 150, abs=0.1), "between the cells of steps 70 and 71"
    assert left + width <= RIGHT + 0.01, "the newest column is complete"


def test_merged_columns_are_as_wide_as_their_steps() -> None:
    log = StatisticsLog(columns=4)
    for step in range(1, 12):  # columns of 4, 4 and 3 steps
        log.append(step, stack("a", norm=10.0 ** ((step - 1) // 4)))
    svg = draw_heat(log.view(), "grad_norm")
    pixels = cells(svg)[1]
    runs = np.flatnonzero(np.diff(pixels[0].astype(int))) + 1
    assert pixels.shape == (1, 11) and runs.tolist() == [4, 8]
    assert "a column is the mean of 4 steps" in words(svg)


def test_steps_without_a_record_are_empty() -> None:
    log = StatisticsLog()
    for step in (1, 2, 5, 6):
        log.append(step, stack("ab"))
    svg = draw_heat(log.view(), "grad_norm")
    assert cells(svg)[1].astype(bool).tolist() == [[True, True, False, False, True, True]] * 2


def test_of_many_dropped_layers_those_are_shown_that_left_last() -> None:
    log = StatisticsLog()
    log.append(1, stack("abcdefghij"))
    for left in ("abcdefghi", "abcdefgh", "bcdefgh", "bcdefg", "bcdef", "bcde", "bcd", "bc"):
        log.set_stack(stack(left))
    svg = draw_heat(log.view(), "grad_norm")
    assert images(svg)[-1][1].shape == (6, 1)
    assert any(word.startswith("dropped: 2 before and a, h") for word in words(svg))


def test_an_inserted_layer_is_empty_before_and_a_frozen_one_is_hatched() -> None:
    log = StatisticsLog()
    for step in range(1, 11):
        frozen = stack("ab" if step <= 4 else "axb", norm=float(step))
        if step > 7:
            frozen[0] = stack("a", norm=None)[0]
        log.append(step, frozen)
    svg = draw_heat(log.view(), "grad_norm")
    (_, grey), (_, colours) = images(svg)[1:]
    assert colours[0].astype(bool).tolist() == [True] * 7 + [False] * 3
    assert colours[1].astype(bool).tolist() == [False] * 4 + [True] * 6 and colours[2].all()
    assert grey.astype(bool).tolist() == [[False] * 7 + [True] * 3, [False] * 10, [False] * 10]
    assert "no figure, as when frozen" in words(svg) and svg.count('class="hatch"') == 2
    whole = draw_heat(record([[1.0, 2.0]]), "grad_norm")
    assert "no figure, as when frozen" not in words(whole) and len(images(whole)) == 2


def test_dropped_layers_are_below_the_others() -> None:
    log = StatisticsLog()
    log.append(1, stack("abcd"))
    log.append(2, stack("abd"))
    log.set_stack(stack("ad"))
    svg = draw_heat(log.view(), "grad_norm")
    _, (kept, rows), (dropped, below) = images(svg)
    assert rows.shape == (2, 2) and rows.all()
    assert below.astype(bool).tolist() == [[True, False], [True, True]]
    assert dropped[1] >= kept[1] + kept[3] + 10 and dropped[0] == kept[0] and dropped[2] == kept[2]
    assert "dropped: c, b" in words(svg)
    assert "Layers that were dropped: c, b." in description(svg)


def test_layers_are_drawn_in_the_order_of_the_stack() -> None:
    log = StatisticsLog()
    log.append(1, [*stack("a", 1.0), *stack("b", 100.0)])
    log.append(2, [*stack("b", 100.0), *stack("a", 1.0)])
    pixels = cells(draw_heat(log.view(), "grad_norm"))[1].astype(int)
    assert (pixels[0] > pixels[1]).all()


def test_figures_that_are_not_finite_are_crossed() -> None:
    svg = draw_heat(record([[1.0, math.inf, 2.0], [1.0, 1.0, math.nan]]), "update_ratio")
    pixels = cells(svg)[1]
    assert (pixels == NOT_FINITE).tolist() == [[False, True, False], [False, False, True]]
    crosses = re.findall(r'<path d="([^"]*)" stroke="#fff" stroke-width="1.4"', svg)
    assert [path.count("M") for path in crosses] == [1, 2] and "not finite" in words(svg)
    assert "Not finite in 2 places." in description(svg)


def test_the_bar_shows_every_shade_and_ends_at_round_values() -> None:
    svg = draw_heat(record([[0.013, 0.4, 70.0]]), "grad_norm")
    assert images(svg)[0][1].tolist() == [list(range(1, SHADES + 1))]
    assert {"0.01", "0.1", "1", "10", "100"} <= set(words(svg))


def test_usual_ratios_are_marked_on_the_bar() -> None:
    svg = draw_heat(record([[1e-3, 1.1e-3]]), "update_ratio")
    left, right = map(float, re.findall(r'd="M([\d.]+) 17v-4H([\d.]+)v4"', svg)[0])
    (bar_left, _, bar_width, _), _ = images(svg)[0]
    shades = ColourScale.of(np.array([[1e-3, 1.1e-3]], np.float32), FIGURE_KINDS["update_ratio"])
    assert shades.low < USUAL_RATIOS[0] and USUAL_RATIOS[1] < shades.high
    for x, value in ((left, USUAL_RATIOS[0]), (right, USUAL_RATIOS[1])):
        share = math.log(value / shades.low) / math.log(shades.high / shades.low)
        assert x == pytest.approx(bar_left + bar_width * share, abs=0.06)
    assert "usual" in words(svg) and "usual" not in words(draw_heat(record([[1e-3]]), "grad_norm"))


def test_one_outlier_does_not_flatten_the_others() -> None:
    random = np.random.default_rng(0)
    values = np.exp(random.normal(size=(8, 100)))
    values[3, 50] = 1e9
    svg = draw_heat(record(values.tolist()), "grad_norm")
    pixels = cells(svg)[1]
    assert pixels[3, 50] == SHADES and len(np.unique(pixels)) > SHADES / 2
    assert any(word.startswith("≥ ") for word in words(svg))
    assert "Largest gradient norm 1e9 in layer 3 · L003, at step 51." in description(svg)


def test_shades_get_lighter_from_little_to_much() -> None:
    def light(colour: Sequence[int]) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    nothing, *shades, broken = palette()
    lights = [light(colour) for colour in shades]
    assert len(shades) == SHADES and lights == sorted(lights) and lights[-1] > 20 * lights[0]
    assert nothing[3] == 0 and broken not in shades


@pytest.mark.parametrize("low", [1e-7, 3e-4, 0.9, 1.0, 12.0, 8e8])
@pytest.mark.parametrize("factor", [1.0, 1.5, 30.0, 1e6])
def test_scales_hold_their_values_and_have_marks_apart(low: float, factor: float) -> None:
    shades = ColourScale.of(np.array([low, low * factor], np.float32), FIGURE_KINDS["grad_norm"])
    assert shades.low <= low * 1.02 and low * factor <= shades.high * 1.02 and shades.high >= 4 * shades.low
    marks = scale_marks(shades, 210)
    places = [210 * float(shades.position(mark)) for mark in marks]
    assert marks[0] == shades.low and marks[-1] == shades.high
    assert all(b - a >= 30 for a, b in zip(places, places[1:], strict=False))


def test_figures_are_short() -> None:
    shown = [format_figure(value) for value in (0.0, 0.0123, 3.2e-4, 1e-5, 1.5e6, 1.0, math.inf)]
    assert shown == ["0", "0.0123", "3.2e-4", "1e-5", "1.5e6", "1", "inf"]


@pytest.mark.parametrize("figure", FIGURE_KINDS)
@pytest.mark.parametrize(("count", "steps"), [(64, 255), (65, 255), (1000, 255), (5000, 30)])
def test_many_layers_share_rows_in_a_small_picture(figure: str, count: int, steps: int) -> None:
    random = np.random.default_rng(count)
    log = StatisticsLog()
    for step in range(1, steps + 1):
        step_figures = np.exp(2 * random.normal(size=count)).tolist()
        log.append(step, [row(f"L{i:04d}", f"model.layers.{i}", f) for i, f in enumerate(step_figures)])
    view = log.view()
    svg = draw_heat(view, figure, [Change(step, f"change {step}") for step in range(0, steps, 10)])
    box, pixels = cells(svg)
    assert len(svg.encode()) < LIMIT
    assert len(pixels) <= MAX_ROWS and pixels.shape[1] == steps and box[3] == pytest.approx(HIGHEST, abs=0.1)
    assert any(word.startswith("a row is the") for word in words(svg)) == (count > MAX_ROWS)
    names = [word for word in words(svg) if word.isdecimal() and int(word) < count]
    assert "0" in names and len(tips(svg)) == len(pixels)


def test_rows_of_many_layers_show_the_largest_norm_and_the_mean_influence() -> None:
    values = [[float(1 + i % 10)] for i in range(640)]
    values[123] = [10_000.0]
    norms = draw_heat(record(values), "grad_norm")
    assert "a row is the largest of 10 layers" in words(norms)
    pixels = cells(norms)[1][:, 0]
    assert pixels.argmax() == 12 and len({*np.delete(pixels, 12).tolist()}) == 1
    assert "layers 120 to 129, gradient norm 1e4 at step 1" in tips(norms)
    values[123] = [None]  # type: ignore[list-item]
    influence = draw_heat(record(values), "influence")
    assert "a row is the mean of 10 layers" in words(influence)
    assert "layers 120 to 129, influence 5.67 at step 1" in tips(influence)
    assert "layers 130 to 139, influence 5.5 at step 1" in tips(influence)


def test_long_runs_stay_small() -> None:
    log, random = StatisticsLog(), np.random.default_rng(0)
    for step, step_figures in enumerate(np.exp(random.normal(size=(5000, 20))).tolist(), start=1):
        log.append(step, [row(f"L{i}", f"h.{i}", f) for i, f in enumerate(step_figures)])
    svg = draw_heat(log.view(), "grad_norm", [Change(i, f"change {i}") for i in range(5000)])
    assert len(svg.encode()) < LIMIT and cells(svg)[1].shape == (20, RIGHT - LEFT)


def test_numbers_and_keys_label_the_rows() -> None:
    log = StatisticsLog()
    keys = [*"gfedcba", "a key of many letters"]
    log.append(1, [row(key, f"transformer.h.{i}", 1.0) for i, key in enumerate(keys)])
    svg = draw_heat(log.view(), "grad_norm")
    labels = [
        e for e in ElementTree.fromstring(svg).iter() if e.get("text-anchor") == "end" and e.tag.endswith("}text")
    ]
    rows: dict[str, list[tuple[float, str]]] = {}
    for e in labels:
        if float(e.attrib["x"]) < LEFT and e.text and (e.text.startswith("· ") or e.text.isdecimal()):
            rows.setdefault(e.attrib["y"], []).append((float(e.attrib["x"]), e.text))
    output = [" ".join(text for _, text in sorted(rows[y])) for y in sorted(rows, key=float)]
    assert output[:7] == [f"{i} · {key}" for i, key in enumerate("gfedcba")]
    assert output[7].startswith("7 · a key") and output[7].endswith("…")
    assert len({x for row in rows.values() for x, _ in row}) == 2, "numbers below numbers, keys below keys"
    assert tips(svg)[5] == "layer 5 · b, transformer.h.5, gradient norm 1 at step 1"


def test_extremes_are_described() -> None:
    svg = draw_heat(record([[0.5, 0.25], [3.2, 0.001]], first=119), "grad_norm")
    output = description(svg)
    assert "Largest gradient norm 3.2 in layer 1 · L001, at step 119." in output
    assert "Smallest gradient norm 1e-3 in layer 1 · L001, at step 120." in output


@pytest.mark.parametrize("figure", FIGURE_KINDS)
@pytest.mark.parametrize(
    "figures",
    [
        [],
        [[], []],
        [[1.0]],
        [[None, None], [None, None]],
        [[2.0] * 5] * 3,
        [[0.0] * 5] * 3,
        [[math.inf, math.nan]],
        [[math.inf, 1.0, None], [0.0, 1e-38, 1e38]],
        [[-1e-9, 0.0]],
        [[1e-45, 3e38]],
        [[1.0] * 10] * 2,
    ],
)
def test_any_figures_are_drawn(figure: str, figures: list[list[float | None]]) -> None:
    view = record(figures)
    svg = draw_heat(view, figure, [Change(0, "a"), Change(1, "b")])
    ElementTree.fromstring(svg)
    drawn = "".join(re.findall(r' (?:d|x|y|cx|cy|width|height)="([^"]*)"', svg))
    assert "nan" not in drawn and "inf" not in drawn
    assert draw_heat(view, figure, [Change(0, "a"), Change(1, "b")]) == svg
    assert heat_table(view, figure).to_text() and show_heat(view, figure).table


def test_an_empty_picture_gives_the_reason() -> None:
    log = StatisticsLog()
    log.set_stack(stack("abc"))
    svg = draw_heat(log.view(), "grad_norm")
    assert "no step yet" in words(svg) and description(svg) == "No step yet." and len(images(svg)) == 1
    assert "no influence yet" in words(draw_heat(record([[None]]), "influence"))


def test_a_continued_run_does_not_begin_at_zero() -> None:
    svg = draw_heat(record([[1.0] * 50], first=5001), "grad_norm")
    (left, _, width, _), _ = cells(svg)
    assert left < LEFT + 20 and left + width > RIGHT - 1


def test_names_are_escaped() -> None:
    log = StatisticsLog()
    evil = row("<k>&", '<b>.<i>"&', 1.0)
    log.append(1, [evil, *stack("a")])
    log.append(2, stack("a"))
    log.append(3, [evil, *stack("a")])
    shown = draw_heat(log.view(), "grad_norm", [Change(1, "<u>&")], title="a < b")
    log.append(4, stack("a"))
    for svg in (shown, draw_heat(log.view(), "grad_norm")):
        assert "<b>" not in svg and "<u>" not in svg and "<k>" not in svg
        assert any('<k>&, last <b>.<i>"&' in tip or '0 · <k>&, <b>.<i>"&' in tip for tip in tips(svg))
    assert "<u>&" in words(shown) and "a < b" in words(shown)
    assert "<b>" not in heat_table(log.view(), "grad_norm").to_html()


@pytest.mark.parametrize("use", [draw_heat, heat_table, show_heat])
def test_no_such_figure(use: object) -> None:
    with pytest.raises(ValueError, match="no figure 'loss' of a layer; give one of grad_norm, update_ratio, influence"):
        use(record([[1.0]]), "loss")  # type: ignore[operator]


def test_the_table_has_a_few_steps_and_the_extremes_of_each_layer() -> None:
    table = heat_table(record([[float(step) for step in range(1, 101)], [None] * 100]), "grad_norm")
    assert table.header == (
        "layer",
        "key",
        "name",
        "step 1",
        "step 21",
        "step 41",
        "step 60",
        "step 80",
        "step 100",
        "smallest",
        "largest",
    )
    assert table.rows[0] == ("0", "L000", "h.0", "1", "21", "41", "60", "80", "100", "1", "100")
    assert table.rows[1] == ("1", "L001", "h.1", *"–" * 8) and table.note == ""


def test_the_table_names_dropped_layers_and_merged_steps() -> None:
    log = StatisticsLog(columns=2)
    for step in range(1, 6):
        log.append(step, stack("ab" if step <= 3 else "b", norm=float(step)))
    table = heat_table(log.view(), "grad_norm")
    assert table.header[3:5] == ("steps 1–4", "step 5") and table.note == "Figures of several steps are means."
    assert table.rows == [("0", "b", "h.0", "2.5", "5", "2.5", "5"), ("dropped", "a", "h.0", "2", "–", "2", "2")]


def test_the_table_of_many_layers_has_the_notable_ones() -> None:
    values = [[1.0 + i % 7] for i in range(1000)]
    values[400], values[600] = [1e6], [1e-9]
    table = heat_table(record(values), "grad_norm")
    numbers = [int(row[0]) for row in table.rows]
    assert {0, 11, 400, 600, 988, 999} <= set(numbers) and numbers == sorted(numbers) and len(numbers) <= 60
    assert table.note == f"… {1000 - len(numbers)} more layers."


def test_images_are_valid_png() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert (read_png(write_png(pixels, [(i, i, i, 255) for i in range(12)])) == pixels).all()
