"""The pump: newest snapshots to those who look, at most so often, for at most so much work."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from weakref import ref

import pytest
from patience import HANG_S
from sessions import enter, held, make_batches, make_relay, threads_named, train, wait_until

from workbench.panels.refresh_loop import RefreshLoop
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot


class View:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []
        self.times_s: list[float] = []

    def __call__(self, now: Snapshot) -> None:
        self.seen.append(now)
        self.times_s.append(time.monotonic())


@pytest.fixture
def session() -> Iterator[Session]:
    with make_relay() as relay:
        with Session(relay, make_batches()) as made:
            yield made
        wait_until(lambda: not threads_named("session", "pump"))


@pytest.fixture
def pump(session: Session) -> Iterator[RefreshLoop]:
    """One that may be as fast as it likes."""
    made = RefreshLoop(session, hz=200, share=1.0)
    yield made
    for view in list(made._views):
        made.remove(view)
    made.join()


def test_a_view_is_shown_the_session_at_once_and_then_what_changes(session: Session, pump: RefreshLoop) -> None:
    view = View()
    pump.add(view)
    assert [now.step for now in view.seen] == [0], "before `add` returns"
    train(session, 3)
    wait_until(lambda: view.seen[-1].step == 3)
    numbers = [now.number for now in view.seen]
    assert numbers == sorted(numbers), "never an older one after a newer one"


def test_where_nothing_changes_nothing_is_drawn(session: Session, pump: RefreshLoop) -> None:
    view = View()
    pump.add(view)
    train(session, 1)
    wait_until(lambda: view.seen[-1].state == "idle" and view.seen[-1].step == 1)
    time.sleep(0.05)
    frames, seen = pump.frames, len(view.seen)
    time.sleep(0.7)  # longer than the pause between two looks at a quiet session
    assert (pump.frames, len(view.seen)) == (frames, seen)


def test_a_step_under_way_is_drawn_again_and_again(session: Session, pump: RefreshLoop) -> None:
    view = View()
    pump.add(view)
    with held(session.relay):
        session.step()
        enter(session.relay)
        wait_until(lambda: sum(now.progress is not None for now in view.seen) >= 5)
    moments_s = [now.progress.now_s for now in view.seen if now.progress is not None]
    assert moments_s == sorted(moments_s) and moments_s[0] < moments_s[-1]
    session.wait(HANG_S)


def test_there_are_at_most_so_many_frames_a_second(session: Session) -> None:
    pump, view = RefreshLoop(session, hz=20, share=1.0), View()
    pump.add(view)
    with held(session.relay):
        session.step()
        enter(session.relay)
        wait_until(lambda: len(view.times_s) >= 8)
    pump.remove(view)
    drawn_s = view.times_s[2:]  # the first is drawn by `add`, and the thread looks once for itself
    assert all(later - earlier >= 0.045 for earlier, later in zip(drawn_s, drawn_s[1:], strict=False))


def test_a_view_that_takes_long_is_drawn_less_often(session: Session) -> None:
    share = 0.2

    def burn(now: Snapshot) -> None:
        until_s = time.thread_time() + 0.01
        while time.thread_time() < until_s:
            pass

    pump = RefreshLoop(session, hz=1000, share=share)
    began_s = time.monotonic()
    pump.add(burn)
    with held(session.relay):
        session.step()
        enter(session.relay)
        wait_until(lambda: pump.frames >= 10)
        wall_s, busy_s = time.monotonic() - began_s, pump.busy_s
    pump.remove(burn)
    assert busy_s >= 0.09, "what it takes is counted"
    assert busy_s / wall_s <= 2 * share


def test_who_is_late_gets_the_newest_snapshot_and_no_others(session: Session, pump: RefreshLoop) -> None:
    seen: list[int] = []
    busy, go_on = threading.Event(), threading.Event()

    def slow(now: Snapshot) -> None:
        seen.append(now.step)
        if threading.current_thread().name == "pump":
            busy.set()
            assert go_on.wait(HANG_S)

    pump.add(slow)
    assert busy.wait(HANG_S)
    train(session, 20)  # while the view is at its first frame
    go_on.set()
    wait_until(lambda: seen[-1] == 20)
    assert seen == [0, 0, 20]


def test_the_thread_ends_with_the_last_view_and_begins_with_another(session: Session) -> None:
    pump, first, second = RefreshLoop(session, hz=1e-6), View(), View()  # a frame in eleven days
    assert not threads_named("pump"), "without views there is nothing to do"
    pump.add(first)
    pump.add(second)
    assert threads_named("pump") == ["pump"], "one for all"
    pump.remove(first)
    wait_until(lambda: pump.frames == 1)
    assert threads_named("pump")
    pump.remove(second)
    wait_until(lambda: not threads_named("pump"))  # it does not sleep on
    pump.add(first)
    assert threads_named("pump")
    pump.remove(first)
    pump.remove(first)  # twice is fine
    pump.join()
    wait_until(lambda: not threads_named("pump"))


def test_a_view_that_has_been_removed_is_not_called(session: Session, pump: RefreshLoop) -> None:
    views = [View() for _ in range(3)]
    for view in views:
        pump.add(view)
    with held(session.relay):
        session.step()
        enter(session.relay)
        pump.remove(views[1])
        seen = len(views[1].seen)
        frames = pump.frames
        wait_until(lambda: pump.frames > frames + 3)
    assert len(views[1].seen) == seen


def test_a_view_may_remove_itself_and_others(session: Session, pump: RefreshLoop) -> None:
    other, calls = View(), []

    def once(now: Snapshot) -> None:
        if threading.current_thread().name == "pump":
            calls.append(now)
            pump.remove(once)
            pump.remove(other)

    with pump._drawing:  # both are there before the thread draws its first frame
        pump.add(once)
        pump.add(other)
    session.reconfigure(ahead=2)
    wait_until(lambda: not threads_named("pump"))
    assert len(calls) == 1
    assert len(other.seen) == 1, "that of `add`: it was removed before its turn"


def test_a_view_that_fails_is_shown_no_more_and_the_others_go_on(
    session: Session, pump: RefreshLoop, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(now: Snapshot) -> None:
        if threading.current_thread().name == "pump":
            raise RuntimeError("no page to draw on")

    view = View()
    with caplog.at_level(logging.ERROR):
        pump.add(fail)
        pump.add(view)
        train(session, 2)
        wait_until(lambda: view.seen[-1].step == 2)
    assert pump._views == [view]
    assert "no page to draw on" in caplog.text


def test_views_come_and_go_from_several_threads(session: Session, pump: RefreshLoop) -> None:
    views = [View() for _ in range(4)]
    session.run()

    def come_and_go(view: View) -> None:
        for _ in range(20):
            pump.add(view)
            time.sleep(0.001)
            pump.remove(view)

    threads = [threading.Thread(target=come_and_go, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    session.stop()
    session.wait(HANG_S)
    wait_until(lambda: not threads_named("pump"))
    assert all(len(view.seen) >= 20 for view in views)
    seen = [len(view.seen) for view in views]
    train(session, 1)
    assert [len(view.seen) for view in views] == seen


def test_panels_of_a_session_share_one_pump(session: Session) -> None:
    assert RefreshLoop.for_session(session) is RefreshLoop.for_session(session)


def test_a_session_that_nobody_looks_at_any_more_is_let_go() -> None:
    with make_relay() as relay:
        session, view = Session(relay, make_batches()), View()
        RefreshLoop.for_session(session).add(view)
        train(session, 1)
        session.close()
        RefreshLoop.for_session(session).remove(view)
        wait_until(lambda: not threads_named("pump", "session"))
        view.seen.clear()
        left = ref(session)
        del session
        gc.collect()
        assert left() is None, "with its traces and all that hangs on them"
