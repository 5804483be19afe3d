"""Panels as they are used: buttons pressed, sliders moved, and what they then show. No kernel, no browser."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets
import numpy as np
import pytest
import torch
from patience import HANG_S
from sessions import Batch, enter, held, make_batches, make_relay, threads_named, train, wait_until

from l2l_core import Device, Drop, EmulatedDevice, Freeze, Relay, RelayConfig
from workbench.app import Workbench
from workbench.panels.display import WIDGET
from workbench.panels.edits import EditsPanel
from workbench.panels.header import HeaderPanel
from workbench.panels.heat import HeatPanel
from workbench.panels.layers import LayersPanel
from workbench.panels.loss import LossPanel
from workbench.panels.memory import MemoryPanel
from workbench.panels.panel import Panel
from workbench.panels.relay import RelayPanel
from workbench.panels.timeline import TimelinePanel
from workbench.panels.what_if import WhatIf, WhatIfPanel
from workbench.pictures.heat import draw_heat
from workbench.pictures.memory import memory_table
from workbench.readings.moments import Moments
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot

KINDS: Sequence[type[Panel]] = (
    HeaderPanel,
    RelayPanel,
    TimelinePanel,
    MemoryPanel,
    LossPanel,
    EditsPanel,
    LayersPanel,
    HeatPanel,
    WhatIfPanel,
)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay() as made:
        yield made
    wait_until(lambda: not threads_named("session", "pump"))


@pytest.fixture
def session(relay: Relay) -> Iterator[Session]:
    with Session(relay, make_batches()) as made:
        yield made


def widgets_of(panel: Panel) -> list[Any]:
    """All widgets of a panel, from left to right and from top to bottom."""

    def walk(widget: Any) -> Iterator[Any]:
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    return list(walk(panel.widget))


def find(panel: Panel, words: str) -> Any:
    """The control with these words on it, or else under the pointer."""
    found = [one for one in widgets_of(panel) if words == getattr(one, "description", "")]
    found += [one for one in widgets_of(panel) if words == getattr(one, "tooltip", "")]
    assert found, f"no {words!r} in {type(panel).__name__}"
    return found[0]


def html_of(panel: Panel) -> str:
    """What is to be read in a panel."""
    return " ".join(one.value for one in widgets_of(panel) if isinstance(one, ipywidgets.HTML))


def shown(panel: Panel) -> Snapshot:
    """Show the session as it is now."""
    now = panel.session.snapshot()
    panel.show(now)
    return now


# Header: buttons ------------------------------------------------------------------------------------------------------


@pytest.fixture
def header(session: Session) -> HeaderPanel:
    panel = HeaderPanel(session)
    shown(panel)
    return panel


def test_run_trains_as_many_steps_as_it_says(header: HeaderPanel) -> None:
    find(header, "steps").value = 3
    find(header, "Run").click()
    now = header.session.wait(HANG_S)
    assert (now.state, now.step, now.target) == ("idle", 3, 3)
    shown(header)
    assert "step 3" in html_of(header) and "3 of 3 steps" in html_of(header)


def test_pressing_run_twice_does_not_train_twice_as_long(header: HeaderPanel) -> None:
    find(header, "steps").value = 2
    with held(header.session.relay):
        find(header, "Run").click()
        enter(header.session.relay)
        find(header, "Run").click()
    assert header.session.wait(HANG_S).step == 2


def test_nor_does_it_while_the_session_is_at_something_else(header: HeaderPanel) -> None:
    go_on = threading.Event()
    find(header, "steps").value = 2
    header.session.edit(lambda relay: go_on.wait(HANG_S))
    find(header, "Run").click()
    find(header, "Run").click()
    go_on.set()
    assert header.session.wait(HANG_S).step == 2


def test_pause_and_run_go_on_with_what_is_left(header: HeaderPanel) -> None:
    session, run = header.session, find(header, "Run")
    find(header, "steps").value = 4
    with held(session.relay):
        run.click()
        enter(session.relay)
        find(header, "Pause").click()
        shown(header)
        assert "pausing after this step" in html_of(header)
    assert session.wait(HANG_S).state == "paused"
    shown(header)
    assert "paused" in html_of(header) and "1 of 4 steps" in html_of(header)
    run.click()
    now = session.wait(HANG_S)
    assert (now.state, now.step) == ("idle", 4)


def test_run_takes_a_pause_back_that_has_not_come_yet(header: HeaderPanel) -> None:
    session = header.session
    find(header, "steps").value = 4
    with held(session.relay):
        find(header, "Run").click()
        enter(session.relay)
        find(header, "Pause").click()
        find(header, "Run").click()
        find(header, "Run").click()
    now = session.wait(HANG_S)
    assert (now.state, now.step) == ("idle", 4)


def test_run_in_the_last_step_before_a_pause_does_not_train_without_end(header: HeaderPanel) -> None:
    session = header.session
    find(header, "steps").value = 1
    with held(session.relay):
        find(header, "Run").click()
        enter(session.relay)
        find(header, "Pause").click()
        find(header, "Run").click()
    assert session.wait(HANG_S).step == 1


def test_run_after_stop_begins_anew(header: HeaderPanel) -> None:
    session = header.session
    find(header, "steps").value = 5
    with held(session.relay):
        find(header, "Run").click()
        enter(session.relay)
        find(header, "Stop").click()
        find(header, "steps").value = 2
        find(header, "Run").click()
    now = session.wait(HANG_S)
    assert (now.state, now.step, now.target) == ("idle", 3, 2)


def test_step_trains_one_and_stop_drops_the_rest(header: HeaderPanel) -> None:
    session = header.session
    find(header, "Step").click()
    assert session.wait(HANG_S).step == 1
    find(header, "steps").value = 1000
    with held(session.relay):
        find(header, "Run").click()
        enter(session.relay)
        find(header, "Stop").click()
    now = session.wait(HANG_S)
    assert (now.state, now.step) == ("idle", 2)
    find(header, "steps").value = 2
    find(header, "Run").click()
    assert session.wait(HANG_S).step == 4, "nothing is left of the run before"


# Header: settings -----------------------------------------------------------------------------------------------------


def test_a_slider_gives_the_next_step_another_setting_once(header: HeaderPanel) -> None:
    session = header.session
    find(header, "micro-batches").value = 3
    session.wait(HANG_S)
    for _ in range(3):
        shown(header)
    find(header, "layers ahead").value = 2
    find(header, "stash on").value = "host"
    session.wait(HANG_S)
    shown(header)
    assert session.relay.config == RelayConfig(micro_batches=3, ahead=2, stash="host")
    assert [change.what for change in session.snapshot().changes] == [
        "micro_batches 2 → 3, ahead 1 → 2, stash device → host"
    ]


def test_controls_follow_settings_that_are_changed_elsewhere_and_do_not_echo(header: HeaderPanel) -> None:
    session = header.session
    session.reconfigure(micro_batches=5, ahead=7, stash="host", h2d_bytes_per_s=3_000_000)  # three are no options
    session.wait(HANG_S)
    for _ in range(2):
        shown(header)
    values = [find(header, words).value for words in ("micro-batches", "layers ahead", "stash on", "emulated link")]
    assert values == [5, 7, "host", 3e6]
    assert find(header, "emulated link").label == "3 MB/s"
    assert find(header, "micro-batches").options[3:6] == (("4", 4), ("5", 5), ("6", 6)), "in order"
    session.wait(HANG_S)
    assert len(session.snapshot().changes) == 1
    session.reconfigure(h2d_bytes_per_s=None)
    shown(header)
    assert find(header, "emulated link").value == math.inf


def test_a_stale_snapshot_does_not_move_a_slider_that_has_just_been_moved(header: HeaderPanel) -> None:
    session, slider = header.session, find(header, "micro-batches")
    old = session.snapshot()
    slider.value = 4
    header.show(old)
    assert slider.value == 4
    later = session.snapshot()
    slider.value = 8
    header.show(later)  # has 4, which the panel has not shown yet
    assert slider.value == 8
    session.wait(HANG_S)
    shown(header)
    assert slider.value == session.relay.config.micro_batches == 8
    assert [change.what for change in session.snapshot().changes] == ["micro_batches 2 → 8"]


def test_a_press_while_the_panel_is_drawn_is_not_lost(header: HeaderPanel) -> None:
    session = header.session
    drawing, go_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        drawing.set()
        assert go_on.wait(HANG_S)

    find(header, "layers ahead").observe(wait, "value")
    session.reconfigure(ahead=3)
    thread = threading.Thread(target=shown, args=(header,))
    thread.start()
    assert drawing.wait(HANG_S)  # in the middle of moving that slider
    find(header, "Step").click()
    find(header, "micro-batches").value = 4
    go_on.set()
    thread.join(HANG_S)
    now = session.wait(HANG_S)
    assert now.step == 1 and now.config.micro_batches == 4


def test_the_link_is_set_in_both_directions(header: HeaderPanel) -> None:
    link = find(header, "emulated link")
    assert link.value == math.inf
    link.value = 1e8
    header.session.wait(HANG_S)
    figures = header.session.relay.device.figures()
    assert figures["h2d_bytes_per_s"] == figures["d2h_bytes_per_s"] == 1e8
    link.value = math.inf
    header.session.wait(HANG_S)
    assert header.session.relay.device.figures()["h2d_bytes_per_s"] is None


def test_sliders_begin_with_what_is_set() -> None:
    device = EmulatedDevice(h2d_bytes_per_s=7e6)
    with make_relay(RelayConfig(micro_batches=5, ahead=6), device) as relay, Session(relay, make_batches()) as session:
        header = HeaderPanel(session)
        values = [find(header, words).value for words in ("micro-batches", "layers ahead", "emulated link")]
        shown(header)
        assert values == [5, 6, 7e6]
        assert session.snapshot().changes == ()


class Chip(Device):
    """Does what an emulated device does, but is none: its link cannot be set."""

    in_host_memory = True

    def __init__(self) -> None:
        self._inside = EmulatedDevice()
        self.name, self.torch_device, self.ledger = "chip", torch.device("cpu"), self._inside.ledger

    def figures(self) -> dict[str, Any]:
        return {"memory_bytes": None}

    def host_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._inside.host_empty(numel, dtype)

    def issue(self, *args: Any, **named: Any) -> Any:
        return self._inside.issue(*args, **named)

    def start(self, *args: Any, **named: Any) -> Any:
        return self._inside.start(*args, **named)

    def close(self) -> None:
        self._inside.close()


def test_a_link_that_is_real_has_no_slider() -> None:
    with make_relay(device=Chip()) as relay, Session(relay, make_batches()) as session:
        header = HeaderPanel(session)
        train(session, 1)
        shown(header)
        assert "chip" in html_of(header) and "could not be drawn" not in html_of(header)
        assert not [one for one in widgets_of(header) if getattr(one, "description", "") == "emulated link"]


# Header: what went wrong ----------------------------------------------------------------------------------------------


def trouble(header: HeaderPanel) -> Any:
    """The box below the settings."""
    return header.widget.children[3]


def test_a_step_that_fails_is_shown_with_what_holds_and_can_be_skipped(relay: Relay) -> None:
    made: list[int] = []

    def make_batch() -> Batch:
        made.append(len(made))
        return make_batches(1)[0]

    with Session(relay, make_batch) as session:
        header = HeaderPanel(session)
        shown(header)
        assert trouble(header).layout.display == "none"
        relay.model[2].error = ValueError("a <layer> says no\nand why")
        find(header, "steps").value = 3
        find(header, "Run").click()
        session.wait(HANG_S)
        for _ in range(2):
            shown(header)
        said = html_of(header)
        assert trouble(header).layout.display == "" and find(header, "Skip this batch").layout.display == ""
        assert "Step 1 failed: " in said and "a &lt;layer&gt; says no" in said and "<layer>" not in said
        assert "Weights and optimizer are as they were" in said
        assert "Traceback (most recent call last)" in said and "failed" in said
        find(header, "Skip this batch").click()
        relay.model[2].error = None
        find(header, "Run").click()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.target) == ("idle", 3, 3), "the run goes on"
        assert len(made) == 4, "the batch of the failed step was let go"
        shown(header)
        assert trouble(header).layout.display == "none"


def test_what_cannot_be_skipped_has_no_button_for_it(header: HeaderPanel) -> None:
    header.session.edit(lambda relay: 1 / 0)
    header.session.wait(HANG_S)
    shown(header)
    assert trouble(header).layout.display == "" and "division by zero" in html_of(header)
    assert find(header, "Skip this batch").layout.display == "none"
    find(header, "Step").click()
    header.session.wait(HANG_S)
    shown(header)
    assert trouble(header).layout.display == "none"


def test_buttons_of_a_closed_session_say_why_and_its_sliders_go_back(header: HeaderPanel) -> None:
    header.session.close()
    shown(header)
    for words in ("Run", "Pause", "Step", "Stop"):
        trouble(header).layout.display = "none"
        find(header, words).click()
        assert trouble(header).layout.display == "" and "this session is closed" in html_of(header)
        assert find(header, "Skip this batch").layout.display == "none"
    find(header, "micro-batches").value = 8
    assert find(header, "micro-batches").value == header.session.relay.config.micro_batches == 2
    shown(header)
    assert "this session is closed" in html_of(header), "as long as nothing else happens"


# The player -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def player(session: Session) -> RelayPanel:
    """A relay panel over a session that has trained a step."""
    panel = RelayPanel(session)
    train(session, 1)
    shown(panel)
    return panel


def picture_of(panel: Panel) -> str:
    assert "could not be drawn" not in html_of(panel), html_of(panel)
    return panel.widget.children[0].value


def moments_of(panel: Panel) -> Moments:
    now = panel.session.snapshot()
    assert now.last is not None
    return Moments.of(now.last, [layer.key for layer in now.layers])


def test_without_a_step_the_player_has_nowhere_to_go(session: Session) -> None:
    panel = RelayPanel(session)
    shown(panel)
    for words in ("Next event", "Event before", "Next visit", "Visit before"):
        find(panel, words).click()
    assert find(panel, "Live").value and find(panel, "event").value == 0
    assert panel._play.max == 0, "nor does playing move it"
    train(session, 1)
    shown(panel)
    assert find(panel, "event").max == session.snapshot().last.counts[0] - 1


def test_events_one_by_one(player: RelayPanel) -> None:
    at, live = find(player, "event"), find(player, "Live")
    assert live.value and at.value == 0
    idle = picture_of(player)
    seen = []
    for number in range(1, 6):
        find(player, "Next event").click()
        assert (at.value, live.value) == (number, False)
        seen.append(picture_of(player))
    assert idle not in seen and len(set(seen)) > 1
    for number in (4, 3, 2, 1, 0, 0):
        find(player, "Event before").click()
        assert at.value == number
        assert not number or picture_of(player) == seen[number - 1], "the same moment, the same picture"
    at.value = at.max
    find(player, "Next event").click()
    assert at.value == at.max


def test_visits_one_by_one(player: RelayPanel) -> None:
    visits, at = list(moments_of(player).visits()), find(player, "event")
    seen = []
    for _ in visits:
        find(player, "Next visit").click()
        seen.append(at.value)
    assert seen == [one for one in visits if one > 0] + [visits[-1]] * (len(visits) - len([v for v in visits if v > 0]))
    at.value = visits[2] + 1
    find(player, "Visit before").click()
    assert at.value == visits[2]
    find(player, "Visit before").click()
    assert at.value == visits[1]


def test_every_event_of_a_step_can_be_looked_at(player: RelayPanel) -> None:
    at = find(player, "event")
    pictures = set()
    for number in range(at.max, -1, -1):
        at.value = number
        pictures.add(picture_of(player))
    assert not find(player, "Live").value and len(pictures) > at.max / 2


def test_a_new_step_does_not_move_what_is_being_looked_at(player: RelayPanel) -> None:
    session, at = player.session, find(player, "event")
    at.value = 7
    most, picture = at.max, picture_of(player)
    session.reconfigure(micro_batches=6)
    train(session, 2)
    shown(player)
    assert (at.value, at.max) == (7, most) and picture_of(player) == picture
    with held(session.relay):
        session.step()
        enter(session.relay)
        shown(player)
        assert picture_of(player) == picture, "nor does one under way"
    session.wait(HANG_S)
    find(player, "Live").value = True
    assert picture_of(player) != picture
    shown(player)
    assert at.max == session.snapshot().last.counts[0] - 1 > most


def test_ranges_fit_the_step_also_when_it_gets_shorter(player: RelayPanel) -> None:
    session = player.session
    at, play = find(player, "event"), next(one for one in widgets_of(player) if isinstance(one, ipywidgets.Play))
    for micro_batches in (6, 1):
        session.reconfigure(micro_batches=micro_batches)
        train(session, 1)
        at.value = at.max
        find(player, "Live").value = True
        now = shown(player)
        assert now.last is not None
        assert at.max == play.max == now.last.counts[0] - 1 and at.value <= at.max and play.value <= play.max
        assert find(player, "Live").value, "a range that shrinks is nobody's hand"


def test_pace_is_that_of_playing(player: RelayPanel) -> None:
    play = next(one for one in widgets_of(player) if isinstance(one, ipywidgets.Play))
    pace = next(one for one in widgets_of(player) if isinstance(one, ipywidgets.Dropdown))
    intervals = []
    for name in ("slow", "normal", "fast"):
        pace.value = name
        intervals.append(play.interval)
    assert intervals == sorted(intervals, reverse=True) and intervals[0] > intervals[-1]


def test_live_shows_the_step_under_way(player: RelayPanel) -> None:
    idle = picture_of(player)
    with held(player.session.relay):
        player.session.step()
        enter(player.session.relay)
        shown(player)
        assert picture_of(player) != idle
    player.session.wait(HANG_S)
    shown(player)
    assert player.session.snapshot().progress is None and find(player, "Live").value


# Drawing only what somebody sees --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RelayPanel, TimelinePanel, MemoryPanel, LossPanel, HeatPanel])
def test_a_fold_draws_its_table_only_while_it_is_open(session: Session, kind: type[Panel]) -> None:
    panel = kind(session)
    button, table = panel.widget.children[-1].children
    train(session, 1)
    shown(panel)
    if isinstance(panel, RelayPanel):
        find(panel, "Next event").click()
    assert table.value == "" and table.layout.display == "none" and button.description.startswith("▸")
    button.value = True
    first = table.value
    assert "<table" in first and table.layout.display == "" and button.description.startswith("▾")
    button.value = False
    session.reconfigure(micro_batches=3)
    train(session, 1)
    if isinstance(panel, RelayPanel):
        find(panel, "Live").value = True
    shown(panel)
    if isinstance(panel, RelayPanel):
        find(panel, "Next visit").click()
    assert table.value == first, "closed, it is left as it was"
    button.value = True
    assert table.value != first and "<table" in table.value


@pytest.mark.parametrize("kind", [LayersPanel, LossPanel, HeatPanel])
def test_what_changes_with_steps_is_drawn_with_steps(session: Session, kind: type[Panel]) -> None:
    panel = kind(session)
    train(session, 1)
    shown(panel)
    content = panel.widget.children[0]
    drawn, content.value = content.value, "as it was"
    session.pause()
    session.wait(HANG_S)
    with held(session.relay):
        session.step()
        enter(session.relay)
        shown(panel)
        shown(panel)
        assert content.value == "as it was"
    session.wait(HANG_S)
    shown(panel)
    assert content.value not in ("as it was", drawn)


def test_the_heat_map_shows_the_figure_that_is_chosen(session: Session) -> None:
    panel = HeatPanel(session)
    shown(panel)
    assert "appear with the first step" in html_of(panel)
    train(session, 2)
    now = shown(panel)
    picture, choice = panel.widget.children[0], panel.widget.children[1].children[0]
    assert picture.value == draw_heat(now.statistics, "grad_norm", now.changes)
    choice.value = "update_ratio"  # drawn again at once, without a step
    assert picture.value == draw_heat(now.statistics, "update_ratio", now.changes)
    assert panel.still(now)[0].svg == picture.value
    choice.value = "influence"
    assert "could not be drawn" not in picture.value


def test_an_edit_changes_the_heat_map_at_once(session: Session) -> None:
    panel = HeatPanel(session)
    train(session, 2)
    before = shown(panel)
    drawn = panel.widget.children[0].value
    session.edit(Drop(1)).result(HANG_S)
    session.wait(HANG_S)
    now = shown(panel)
    assert panel.widget.children[0].value != drawn
    assert [track.key for track in now.statistics.stack] == ["L000", "L002", "L003"]
    assert [track.key for track in now.statistics.gone] == ["L001"] and not before.statistics.gone


def test_a_session_keeps_the_figures_of_all_its_steps(session: Session) -> None:
    rows = []
    for _ in range(3):
        train(session, 1)
        rows.append(session.snapshot().layers)
    session.edit(Freeze(2)).result(HANG_S)
    train(session, 1)
    rows.append(session.snapshot().layers)
    record = session.snapshot().statistics
    assert record.first.tolist() == record.last.tolist() == [1, 2, 3, 4]
    for figure in ("grad_norm", "update_ratio"):
        told = [[getattr(layer, figure) for layer in step] for step in rows]
        expected = np.array(told, np.float64).T
        np.testing.assert_allclose(record.values(figure, record.stack), expected, rtol=1e-6)
        assert np.argwhere(np.isnan(expected)).tolist() == [[2, 3]], "frozen since then"


def test_a_change_of_settings_is_marked_in_the_loss_at_once(session: Session) -> None:
    panel = LossPanel(session)
    train(session, 2)
    shown(panel)
    before = panel.widget.children[0].value
    session.reconfigure(ahead=2)
    session.wait(HANG_S)
    shown(panel)
    once = panel.widget.children[0].value
    assert once != before
    session.reconfigure(ahead=3)
    session.wait(HANG_S)
    shown(panel)
    assert panel.widget.children[0].value != once, "still one change, but another"


def test_the_table_behind_memory_is_of_the_step_that_is_drawn(session: Session) -> None:
    panel = MemoryPanel(session)
    fold = next(one for one in widgets_of(panel) if isinstance(one, ipywidgets.ToggleButton))
    fold.value = True
    train(session, 1)
    first = session.snapshot()
    session.reconfigure(micro_batches=1, stash="host")
    train(session, 1)
    last = session.snapshot()
    panel.show(first)
    panel.show(replace(first, step=last.step))  # the relay is done with a step, the session not yet
    panel.show(last)
    assert last.last is not None
    assert memory_table(last.last, last.in_core_bytes).to_html(folded=False) in html_of(panel)


# What if --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def what_if(session: Session) -> WhatIfPanel:
    """Unfolded, after two steps."""
    panel = WhatIfPanel(session)
    find(panel, "▸ What if").value = True
    train(session, 2)
    shown(panel)
    assert panel.settle()
    return panel


def asked(panel: WhatIfPanel, values: dict[str, Any]) -> str:
    """Move controls, by their words; what the panel then says."""
    for words, value in values.items():
        find(panel, words).value = value
    assert panel.settle()
    return html_of(panel)


def test_moving_a_slider_answers_and_touches_nothing(what_if: WhatIfPanel) -> None:
    said = asked(what_if, {"layers": 96, "stash on": "host"})
    assert "layers 4 → 96; stash on device → host" in said and "what if, simulated" in said
    assert "step 2, measured" in said and "By formula: layers repeated or left out." in said
    now = what_if.session.snapshot()
    assert now.step == 2 and not now.queued and now.config == RelayConfig(micro_batches=2)


def test_a_folded_what_if_has_no_sliders_and_forecasts_all_the_same(session: Session) -> None:
    panel = WhatIfPanel(session)
    shown(panel)
    assert panel.settle() and "a guess by formula" in html_of(panel)
    train(session, 3)
    shown(panel)
    assert panel.settle() and "next step, forecast" in html_of(panel) and "<svg" not in html_of(panel)
    assert ", forecast " not in html_of(panel).replace("step, forecast<", ""), "a guess is not checked"
    assert not [one for one in widgets_of(panel) if isinstance(one, ipywidgets.SelectionSlider)]
    train(session, 1)
    shown(panel)
    assert panel.settle() and "step 4, measured: " in html_of(panel) and "(exact)" in html_of(panel)
    said = panel._error
    for micro_batches in (3, 2):  # there and back: this forecast is of the next step, and not of the one behind it
        session.reconfigure(micro_batches=micro_batches)
        shown(panel)
        assert panel.settle() and panel._error == said
    assert panel.still(session.snapshot()) == []


def test_a_rehearsal_forecasts_the_first_step(session: Session) -> None:
    panel = WhatIfPanel(session)
    find(panel, "▸ What if").value = True
    shown(panel)
    find(panel, "Rehearse").click()
    wait_until(lambda: "simulated with the costs of a rehearsal" in panel._line.value)
    assert panel.settle() and session.snapshot().step == 0
    assert "simulated with the costs of a rehearsal" in html_of(panel).lower().replace(panel._line.value.lower(), "")
    train(session, 1)
    shown(panel)
    assert panel.settle() and "step 1, measured: " in html_of(panel) and "(exact)" in html_of(panel)
    assert find(panel, "Rehearse").layout.display == "none"


def test_a_rehearsal_that_cannot_be_says_why(relay: Relay) -> None:
    with Session(relay, iter(())) as session:
        panel = WhatIfPanel(session)
        find(panel, "Rehearse").click()
        wait_until(lambda: "There is no rehearsal: there is no further batch" in html_of(panel))
        assert not find(panel, "Rehearse").disabled


def test_apply_hands_over_what_can_be_set_and_says_how_the_rest_is(what_if: WhatIfPanel) -> None:
    session = what_if.session
    said = asked(
        what_if,
        {
            "micro-batches": 3, "layers ahead": 2, "stash on": "host", "precision": "bf16", "link to device": 5e8,
            "layers": 6, "width": 2.0,
        },
    )  # fmt: skip
    assert "precision fp32 → bf16" in said
    find(what_if, "Apply").click()
    session.wait(HANG_S)
    assert session.relay.config == RelayConfig(micro_batches=3, ahead=2, stash="host", precision="bf16")
    assert session.relay.device.figures()["h2d_bytes_per_s"] == 5e8
    assert session.relay.device.figures()["d2h_bytes_per_s"] is None
    said = html_of(what_if)
    assert "handed to the next step; layers: with Insert" in said and "width: with another model" in said
    train(session, 1)
    now = shown(what_if)
    assert what_if.settle() and now.last is not None and now.last.settings["precision"] == "bf16"
    assert "<strong>layers 4 → 6; width × 1 → × 2</strong>" in html_of(what_if), "what could not be set is still asked"


def test_reset_goes_back_to_the_next_step_which_controls_follow(what_if: WhatIfPanel) -> None:
    session = what_if.session
    asked(what_if, {"layers": 96})
    session.reconfigure(micro_batches=5, h2d_bytes_per_s=3e6)
    session.wait(HANG_S)
    shown(what_if)
    values = [find(what_if, words).value for words in ("layers", "micro-batches", "link to device")]
    assert values == [96, 5, 3e6], "what a hand has set stays"
    assert find(what_if, "link to device").label == "3 MB/s"
    find(what_if, "Reset").click()
    assert what_if.settle() and find(what_if, "layers").value == 4
    assert "micro-batches 2 → 5; link to the device no limit → 3 MB/s" in html_of(what_if)
    session.edit(Drop("L001"))
    session.wait(HANG_S)
    shown(what_if)
    assert find(what_if, "layers").value == 3


def test_what_if_follows_the_newest_step(what_if: WhatIfPanel) -> None:
    assert "step 2, measured" in html_of(what_if)
    train(what_if.session, 1)
    shown(what_if)
    assert what_if.settle() and "step 3, measured" in html_of(what_if)


def test_an_apply_that_is_refused_says_why(what_if: WhatIfPanel) -> None:
    asked(what_if, {"layers ahead": 3})
    what_if.session.close()
    find(what_if, "Apply").click()
    assert "this session is closed: make a new one" in html_of(what_if)


def test_the_newest_question_is_answered_however_many_there_were(what_if: WhatIfPanel) -> None:
    for depth in (8, 16, 32, 64, 128):
        find(what_if, "layers").value = depth
    assert what_if.settle()
    assert "layers 4 → 128" in html_of(what_if)


def test_what_if_without_a_session(session: Session) -> None:
    train(session, 1)
    trace = session.snapshot().last
    assert trace is not None
    shown_alone = WhatIf(trace, depth=50)
    bundle = shown_alone._repr_mimebundle_()
    assert {WIDGET, "text/html", "image/svg+xml", "text/plain"} <= set(bundle)
    assert shown_alone.answer.question.depth == 50 and "what if, simulated" in bundle["text/html"]
    with pytest.raises(ValueError, match="depth=0"):
        WhatIf(trace, depth=0)
    with pytest.raises(TypeError, match="is no step"):
        WhatIf(3)  # type: ignore[arg-type]


# Every panel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_stands_alone(session: Session, kind: type[Panel], capsys: pytest.CaptureFixture[str]) -> None:
    panel = kind(session)
    before = panel._repr_mimebundle_()
    assert {WIDGET, "text/html", "text/plain"} <= set(before)
    panel._ipython_display_()
    train(session, 2)
    wait_until(lambda: session.snapshot().step == 2)
    shown(panel)
    assert "could not be drawn" not in html_of(panel)
    bundle = panel._repr_mimebundle_()
    pictures = {"image/svg+xml"} if kind not in (LayersPanel, EditsPanel) else set()
    assert set(bundle) == {WIDGET, "text/html", "text/plain"} | pictures
    assert bundle["text/plain"].strip() and bundle["text/html"].count("<svg") == len(pictures)
    panel.close()
    panel.close()
    assert WIDGET not in panel._repr_mimebundle_()
    panel._ipython_display_()
    assert "<svg" not in capsys.readouterr().out
    assert session.snapshot().state == "idle"


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_takes_a_workbench_too_and_nothing_else(relay: Relay, kind: type[Panel]) -> None:
    bench = Workbench(relay, make_batches())
    panel = kind(bench)
    assert panel.session is bench.session
    for wrong in (relay, None, "session"):
        with pytest.raises(TypeError, match=f"{kind.__name__} takes a Session or a Workbench, not a "):
            kind(wrong)
    panel.close()
    bench.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_is_drawn_at_any_moment(relay: Relay, kind: type[Panel]) -> None:
    with Session(relay, make_batches()) as session:
        panel = kind(session)
        shown(panel)  # without any step
        for _ in range(2):  # in the first one, and in one that has another before it
            with held(relay):
                session.run(1)
                enter(relay)
                wait_until(lambda: session.snapshot().progress is not None)
                shown(panel)
                assert "could not be drawn" not in html_of(panel)
            session.wait(HANG_S)
            shown(panel)
        relay.model[3].error = RuntimeError("in the middle")
        session.step()
        session.wait(HANG_S)
        shown(panel)
    shown(panel)  # closed
    assert "could not be drawn" not in html_of(panel)


@pytest.mark.parametrize("kind", KINDS)
def test_a_panel_that_cannot_be_drawn_says_so_and_comes_back(session: Session, kind: type[Panel]) -> None:
    class Broken(kind):  # type: ignore[misc, valid-type]
        broken = True

        def draw(self, now: Snapshot) -> None:
            if self.broken:
                raise ZeroDivisionError("an axis of <no> length")
            super().draw(now)

    panel = Broken(session)
    train(session, 1)
    shown(panel)
    said = panel.widget.children[0].value
    assert "Broken could not be drawn" in said and "an axis of &lt;no&gt; length" in said and "Traceback" in said
    panel.broken = False
    shown(panel)
    assert "could not be drawn" not in panel.widget.children[0].value


def test_the_pump_outlives_a_panel_that_cannot_be_drawn(relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    timeline, loss = bench.panels[2], bench.panels[4]
    timeline.draw = lambda now: 1 / 0  # type: ignore[method-assign]
    bench._ipython_display_()
    for steps in (1, 2):
        train(bench.session, steps)
        wait_until(lambda: loss._drawn[0] == bench.snapshot().step)
    assert "could not be drawn" in timeline.widget.children[0].value
    assert "could not be drawn" not in html_of(loss)
    bench.close()


# The workbench --------------------------------------------------------------------------------------------------------


def test_a_workbench_steers_its_session(relay: Relay) -> None:
    bench = Workbench(relay, make_batches())
    bench.run(2)
    assert bench.wait(HANG_S).step == 2
    bench.step()
    bench.reconfigure(ahead=2)
    assert bench.edit(lambda relay: relay.steps, what="count").result(HANG_S) == 3
    with held(relay):
        bench.run(5)
        enter(relay)
        bench.pause()
    assert bench.wait(HANG_S).state == "paused"
    bench.stop()
    now = bench.wait(HANG_S)
    assert now.state == "idle" and [change.what for change in now.changes] == ["ahead 1 → 2", "count"]
    bench.close()
    assert bench.snapshot().state == "closed" and relay.evaluate(make_batches()[0]) > 0


def test_a_workbench_refuses_what_is_no_relay() -> None:
    with pytest.raises(TypeError, match="a session takes an l2l_core.Relay"):
        Workbench(torch.nn.Linear(1, 1), [])  # type: ignore[arg-type]


def test_live_stops_the_player_and_is_not_undone_by_its_last_ticks(player: RelayPanel) -> None:
    panel = player
    panel._play.playing = True
    panel._at.value = 5
    assert not find(panel, "Live").value
    find(panel, "Live").value = True
    assert not panel._play.playing
    panel._at.value = 6  # was under way from the page
    assert find(panel, "Live").value and "no step is under way" in picture_of(panel)
