"""Searches for settings and races: progress in the header, a failure that is shown at once, and Cancel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from patience import HANG_S
from sessions import assert_equal, make_batches, make_relay, train, wait_until, weights_of

from l2l_core import Drop, EmulatedDevice, RelayConfig
from workbench.pictures import header_html, progress_html
from workbench.session.session import Session
from workbench.session.settings_search import SearchCancelled


@pytest.fixture
def session() -> Iterator[Session]:
    """A session whose device has room for six micro-batches, not for one."""
    config = RelayConfig(micro_batches=6)
    with make_relay(config) as probe:
        budget = probe.step(make_batches()[0]).peak_device_bytes
    device = EmulatedDevice(memory_bytes=budget)
    with make_relay(config, device) as relay, Session(relay, make_batches(), probe=False) as made:
        train(made, 1)
        yield made


class Gate:
    """Holds the session's thread in a rehearsal while a search runs."""

    def __init__(self, session: Session) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        model: Any = session.relay.model
        self._hook = model[1].register_forward_pre_hook(lambda *_: self._pass(session))

    def _pass(self, session: Session) -> None:
        if session.snapshot().search is not None:
            self.entered.set()
            assert self.opened.wait(HANG_S)

    def open(self) -> None:
        self.opened.set()
        self._hook.remove()


def test_step_that_does_not_fit_fails_at_once_and_the_search_goes_on(session: Session) -> None:
    gate = Gate(session)
    session.reconfigure(micro_batches=1)
    session.step()
    assert gate.entered.wait(HANG_S)
    now = session.snapshot()
    assert now.state == "failed" and now.failure is not None and now.failure.error == "DeviceOutOfMemory"
    assert now.failure.remedy is None and now.failure.trace is not None and now.progress is None
    assert now.search is not None and now.search.for_remedy and now.search.tried == 1
    assert "failed, searching" in header_html(now) and "settings that fit: 1 tried in 0 s" in progress_html(now)
    gate.open()
    now = session.wait(HANG_S)
    assert now.search is None and now.failure is not None and now.failure.remedy is not None
    assert now.failure.remedy.settings and "searching" not in header_html(now)


def test_search_for_a_remedy_can_be_cancelled(session: Session) -> None:
    gate, weights = Gate(session), weights_of(session.relay)
    session.reconfigure(micro_batches=1)
    session.step()
    assert gate.entered.wait(HANG_S)
    session.cancel_search()
    gate.open()
    now = session.wait(HANG_S)
    assert now.search is None and now.failure is not None and now.failure.remedy is None
    assert_equal(weights_of(session.relay), weights)
    session.reconfigure(micro_batches=6)
    train(session, 1)
    assert session.snapshot().step == 2


def test_fit_shows_its_progress_and_can_be_cancelled(session: Session) -> None:
    before, gate = session.relay.config, Gate(session)
    future = session.fit()
    assert gate.entered.wait(HANG_S)
    now = session.snapshot()
    assert now.search is not None and not now.search.for_remedy and "▶ searching" in header_html(now)
    assert "at most 30 s left once some fit" in progress_html(now)
    session.cancel_search()
    gate.open()
    with pytest.raises(SearchCancelled, match="was cancelled"):
        future.result(HANG_S)
    now = session.wait(HANG_S)
    assert now.search is None and now.state == "idle" and session.relay.config == before and not now.refusal
    train(session, 1)
    assert session.snapshot().step == 2


def test_cancel_without_a_search_cancels_no_later_one(session: Session) -> None:
    session.cancel_search()
    assert session.fit().result(HANG_S).tried


def test_branches_of_a_race_move_alternately_and_the_header_shows_them(session: Session) -> None:
    session.fork("slim").result(HANG_S)
    session.edit(Drop(1)).result(HANG_S)
    race = session.race("main", "slim", steps=400)
    seen: list[tuple[int, int]] = []

    def both() -> bool:
        current = session.snapshot()
        if current.race is not None:
            seen.append((len(current.race["main"].steps), len(current.race["slim"].steps)))
        return bool(seen) and min(seen[-1]) >= 3

    wait_until(both)
    now = session.snapshot()
    assert "▶ racing" in header_html(now)
    assert "slim " in progress_html(now) and "/400, " in progress_html(now) and " left" in progress_html(now)
    session.stop()
    race.result(HANG_S)
    assert all(0 <= main - slim <= 1 for main, slim in seen), seen
    assert "racing" not in header_html(session.wait(HANG_S))
