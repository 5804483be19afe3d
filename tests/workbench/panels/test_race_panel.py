"""The race panel: start, pause and stop of a race of selected branches."""

from __future__ import annotations

import pytest
import torch
from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import enter, held, train, wait_until, weights_of

from l2l_core import Drop, Relay
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.race_panel import RacePanel
from workbench.pictures import Picture
from workbench.session.session import Session


def branched(session: Session) -> RacePanel:
    train(session, 1)
    session.fork("slim").result(HANG_S)
    session.edit(Drop(0)).result(HANG_S)
    session.switch("main").result(HANG_S)
    panel = RacePanel(session)
    shown(panel)
    return panel


def test_single_branch_shows_how_to_fork(session: Session) -> None:
    panel = RacePanel(session)
    shown(panel)
    assert "Make a second branch first" in html_of(panel) and find(panel, "Start race").disabled
    session.fork("slim").result(HANG_S)
    shown(panel)
    assert find(panel, "branches").value == ("main", "slim") and not find(panel, "Start race").disabled
    find(panel, "branches").value = ("slim",)
    assert find(panel, "Start race").disabled


def test_start_race_runs_the_selected_race(session: Session) -> None:
    panel = branched(session)
    find(panel, "compared with").value = "slim"
    find(panel, "steps").value = 5
    find(panel, "Start race").click()
    now = session.wait(HANG_S)
    assert now.race is not None and [one.name for one in now.race.racers] == ["slim", "main"]
    assert [len(one.steps) for one in now.race.racers] == [5, 5]
    shown(panel)
    assert "5 of 5" in race_words(panel) and "<svg" in html_of(panel)
    find(panel, "over").value = "flop"
    assert "compute (FLOP)</text>" in html_of(panel)
    (still,) = panel.still(now)
    assert isinstance(still, Picture) and "compute (FLOP)" in still.svg


def race_words(panel: RacePanel) -> str:
    """Open the table and return the HTML of the panel."""
    find(panel, "The race as a table").value = True
    return html_of(panel)


def test_race_can_be_paused_and_stopped(session: Session, relay: Relay) -> None:
    panel = branched(session)
    find(panel, "steps").value = 1000
    with held(relay):
        find(panel, "Start race").click()
        enter(relay)
        shown(panel)
        assert find(panel, "Start race").disabled and not find(panel, "Stop race").disabled
        find(panel, "Pause race").click()
    now = session.wait(HANG_S)
    assert now.race is not None and now.race.is_paused
    shown(panel)
    find(panel, "Continue race").click()
    wait_until(lambda: (race := session.snapshot().race) is not None and len(race["slim"].steps) > 1)
    find(panel, "Stop race").click()
    now = session.wait(HANG_S)
    shown(panel)
    assert now.race is not None and now.race.ended == "it was stopped" and find(panel, "Stop race").disabled
    assert not find(panel, "Start race").disabled


def test_run_during_a_race_is_refused_or_resumes_it(session: Session, relay: Relay) -> None:
    branched(session)
    header = HeaderPanel(session)
    with held(relay):
        race = session.race("main", "slim", steps=3)
        enter(relay)
        find(header, "Run").click()
        assert "a race is in progress and needs no run(): Pause holds it" in html_of(header)
        assert not session.snapshot().queued
        session.pause()
    assert session.wait(HANG_S).race is not None and not race.done()
    find(header, "Run").click()
    assert [len(one.steps) for one in race.result(HANG_S).racers] == [3, 3]
    now = session.wait(HANG_S)
    assert (now.state, now.step, now.target) == ("idle", 4, 1), "no run has started after the race"
    find(header, "steps").value = 2
    find(header, "Run").click()
    assert session.wait(HANG_S).step == 6


def test_refused_race_shows_the_reason(session: Session) -> None:
    panel = branched(session)
    session.close()
    find(panel, "Start race").click()
    assert "this session is closed" in html_of(panel)


def test_one_press_forks_edits_and_races(session: Session) -> None:
    train(session, 1)
    panel = RacePanel(session)
    shown(panel)
    find(panel, "steps").value = 3
    choices = find(panel, "race this model against a copy: ")
    assert [label for label, _ in choices.options][-2:] == [
        "insert a layer at the end",
        "double the stack, copies in between",
    ]
    assert choices.value.startswith("drop the layer of least influence, ")
    least = min(session.snapshot().layers, key=lambda row: row.influence or 0.0)
    before = weights_of(session.relay)
    find(panel, "Fork and race").click()
    now = session.wait(HANG_S)
    assert now.refusal is None and now.race is not None and now.race.is_over
    assert [(one.name, len(one.steps)) for one in now.race.racers] == [("main", 3), ("variant", 3)]
    assert now.branch == "main" and least.key in [row.key for row in now.layers]
    session.switch("variant").result(HANG_S)
    assert least.key not in [row.key for row in session.snapshot().layers]
    session.switch("main").result(HANG_S)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights_of(session.relay), strict=True)), "it trained"
    shown(panel)
    find(panel, "Fork and race").click()
    assert [one.name for one in (session.wait(HANG_S).race or now.race).racers] == ["main", "variant 2"]


def test_refused_variant_leaves_no_branch_and_no_race(session: Session) -> None:
    train(session, 1)
    race = session.race_variant(Drop("L999"), steps=2)
    with pytest.raises(ValueError, match="L999"):
        race.result(HANG_S)
    now = session.wait(HANG_S)
    assert now.race is None and [one.name for one in now.branches] == ["main"] and now.branch == "main"
    assert now.refusal is not None and "L999" in now.refusal.message
