"""The relay picture: live mode, and the player by event and by visit."""

from __future__ import annotations

import ipywidgets
import pytest
from panel_reading import find, html_of, shown, widgets_of
from patience import HANG_S
from sessions import enter, held, train

from workbench.panels.panel import Panel
from workbench.panels.relay_panel import RelayPanel
from workbench.readings.state_timeline import StateTimeline
from workbench.session.session import Session


@pytest.fixture
def player(session: Session) -> RelayPanel:
    """Relay panel of a session after one step."""
    panel = RelayPanel(session)
    train(session, 1)
    shown(panel)
    return panel


def picture_of(panel: Panel) -> str:
    assert "could not be drawn" not in html_of(panel), html_of(panel)
    return panel.widget.children[0].value


def timeline_of(panel: Panel) -> StateTimeline:
    now = panel.session.snapshot()
    assert now.last is not None
    return StateTimeline.of(now.last, [layer.key for layer in now.layers])


def test_player_without_a_step_does_nothing(session: Session) -> None:
    panel = RelayPanel(session)
    shown(panel)
    for words in ("Next event", "Previous event", "Next visit", "Previous visit"):
        find(panel, words).click()
    assert find(panel, "Live").value and find(panel, "event").value == 0
    assert panel._play.max == 0, "playing has no range either"
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
        find(player, "Previous event").click()
        assert at.value == number
        assert not number or picture_of(player) == seen[number - 1], "equal moments have equal pictures"
    at.value = at.max
    find(player, "Next event").click()
    assert at.value == at.max


def test_visits_one_by_one(player: RelayPanel) -> None:
    visits, at = list(timeline_of(player).visit_starts()), find(player, "event")
    seen = []
    for _ in visits:
        find(player, "Next visit").click()
        seen.append(at.value)
    assert seen == [one for one in visits if one > 0] + [visits[-1]] * (len(visits) - len([v for v in visits if v > 0]))
    at.value = visits[2] + 1
    find(player, "Previous visit").click()
    assert at.value == visits[2]
    find(player, "Previous visit").click()
    assert at.value == visits[1]


def test_every_event_can_be_shown(player: RelayPanel) -> None:
    at = find(player, "event")
    pictures = set()
    for number in range(at.max, -1, -1):
        at.value = number
        pictures.add(picture_of(player))
    assert not find(player, "Live").value and len(pictures) > at.max / 2


def test_new_step_does_not_change_the_player(player: RelayPanel) -> None:
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
        assert picture_of(player) == picture, "nor does a step in progress"
    session.wait(HANG_S)
    find(player, "Live").value = True
    assert picture_of(player) != picture
    shown(player)
    assert at.max == session.snapshot().last.counts[0] - 1 > most


def test_range_follows_the_length_of_the_step(player: RelayPanel) -> None:
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
        assert find(player, "Live").value, "a smaller range is no user input"


def test_speed_sets_the_interval(player: RelayPanel) -> None:
    play = next(one for one in widgets_of(player) if isinstance(one, ipywidgets.Play))
    speed = next(one for one in widgets_of(player) if isinstance(one, ipywidgets.Dropdown))
    intervals = []
    for name in ("slow", "normal", "fast"):
        speed.value = name
        intervals.append(play.interval)
    assert intervals == sorted(intervals, reverse=True) and intervals[0] > intervals[-1]


def test_live_shows_the_step_in_progress(player: RelayPanel) -> None:
    idle = picture_of(player)
    with held(player.session.relay):
        player.session.step()
        enter(player.session.relay)
        shown(player)
        assert picture_of(player) != idle
    player.session.wait(HANG_S)
    shown(player)
    assert player.session.snapshot().progress is None and find(player, "Live").value


def test_live_ignores_late_positions_of_the_player(player: RelayPanel) -> None:
    panel = player
    panel._play.playing = True
    panel._slider.value = 5
    assert not find(panel, "Live").value
    find(panel, "Live").value = True
    assert not panel._play.playing
    panel._slider.value = 6  # a late message from the page
    assert find(panel, "Live").value and "no step is under way" in picture_of(panel)
