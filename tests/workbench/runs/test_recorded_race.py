"""Races in a recorded run: rows, report, replay, and errors of damaged rows."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_S
from sessions import make_batches, make_relay, train

from l2l_core import Drop
from workbench.panels.recorded_run_panels import RecordedRacePanel
from workbench.pictures import AXES, race_table, show_race
from workbench.replay_bench import replay
from workbench.runs.html_report import render_report
from workbench.runs.race_lines import race_from_row, race_row
from workbench.runs.recorder import Recorder
from workbench.runs.run_lines import to_json
from workbench.runs.run_loader import load_run
from workbench.session.probe_verdict import ProbeLosses
from workbench.session.race_result import Race, Racer
from workbench.session.session import Session
from workbench.session.snapshot_values import StepRow

HELD_OUT = make_batches(8)[5:]


def record_races(path: Path) -> list[Race]:
    """Record two steps, a branch with one layer less, a race of three steps, one step, and a race of two steps."""
    with make_relay() as relay, Session(relay, make_batches(), loggers=[Recorder(path)], probe=HELD_OUT) as session:
        train(session, 2)
        session.fork("slim").result(HANG_S)
        session.edit(Drop(1)).result(HANG_S)
        session.switch("main").result(HANG_S)
        races = [session.race("slim", "main", steps=3).result(HANG_S)]
        train(session, 1)
        return [*races, session.race("main", "slim", steps=2).result(HANG_S)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("races") / "run.jsonl"


@pytest.fixture(scope="module")
def races(path: Path) -> list[Race]:
    return record_races(path)


def test_races_come_back_exactly(path: Path, races: list[Race]) -> None:
    run = load_run(path)
    assert [race for _, race in run.races] == races
    at, other = (number for number, _ in run.races)
    assert run.snapshot(at - 1).race is None and run.snapshot(at).race == races[0]
    assert run.snapshot(other - 1).race == races[0] and run.snapshot().race == races[1]
    (first, second), now = races[0].racers, run.snapshot()
    assert (first.name, second.name, now.branch, now.step) == ("slim", "main", "main", 8)
    assert [len(racer.steps) for racer in (first, second)] == [3, 3] and first.parent == "main" and first.forked_at == 2
    assert [change.what for change in first.changes if change.entry is not None] == ["dropped layer 1"]
    for loaded, original in zip((race for _, race in run.races), races, strict=True):
        assert show_race(loaded, "flop") == show_race(original, "flop")


def test_the_report_shows_every_race_with_its_table(path: Path, races: list[Race]) -> None:
    text = render_report([load_run(path)])
    assert text.count("<h2>Race of ") == 2 and "<h2>Race of slim, main</h2>" in text
    assert [unescape(text).count(f'aria-label="Race over {axis}') for axis in AXES.values()] == [2, 2, 2]
    for race in races:
        for row in race_table(race).rows:
            for cell in filter(None, row):
                assert cell in text, cell
    difference = races[0].difference("main")
    assert difference is not None and difference.spread is not None and " batches" in race_table(races[0]).rows[1][8]
    assert "branches and edits ◆" in text and "After step 2: dropped layer 1" in text


def test_the_replay_shows_the_race_that_was_over_by_then(path: Path, races: list[Race]) -> None:
    shown = replay(path)
    try:
        panel = RecordedRacePanel(shown.session)
        panel.show(shown.session.snapshot())
        assert "main is the solid line" in panel._picture.value
        panel._axis.value = "flop"
        assert panel.still(shown.session.snapshot()) == [show_race(races[1], "flop")]
        assert "compute (FLOP)" in panel._picture.value
        shown.session.select(0)
        panel.show(shown.session.snapshot())
        assert "No race had ended by this moment" in panel._picture.value and panel._axis.disabled
        assert "Race" in shown.views.buttons.options[-1]
    finally:
        shown.close()


def test_a_run_without_races_has_no_view_of_them(tmp_path: Path) -> None:
    with make_relay() as relay:
        with Session(relay, make_batches(), loggers=[Recorder(tmp_path / "run.jsonl")], probe=False) as session:
            train(session, 1)
    run = load_run(tmp_path)
    shown = replay(tmp_path)
    try:
        assert run.races == () and "Race" not in [words for words, _ in shown.views.buttons.options]
    finally:
        shown.close()
    assert "<h2>Race" not in render_report([run])


def test_a_race_stopped_by_the_end_of_the_session_is_recorded(tmp_path: Path) -> None:
    with make_relay() as relay:
        with Session(relay, make_batches(), loggers=[Recorder(tmp_path / "run.jsonl")], probe=False) as session:
            session.fork("slim").result(HANG_S)
            session.race("main", "slim", steps=10**6)
            while (race := session.snapshot().race) is None or not race.racers[1].steps:
                session.wait_for_change(session.snapshot().number, HANG_S)
    ((_, race),) = load_run(tmp_path).races
    assert race.ended == "the session was closed" and race.is_over and race.racers[1].steps


# Lines ----------------------------------------------------------------------------------------------------------------


def test_infinities_come_back() -> None:
    step = StepRow(1, float("inf"), 0.5, 6, 100, 1, 1, 0.5)
    racer = Racer("a", 0, 1, (step,), (10**30,), ((1, ProbeLosses((float("-inf"), 2.0), 0.1)),), left="it was full")
    race = Race(3, (racer, replace(racer, name="b")), is_over=True, ended="stopped")
    assert race_from_row(json.loads(to_json(race_row(race)))) == race


DAMAGE: dict[str, Any] = {
    "flop": ("FLOP or measurements do not fit the 3 steps of slim", lambda racer: racer["flop"].pop()),
    "measured": (
        "do not fit the 3 steps of slim",
        lambda racer: racer["measured"].append([9, racer["measured"][0][1]]),
    ),
    "steps": ("missing", lambda racer: racer["steps"][0].pop("loss")),
    "name": ("missing", lambda racer: racer.pop("name")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_race_is_named(path: Path, races: list[Race], tmp_path: Path, name: str) -> None:
    message, damage = DAMAGE[name]
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["type"] == "race")
    row = json.loads(lines[at])
    damage(row["racers"][0])
    (tmp_path / "run.jsonl").write_text("\n".join([*lines[:at], json.dumps(row), *lines[at + 1 :], ""]))
    with pytest.raises(ValueError, match=f"line {at + 1}: .*{message}"):
        load_run(tmp_path)
