"""All views show the same number beside the key of a layer, also after edits."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

import pytest
from panel_reading import find, html_of, shown, widgets_of
from patience import HANG_S
from sessions import train

from l2l_core import Drop, Edit, Insert, Move
from workbench.panels.edits_panel import EditsPanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.panel import Panel
from workbench.panels.relay_panel import RelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.pictures.heat_cells import heat_table
from workbench.pictures.heat_map import draw_heat
from workbench.pictures.packed_frames import relay_frames
from workbench.pictures.plotly_figures import timeline_figure
from workbench.pictures.relay_picture import show_relay
from workbench.pictures.stack_table import layers_table
from workbench.session.session import Session

EDITS: list[tuple[Edit, ...]] = [
    (Insert(1, init="copy"),),
    (Drop("L001"),),
    (Move("L000", "L003"),),
    (Insert(0, init="copy"), Drop("L002"), Move("L003", "L000")),
]
NUMBER_AND_KEY = re.compile(r"(\d+) · (L\d+)")


def numbers_in(words: str) -> dict[str, str]:
    """Return the numbers by key, from every number in front of a key; check that a key has one number."""
    pairs = set(NUMBER_AND_KEY.findall(html.unescape(words)))
    found = {key: number for number, key in pairs}
    assert len(found) == len(pairs), f"a layer with two numbers: {sorted(pairs)}"
    return found


def check(words: str, numbers: Mapping[str, str], least: int = 1) -> None:
    found = numbers_in(words)
    assert found.items() <= numbers.items() and len(found) >= least, (found, numbers)


@pytest.mark.parametrize("edits", EDITS, ids=repr)
def test_all_views_use_the_same_number(session: Session, edits: tuple[Edit, ...]) -> None:
    train(session, 1)
    session.edit(*edits).result(HANG_S)
    train(session, 1)
    now = session.snapshot()
    numbers = {row.key: str(i) for i, row in enumerate(now.layers)}
    everyone = len(numbers)
    assert list(numbers) != [f"L{i:03d}" for i in range(4)] and now.last is not None
    assert [row.position for row in now.layers] == list(range(everyone)), "as Insert counts"

    player = RelayPanel(session)
    shown(player)
    check(html_of(player), numbers, everyone)  # cells of the host
    find(player, "The moment in words").value = True
    for _ in range(4):
        find(player, "Next visit").click()
        check(html_of(player), numbers, everyone)
    assert player._load_timeline().keys == tuple(numbers)  # type: ignore[union-attr]

    timeline = TimelinePanel(session)
    shown(timeline)
    check(html_of(timeline), numbers, everyone)
    for kind, letter in (("forward", "F"), ("update", "U")):
        expected, output = {(number, number, key) for key, number in numbers.items()}, set()
        for _ in range(20):  # bars narrower than two pixels have no label
            output = set(re.findall(rf"<title>{letter}(\d+) {kind} (\d+) · (L\d+)", html_of(timeline)))
            assert output <= expected, "bars and tooltips"
            if output == expected:
                break
            train(session, 1)
            timeline = TimelinePanel(session)
            shown(timeline)
        assert output == expected, "bars and tooltips"
    for trace in timeline_figure(now.last).data:
        check(" ".join(trace.hovertext), numbers, 0)
    check(relay_frames(now.last, now.layers).frame(0)[0], numbers, everyone)
    check(show_relay(now.last).svg, numbers, everyone)

    memory = MemoryPanel(session)
    shown(memory)
    strip = re.findall(r'text-anchor="middle" fill="#[0-9a-f]+">(\d+)<', html_of(memory))
    assert strip[0] == "0" and {*strip} <= {*numbers.values()}

    check(draw_heat(now.statistics, "grad_norm"), numbers, everyone)  # marks of edits have the numbers at their time
    for table in (heat_table(now.statistics, "grad_norm"), layers_table(now.layers)):
        assert {row[1]: row[0] for row in table.rows if row[0] != "dropped"} == numbers
    layers = LayersPanel(session)
    shown(layers)
    rows = re.findall(r"<td>(\d+)</td><th scope=\"row\"[^>]*>(L\d+)</th>", html_of(layers))
    assert {key: number for number, key in rows} == numbers

    form = EditsPanel(session)
    shown(form)
    for one in widgets_of(form):
        if getattr(one, "description", "") in ("from", "to", "layer", "and", "to the place of", "like", "where"):
            labels = dict(
                NUMBER_AND_KEY.match(label.removeprefix("before ")).groups()[::-1]
                for label, _ in one.options
                if "·" in label
            )  # type: ignore[union-attr]
            assert labels == numbers, one.description
    check(form._form.preview.value, numbers)


def test_the_journal_keeps_the_numbers_of_its_time(session: Session) -> None:
    train(session, 1)
    for edit in (Drop("L001"), Drop("L002"), Drop("L000")):
        session.edit(edit).result(HANG_S)
    session.undo().result(HANG_S)
    panel = EditsPanel(session)
    now = shown(panel)
    output = re.findall(r"<span>([^<]*)</span>", panel._journal.value)
    assert output == ["undid: dropped 0 · L000", "dropped 0 · L000", "dropped 1 · L002", "dropped 1 · L001"]
    assert [change.what for change in now.changes] == [
        "dropped 1 · L001",
        "dropped 1 · L002",
        "dropped 0 · L000",
        "undid: dropped 0 · L000",
    ]


@pytest.mark.parametrize("kind", [RelayPanel, TimelinePanel])
def test_picture_of_an_earlier_step_keeps_its_numbers(session: Session, kind: type[Panel]) -> None:
    train(session, 1)
    panel = kind(session)
    shown(panel)
    session.edit(Drop("L000")).result(HANG_S)
    shown(panel)
    then, today = {f"L{i:03d}": str(i) for i in range(4)}, {"L001": "0", "L002": "1", "L003": "2"}
    if isinstance(panel, RelayPanel):
        check(html_of(panel), today, 3)  # between steps: the current layers
        find(panel, "Next event").click()  # through the step before the edit
    check(html_of(panel), then, 4)
