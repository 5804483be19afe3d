"""Sessions of a relay with a user-defined schedule: shown by its name, recorded, resumed and repeated."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import assert_equal, changes_of, make_batches, make_relay, train, weights_of

from l2l_core import RelayConfig
from l2l_core.plan import Action, ScheduleSettings, serial
from workbench.pictures import show_relay, show_timeline, text_view
from workbench.pictures.session_header import in_force_html, settings_table
from workbench.runs.html_report import render_report
from workbench.runs.recorder import Recorder
from workbench.runs.run_loader import load_run
from workbench.session.loggers import JsonLines
from workbench.session.save_folder import Autosave
from workbench.session.session import Session

CONFIG = RelayConfig(seed=0, micro_batches=2, verify="never", schedule=serial)
BATCHES = make_batches(6)


def one_by_one(settings: ScheduleSettings, visits: Sequence[str]) -> Iterator[Action]:
    yield from serial(settings, visits)


def work(session: Session) -> None:
    train(session, 2)
    session.reconfigure(schedule=one_by_one, ahead=0)
    train(session, 2)
    session.reconfigure(schedule="breadth_first")
    train(session, 2)


@pytest.fixture(scope="module")
def trained() -> list[torch.Tensor]:
    """Weights after the same steps without a session, by the relay's own schedule."""
    with make_relay(replace(CONFIG, schedule="breadth_first")) as relay:
        for batch in BATCHES:
            relay.step(batch)
        return weights_of(relay)


def test_it_is_named_in_every_view_and_file(trained: list[torch.Tensor], tmp_path: Path) -> None:
    loggers = [Recorder(tmp_path / "run.jsonl"), JsonLines(tmp_path / "log.jsonl")]
    with make_relay(CONFIG) as relay, Session(relay, BATCHES, probe=False, loggers=loggers) as session:
        first = session.snapshot()
        assert "schedule=serial" in in_force_html(first) and ("schedule", "serial") in settings_table(first).rows
        work(session)
        now = session.snapshot()
        assert now.state != "failed", now.failure
        assert changes_of(now) == [
            (2, "ahead 1 → 0, schedule serial → one_by_one"),
            (4, "schedule one_by_one → breadth_first"),
        ]
        assert "schedule=breadth_first" in in_force_html(now) and "(was serial)" in in_force_html(now)
        assert text_view(now) and now.last is not None
        assert show_relay(now.last).svg and show_timeline(now.last).svg
        assert_equal(weights_of(relay), trained)
    run = load_run(tmp_path / "run.jsonl")
    names = [getattr(run.snapshot(i).config.schedule, "__name__", "") for i in range(len(run.moments))]
    assert [name for name, _ in itertools.groupby(names)][-3:] == ["serial", "one_by_one", ""]
    assert run.snapshot(0).config == run.snapshot(0).config, "a recorded function is one object"
    with pytest.raises(RuntimeError, match="only the name of the schedule serial"):
        run.snapshot(0).config.schedule(ScheduleSettings(), [])  # type: ignore[operator]
    assert "0x" not in render_report([run]).split("<svg")[0]
    assert "schedule serial → one_by_one" in (tmp_path / "log.jsonl").read_text(encoding="utf-8")


def test_a_session_is_resumed_with_the_function_of_that_name(trained: list[torch.Tensor], tmp_path: Path) -> None:
    options: dict[str, Any] = {"probe": False, "autosave": Autosave(tmp_path, steps=2, minutes=None)}
    with make_relay(CONFIG) as relay, Session(relay, BATCHES, **options) as session:
        train(session, 4)
    for config, expected in ((CONFIG, serial), (replace(CONFIG, schedule="breadth_first"), "breadth_first")):
        with make_relay(config) as relay, Session(relay, BATCHES, **options) as session:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                session.resume()
            assert any("saved with schedule=serial" in str(one.message) for one in caught) == (expected != serial)
            assert relay.config.schedule == expected and relay.steps == 4


def test_its_script_repeats_it(trained: list[torch.Tensor]) -> None:
    with make_relay(CONFIG) as relay, Session(relay, BATCHES, probe=False) as session:
        train(session, 2)
        session.reconfigure(schedule=one_by_one, ahead=0)
        train(session, 1)
        plan = relay.plan(BATCHES[0])
        session.reconfigure(schedule=plan)
        train(session, 1)
        script = session.script()
    assert (
        "schedule=serial" in script and "by_hand('relay.config = replace(relay.config, schedule=one_by_one)'" in script
    )
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script", "exec"), names)

    def by_hand(what: str, relay: Any) -> None:
        assert what.endswith("schedule=one_by_one)")
        relay.config = replace(relay.config, schedule=one_by_one)

    names["by_hand"] = by_hand
    with make_relay(CONFIG) as relay:
        names["reproduce"](relay, itertools.cycle(BATCHES))
        assert relay.config.schedule == plan
        relay.config = replace(relay.config, schedule="breadth_first")
        for batch in BATCHES[4:]:
            relay.step(batch)
        assert_equal(weights_of(relay), trained)


def test_a_refused_schedule_is_a_state_with_its_remedy() -> None:
    def nothing(settings: ScheduleSettings, visits: Sequence[str]) -> list[Action]:
        return []

    with make_relay(replace(CONFIG, schedule=nothing)) as relay, Session(relay, BATCHES, probe=False) as session:
        before = weights_of(relay)
        train(session, 1)
        failure = session.snapshot().failure
        assert failure is not None and failure.error == "PlanError" and "append P:shell" in failure.message
        assert_equal(weights_of(relay), before)
        session.reconfigure(schedule=serial)
        train(session, 1)
        assert relay.steps == 1 and session.snapshot().failure is None
