"""The roofline chart: positions of the ridge and of the measured points."""

import math
import re
from xml.etree import ElementTree

import pytest

from workbench.pictures.roofline_chart import BOTTOM, TOP, RooflinePoint, show_roofline

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [RooflinePoint("K = 1", 10, 90.0), RooflinePoint("K = <4>", 40, 380.0), RooflinePoint("K = 100", 1000, 450.0)]


def drawn(flops_per_s: float = 500.0, bytes_per_s: float = 10.0) -> tuple[list[tuple[float, float]], list[tuple]]:
    """Return the corners of the roof and the centres of the points, in pixels."""
    tree = ElementTree.fromstring(show_roofline("Speed", flops_per_s, bytes_per_s, POINTS).svg)
    roof = next(p.attrib["d"] for p in tree.iter(f"{SVG}path") if p.attrib.get("stroke-width") == "2")
    corners = [(float(a), float(b)) for a, b in re.findall(r"[ML]([\d.]+) ([\d.]+)", roof)]
    return corners, [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in tree.iter(f"{SVG}circle")]


def test_the_bend_lies_where_link_and_device_bind_alike() -> None:
    (start, bend, stop), points = drawn()
    per_decade = (points[2][0] - points[0][0]) / 2  # px between 10 and 1000 operations per byte
    assert bend[0] == pytest.approx(points[0][0] + per_decade * math.log10(50 / 10), abs=0.2)
    assert bend[1] == stop[1] and start[1] > bend[1]
    corners, same = drawn(bytes_per_s=100.0)  # ten times the link: the bend is a decade to the left
    assert corners[1][0] < bend[0] and len(same) == len(points)


def test_points_lie_below_the_roof_by_what_is_missing() -> None:
    (_, bend, _), points = drawn()
    per_decade = (points[0][1] - points[1][1]) / math.log10(380 / 90)
    assert points[2][1] - bend[1] == pytest.approx(per_decade * math.log10(500 / 450), abs=0.3)
    assert all(TOP < y < BOTTOM for _, y in points)


def test_the_table_has_the_bound_and_the_share() -> None:
    table = show_roofline("Speed", 500.0, 10.0, POINTS).table
    assert table.rows[0] == ("K = 1", "10", "100 FLOP/s", "90 FLOP/s", "90%")
    assert table.rows[2] == ("K = 100", "1000", "500 FLOP/s", "450 FLOP/s", "90%")
    assert show_roofline("Speed", 0.5e9, 3.9e6, POINTS).table.note == "The device: 500 MFLOP/s. The link: 3.9 MB/s."


def test_names_are_escaped_and_the_picture_is_a_value() -> None:
    svg = show_roofline("Speed", 500.0, 10.0, POINTS).svg
    assert svg == show_roofline("Speed", 500.0, 10.0, list(POINTS)).svg
    assert "<4>" not in svg and "K = &lt;4&gt;" in svg


@pytest.mark.parametrize(
    "figures, output",
    [
        ((0.0, 10.0, POINTS), "flops_per_s=0.0"),
        ((500.0, math.inf, POINTS), "bytes_per_s=inf"),
        ((500.0, 10.0, [RooflinePoint("a", 1.0, -1.0)]), "flops_per_s of a=-1.0"),
        ((500.0, 10.0, []), "at least one"),
    ],
)
def test_what_has_no_place_is_refused(figures: tuple, output: str) -> None:
    with pytest.raises(ValueError, match=output):
        show_roofline("Speed", *figures)
