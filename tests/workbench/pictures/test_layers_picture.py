"""The layers table: all of few layers, the notable ones of many, everything escaped."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from workbench.pictures.stack_table import STYLE, USUAL_RATIOS, draw_layers, layers_table
from workbench.session.snapshot_values import LayerRow


def layer(
    number: int, norm: float | None = 0.5, ratio: float | None = 1e-3, name: str = "", **fields: bool
) -> LayerRow:
    key = f"L{number:03d}"
    params, frozen = 1000 + number, fields.get("frozen", False)
    return LayerRow(
        key, name or f"h.{number}", params, 4 * params, 7, frozen, norm, ratio, num_trained=0 if frozen else params
    )


def stack(count: int) -> list[LayerRow]:
    return [layer(i, norm=1.0 + math.sin(i) / 2, ratio=1e-3 * (1 + math.cos(i) / 2)) for i in range(count)]


def rows(html: str) -> list[list[str]]:
    """Return the cells of the body as text."""
    body = ElementTree.fromstring(html).find("./table/tbody")
    assert body is not None
    return [["".join(cell.itertext()) for cell in row] for row in body]


def bars(html: str) -> list[float]:
    """Return the widths of the bars in percent, row by row: gradient norm, ratio."""
    return [float(width) for width in re.findall(r'<i style="width:(\d+)%', html)]


def test_a_row_has_every_figure() -> None:
    (row,) = rows(draw_layers([layer(3, norm=0.25, ratio=2e-3)]))
    assert row == ["0", "L003", "h.3", "1,003", "4.01 kB", "7", "0.25", "2.00e-03", "–", ""]


@pytest.mark.parametrize(
    "trained, output",
    [(1003, ""), (20, "trains 2 %"), (1, "trains 0.1 %"), (501, "trains 50 %"), (1002, "trains 99 %")],
)
def test_the_trained_share_of_a_layer_is_shown(trained: int, output: str) -> None:
    partly = replace(layer(3), num_trained=trained)
    assert rows(draw_layers([partly]))[0][9] == output and layers_table([partly]).rows[0][9] == output


@pytest.mark.parametrize("count", [1, 12, 40])
def test_few_layers_are_all_shown(count: int) -> None:
    shown = rows(draw_layers(stack(count)))
    assert [row[0] for row in shown] == [str(i) for i in range(count)]


def test_of_many_layers_the_notable_ones_are_shown_and_the_others_counted() -> None:
    layers = stack(1000)
    layers[500] = layer(500, norm=1e6)
    layers[501] = layer(501, norm=1e-9)
    layers[502] = layer(502, ratio=0.9)
    layers[503] = layer(503, norm=math.nan)
    shown = rows(draw_layers(layers, computing="L700", changed={"L701"}))
    numbers = {int(row[0]) for row in shown if row[0]}
    assert {0, 11, 500, 501, 502, 503, 700, 701, 999} <= numbers and len(numbers) <= 60
    missing = sum(int(re.sub(r"\D", "", row[1])) for row in shown if not row[0])
    assert missing + len(numbers) == 1000
    assert list(map(int, filter(None, (row[0] for row in shown)))) == sorted(numbers)
    assert len(draw_layers(layers)) < 60_000


def test_influence_has_a_column_and_makes_layers_notable() -> None:
    layers = [replace(one, influence=0.3) for one in stack(1000)]
    layers[400], layers[600] = replace(layers[400], influence=1.25), replace(layers[600], influence=0.004)
    shown = {row[0]: row[8] for row in rows(draw_layers(layers)) if row[0]}
    assert shown["400"] == "1.25" and shown["600"] == "4.00e-03" and shown["0"] == "0.3"
    table = layers_table(layers)
    assert {row[0]: row[8] for row in table.rows}["400"] == "1.25" and table.header[8] == "influence"


def test_bars_are_logarithmic_over_the_layers() -> None:
    widths = bars(draw_layers([layer(i, norm=10.0**-i, ratio=1e-3) for i in range(4)]))[::2]
    steps = [a - b for a, b in zip(widths, widths[1:], strict=False)]
    assert widths[0] == 100 and widths[-1] > 0 and max(steps) - min(steps) <= 1


def test_the_band_holds_a_thousandth() -> None:
    html = draw_layers([layer(0, ratio=1e-3)])
    low, high = re.findall(r'<b style="left:(\d+)%;right:(\d+)%', html)[0]
    assert USUAL_RATIOS[0] < 1e-3 < USUAL_RATIOS[1]
    assert float(low) < bars(html)[1] < 100 - float(high)


def test_ratios_far_from_usual_are_marked_in_words() -> None:
    shown = rows(draw_layers([layer(0, ratio=1e-3), layer(1, ratio=0.5), layer(2, ratio=1e-7), layer(3, ratio=None)]))
    assert ["!" in row[7] for row in shown] == [False, True, True, False]


def test_before_the_first_step_there_are_no_figures() -> None:
    html = draw_layers([layer(0, None, None)])
    assert rows(html)[0][6:8] == ["–", "–"] and not bars(html)
    assert layers_table([layer(0, None, None)]).rows[0][6:8] == ("–", "–")


@pytest.mark.parametrize("figure", [0.0, math.nan, math.inf, 1e-300, 1e300])
def test_odd_figures_are_drawn(figure: float) -> None:
    html = draw_layers([layer(0, figure, figure), layer(1)])
    assert all(0 <= width <= 100 for width in bars(html))
    assert "width:nan" not in html and "width:inf" not in html


def test_the_state_of_a_layer_is_shown() -> None:
    html = draw_layers([layer(0), layer(1, frozen=True), layer(2)], computing="L000", changed=["L002"])
    body = ElementTree.fromstring(html).find("./table/tbody")
    assert body is not None
    assert [row.get("class") for row in body] == ["l2l-computing", "l2l-frozen", "l2l-changed"]
    assert rows(html)[1][9] == "frozen"


def test_names_are_escaped() -> None:
    html = draw_layers([layer(0, name='<b>"x"&')])
    assert "<b>" not in html.replace('<b style="left', "") and rows(html)[0][2] == '<b>"x"&'


def test_no_layers() -> None:
    assert rows(draw_layers([])) == [["no layers"]]
    assert layers_table([]).to_text().startswith("Layers")


def test_head_sticks_and_style_is_only_ours() -> None:
    assert "position:sticky" in STYLE and "max-height" in STYLE
    rules = [rule.partition("{")[0] for rule in STYLE.split("}") if rule.strip()]
    assert all(selector.strip().startswith(".l2l-") for rule in rules for selector in rule.split(","))
    assert STYLE.count("{") == STYLE.count("}")


def test_text_is_complete_up_to_sixty_rows() -> None:
    assert [row[0] for row in layers_table(stack(60)).rows] == [str(i) for i in range(60)]
    many = layers_table(stack(1000))
    assert len(many.rows) <= 60 and many.note == f"… {1000 - len(many.rows)} more"
    assert "frozen" in layers_table([layer(0, frozen=True)]).rows[0]


def test_same_input_same_table() -> None:
    assert draw_layers(stack(100), changed={"L050", "L060"}) == draw_layers(stack(100), changed={"L060", "L050"})
