"""The relay picture shows the state, is well-formed and escaped, and stays small at any depth."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from l2l_core import EmulatedDevice, Event, Machine, Profile, RelayConfig, Shapes, Trace, simulate
from l2l_core.config import StashLocation
from workbench.pictures.eps_box import CellGrid
from workbench.pictures.relay_picture import draw_relay, relay_table, show_relay
from workbench.readings.state_timeline import StateTimeline
from workbench.readings.step_state import LaneActivity, PushState, SlotState, StepState

NAMESPACE = "{http://www.w3.org/2000/svg}"


def step(depth: int, micro_batches: int = 4, ahead: int = 1, stash: StashLocation = "host") -> Trace:
    machine = Machine(flops_per_s=5e10, update_params_per_s=3e8, h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)
    shapes = Shapes(
        layer_params=[100_000] * depth,
        shell_params=50_000,
        tokens=128,
        boundary_bytes=131_072,
        micro_batches=micro_batches,
        stash=stash,
    )
    config = RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash)
    device = EmulatedDevice(memory_bytes=64_000_000, h2d_bytes_per_s=2e9, d2h_bytes_per_s=2e9)
    return simulate(Profile.of_shapes(shapes, machine), config, device)


def words_of(drawn: str) -> list[str]:
    """Return all visible text, in order."""
    return [element.text or "" for element in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}text")]


def keys_of(depth: int) -> list[str]:
    return [f"L{i:03d}" for i in range(depth)]


def busy(keys: list[str]) -> StepState:
    """Return a state in mid-backward with all lanes busy."""
    return StepState(
        event=142,
        num_events=528,
        t_s=0.214,
        phase="backward",
        lanes={
            "compute": LaneActivity("backward", keys[2], 2, 0, 0.5),
            "h2d": LaneActivity("load", keys[1], -1, 50_000, 0.62),
            "d2h": LaneActivity("push", keys[3], -1, 40_000, 0.25),
            "eps": LaneActivity("update", keys[4], -1, 0, 0.5),
        },
        slots=(SlotState(keys[2]), SlotState(keys[1], 0.62)),
        layer=keys[2],
        k=2,
        micro_batches=8,
        kind="backward",
        accumulating=keys[2],
        pushing=(PushState(keys[3], 0.25),),
        eps_layer=keys[4],
        eps_kind="update",
        updated=(keys[5],),
        num_stashed=24,
        stash="host",
        device={"weights": 1_000_000, "stash": 20_000},
        host={"weights": 6_000_000, "stash": 400_000},
        device_peak_bytes=1_500_000,
        stash_peak_bytes=800_000,
        line=8,
        other_lines=((6, "h2d"), (9, "d2h"), (10, "eps")),
    )


def test_a_busy_state_is_drawn_completely() -> None:
    words = words_of(draw_relay(busy(keys_of(6)), keys_of(6), device="a device", budget_bytes=2_000_000))
    for wanted in (
        "load 1", "push 3", "updates 4", "back k = 3 of 8", "loading 62 %", "adds up 2", "3 leaves", "1 of 6 updated",
        "24 inputs, 400 kB", "1.02 MB of 2 MB", "event 143 of 528", "214 ms", "backward", "a device", "50 kB", "40 kB",
    ):  # fmt: skip
        assert wanted in words, wanted


@pytest.mark.parametrize("depth, ahead", [(1, 0), (3, 0), (12, 3), (24, 1), (96, 1), (384, 5), (1000, 1), (1000, 30)])
def test_any_depth_is_well_formed_and_small(depth: int, ahead: int) -> None:
    trace = step(depth, 2, ahead)
    moments = StateTimeline.of(trace)
    names = {key: f"model.decoder.layers.{key}.with.a.long.name" for key in moments.keys}
    versions = dict.fromkeys(moments.keys, 12345)
    everywhere = [0, 1, moments.count // 3, moments.busiest_event(), moments.count - 1]
    for i in everywhere:
        for frozen in ((), moments.keys[: depth // 2], moments.keys):
            drawn = draw_relay(
                moments.at_event(i),
                moments.keys,
                names=names,
                versions=versions,
                frozen=frozen,
                budget_bytes=64_000_000,
            )
            ElementTree.fromstring(drawn)
            assert len(drawn.encode()) < 60_000
            assert "nan" not in drawn and "inf" not in drawn.replace("inflight", "")


def test_states_that_alternate_stay_small() -> None:
    keys = keys_of(1000)
    updated = replace(busy(keys), updated=tuple(keys[1::2]))
    waiting = replace(busy(keys), updated=(), arrived=frozenset(keys[1::2]))
    for moment in (updated, waiting):
        drawn = draw_relay(moment, keys, frozen=keys[::2])
        ElementTree.fromstring(drawn)
        assert len(drawn.encode()) < 60_000


@pytest.mark.parametrize("depth", [3, 12, 24, 32, 96])
def test_every_layer_has_its_number(depth: int) -> None:
    moments = StateTimeline.of(step(depth))
    words = words_of(draw_relay(moments.at_event(moments.busiest_event()), moments.keys))
    assert {str(i) for i in range(depth)} <= set(words)


def test_cells_follow_the_order_of_the_stack() -> None:
    keys = ["L003", "L000", "L007"]
    drawn = draw_relay(StepState(), keys)
    assert [word for word in words_of(drawn) if word in ("0", "1", "2", "3", "7")] == ["0", "1", "2"]
    tips = [e.text for e in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}title") if "·" in (e.text or "")]
    assert tips == ["0 · L003", "1 · L000", "2 · L007"]


@pytest.mark.parametrize("depth", [1, 2, 8, 9, 32, 33, 100, 1000])
def test_cells_lie_side_by_side_in_their_box(depth: int) -> None:
    grid = CellGrid(depth, 20, 40, 300, 170)
    places = [tuple(map(float, re.findall(r"-?[\d.]+", grid.boxes([i])))) for i in range(depth)]
    assert len({place[:2] for place in places}) == depth
    for x, y, wide, high, _ in places:
        assert 20 <= x and x + wide <= 320.1 and 40 <= y and y + high <= 210.1
        assert wide >= 3 and high >= 3


def test_nothing_moves_while_states_change() -> None:
    moments = StateTimeline.of(step(24))
    places = set()
    for i in range(0, moments.count, 7):
        root = ElementTree.fromstring(draw_relay(moments.at_event(i), moments.keys))
        texts = [e for e in root.iter(f"{NAMESPACE}text")]
        numbers = tuple((e.get("x"), e.get("y")) for e in texts if e.get("font-size") == "11.9" or e.text == "memory")
        cards = tuple((e.get("x"), e.get("width")) for e in root.iter(f"{NAMESPACE}rect") if e.get("class") == "card")
        places.add((numbers, cards, root.get("viewBox")))
    assert len(places) == 1


def test_what_users_name_is_escaped() -> None:
    keys, evil = keys_of(6), '<script>alert("&")</script>'
    drawn = draw_relay(busy(keys), keys, names=dict.fromkeys(keys, evil), device=evil)
    assert "<script>" not in drawn
    assert any(element.text and evil in element.text for element in ElementTree.fromstring(drawn).iter())
    strange = ["<a>", "&b", '"c"', "d'", "e", "f"]
    ElementTree.fromstring(draw_relay(busy(strange), strange))
    assert "<a>" not in relay_table(busy(strange), strange).to_html()


def test_the_same_moment_is_the_same_string() -> None:
    trace = step(12)
    first, second = StateTimeline.of(trace), StateTimeline.of(trace)
    i = first.busiest_event()
    assert draw_relay(first.at_event(i), first.keys) == draw_relay(second.at_event(i), second.keys)


def test_the_running_line_of_the_algorithm_is_highlighted() -> None:
    drawn = draw_relay(busy(keys_of(6)), keys_of(6))
    strong = re.findall(r'class="code strong">([^<]*)<', drawn)
    assert strong == ["recompute, back-propagate"]
    assert len(re.findall(r'class="code">', drawn)) == 3


def test_a_kept_graph_is_not_recomputed() -> None:
    keys = keys_of(6)
    moment = replace(busy(keys), graph_kept=True)
    drawn = draw_relay(moment, keys)
    [(size, words)] = re.findall(r'font-size="([\d.]+)" class="code strong">([^<]*)<', drawn)
    assert words == "no recompute, back-propagate" and "nothing is recomputed" in drawn
    assert 0.6 * float(size) * len(words) <= 174, "inside of the bar behind it"
    assert {name: value for name, value in relay_table(moment, keys).rows}["algorithm"] == words


def test_waiting_is_shown_in_place() -> None:
    keys = keys_of(6)
    waiting = replace(busy(keys), layer=None, waits_for=keys[1], k=-1, lanes={"h2d": busy(keys).lanes["h2d"]})
    words = words_of(draw_relay(waiting, keys))
    assert "waits for 1" in words and "awaited 62 %" in words and "back k = 3 of 8" not in words
    assert "waits for layer 1" in draw_relay(waiting, keys)


def test_between_steps_all_layers_rest() -> None:
    moment, keys = busy(keys_of(6)), keys_of(6)
    words = words_of(draw_relay(moment, keys, idle=True))
    assert words.count("empty") >= 2 and "at rest" in words
    assert not any(word.startswith(("back k", "updates 4", "load 1", "push 3", "event")) for word in words)
    assert any("6 layers rest in the EPS" in word for word in words)
    assert words_of(draw_relay(StepState(), [])) and "no step" in relay_table(StepState(), []).title


def test_more_slots_than_there_is_room_for_are_counted() -> None:
    keys = keys_of(20)
    moment = replace(busy(keys), slots=tuple(SlotState(key) for key in keys[:12]))
    assert "and 4 more" in words_of(draw_relay(moment, keys))


def test_the_table_matches_the_picture() -> None:
    rows = {name: value for name, value in relay_table(busy(keys_of(6)), keys_of(6)).rows}
    assert rows["compute"] == "backward 2 · L002 3/8" and rows["slot B"] == "1 · L001, loading 62 %"
    assert rows["gradient leaves"] == "3 · L003 25 %" and rows["updated"] == "1 of 6" and rows["stashed inputs"] == "24"


def test_show_relay_takes_any_trace() -> None:
    trace = step(12)
    shown = show_relay(trace)
    assert (
        "backward" in words_of(shown.svg) and {name: value for name, value in shown.table.rows}["phase"] == "backward"
    )
    assert "event 1 of" in show_relay(trace, 0).table.title
    one = Trace.of([Event("compute", "forward", 0.0, 0.0, "L000", k=0, visit=0)], [])
    for few in (Trace(), one):
        ElementTree.fromstring(show_relay(few).svg)
    with pytest.raises(ValueError, match="numbered from 0"):
        show_relay(one, 1)
