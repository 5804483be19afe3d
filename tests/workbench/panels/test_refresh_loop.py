"""The refresh loop: newest snapshots for the views, with limits on frame rate and processor time."""

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
    """Records its snapshots."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []
        self.times_s: list[float] = []

    def __call__(self, now: Snapshot) -> None:
        self.seen.append(now)
        self.times_s.append(time.monotonic())


@pytest.fixture
def session() -> Iterator[Session]:
    with make_relay() as relay, Session(relay, make_batches()) as made:
        yield made


@pytest.fixture
def loop(session: Session) -> Iterator[RefreshLoop]:
    """A refresh loop with practically no limits."""
    made = RefreshLoop(session, hz=200, share=1.0)
    yield made
    for view in list(made._views):
        made.remove(view)
    made.join()


def test_view_is_called_at_once_and_after_changes(session: Session, loop: RefreshLoop) -> None:
    view = View()
    loop.add(view)
    assert [now.step for now in view.seen] == [0], "before `add` returns"
    train(session, 3)
    wait_until(lambda: view.seen[-1].step == 3)
    numbers = [now.number for now in view.seen]
    assert numbers == sorted(numbers), "in order"


def test_unchanged_session_is_not_drawn(session: Session, loop: RefreshLoop) -> None:
    view = View()
    loop.add(view)
    train(session, 1)
    wait_until(lambda: view.seen[-1].state == "idle" and view.seen[-1].step == 1)
    time.sleep(0.05)
    frames, seen = loop.frames, len(view.seen)
    time.sleep(0.7)  # longer than `_IDLE_WAIT_S`
    assert (loop.frames, len(view.seen)) == (frames, seen)


def test_step_in_progress_is_redrawn(session: Session, loop: RefreshLoop) -> None:
    view = View()
    loop.add(view)
    with held(session.relay):
        session.step()
        enter(session.relay)
        wait_until(lambda: sum(now.progress is not None for now in view.seen) >= 5)
    moments_s = [now.progress.now_s for now in view.seen if now.progress is not None]
    assert moments_s == sorted(moments_s) and moments_s[0] < moments_s[-1]
    session.wait(HANG_S)


def test_frame_rate_is_limited(session: Session) -> None:
    loop, view = RefreshLoop(session, hz=20, share=1.0), View()
    loop.add(view)
    with held(session.relay):
        session.step()
        enter(session.relay)
        wait_until(lambda: len(view.times_s) >= 8)
    loop.remove(view)
    drawn_s = view.times_s[2:]  # the first two are drawn by `add` and at the start of the thread
    assert all(later - earlier >= 0.045 for earlier, later in zip(drawn_s, drawn_s[1:], strict=False))


def test_slow_view_is_drawn_less_often(session: Session) -> None:
    share = 0.2

    def burn(now: Snapshot) -> None:
        until_s = time.thread_time() + 0.01
        while time.thread_time() < until_s:
            pass

    loop = RefreshLoop(session, hz=1000, share=share)
    began_s = time.monotonic()
    loop.add(burn)
    with held(session.relay):
        session.step()
        enter(session.relay)
        wait_until(lambda: loop.frames >= 10)
        wall_s, busy_s = time.monotonic() - began_s, loop.busy_s
    loop.remove(burn)
    assert busy_s >= 0.09, "the time in views is counted"
    assert busy_s / wall_s <= 2 * share


def test_slow_view_gets_only_the_newest_snapshot(session: Session, loop: RefreshLoop) -> None:
    seen: list[int] = []
    busy, proceed = threading.Event(), threading.Event()

    def slow(now: Snapshot) -> None:
        seen.append(now.step)
        if threading.current_thread().name == "refresh loop":
            busy.set()
            assert proceed.wait(HANG_S)

    loop.add(slow)
    assert busy.wait(HANG_S)
    train(session, 20)  # during the first frame of the view
    proceed.set()
    wait_until(lambda: seen[-1] == 20)
    assert seen == [0, 0, 20]


def test_thread_exists_while_there_are_views(session: Session) -> None:
    loop, first, second = RefreshLoop(session, hz=1e-6), View(), View()  # a frame in eleven days
    assert not threads_named("refresh loop"), "no thread without views"
    loop.add(first)
    loop.add(second)
    assert threads_named("refresh loop") == ["refresh loop"], "one for all"
    loop.remove(first)
    wait_until(lambda: loop.frames == 1)
    assert threads_named("refresh loop")
    loop.remove(second)
    wait_until(lambda: not threads_named("refresh loop"))  # it ends at once
    loop.add(first)
    assert threads_named("refresh loop")
    loop.remove(first)
    loop.remove(first)  # does nothing
    loop.join()
    wait_until(lambda: not threads_named("refresh loop"))


def test_removed_view_is_not_called(session: Session, loop: RefreshLoop) -> None:
    views = [View() for _ in range(3)]
    for view in views:
        loop.add(view)
    with held(session.relay):
        session.step()
        enter(session.relay)
        loop.remove(views[1])
        seen = len(views[1].seen)
        frames = loop.frames
        wait_until(lambda: loop.frames > frames + 3)
    assert len(views[1].seen) == seen


def test_view_can_remove_itself_and_others(session: Session, loop: RefreshLoop) -> None:
    other, calls = View(), []

    def once(now: Snapshot) -> None:
        if threading.current_thread().name == "refresh loop":
            calls.append(now)
            loop.remove(once)
            loop.remove(other)

    with loop._drawing:  # the thread draws no frame before both are added
        loop.add(once)
        loop.add(other)
    session.reconfigure(ahead=2)
    wait_until(lambda: not threads_named("refresh loop"))
    assert len(calls) == 1
    assert len(other.seen) == 1, "called by `add` only"


def test_failing_view_is_removed(session: Session, loop: RefreshLoop, caplog: pytest.LogCaptureFixture) -> None:
    def fail(now: Snapshot) -> None:
        if threading.current_thread().name == "refresh loop":
            raise RuntimeError("no page to draw on")

    view = View()
    with caplog.at_level(logging.ERROR):
        loop.add(fail)
        loop.add(view)
        train(session, 2)
        wait_until(lambda: view.seen[-1].step == 2)
    assert loop._views == [view]
    assert "no page to draw on" in caplog.text


def test_views_are_added_and_removed_by_several_threads(session: Session, loop: RefreshLoop) -> None:
    views = [View() for _ in range(4)]
    session.run()

    def add_and_remove(view: View) -> None:
        for _ in range(20):
            loop.add(view)
            time.sleep(0.001)
            loop.remove(view)

    threads = [threading.Thread(target=add_and_remove, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    session.stop()
    session.wait(HANG_S)
    wait_until(lambda: not threads_named("refresh loop"))
    assert all(len(view.seen) >= 20 for view in views)
    seen = [len(view.seen) for view in views]
    train(session, 1)
    assert [len(view.seen) for view in views] == seen


def test_panels_of_a_session_share_one_refresh_loop(session: Session) -> None:
    assert RefreshLoop.for_session(session) is RefreshLoop.for_session(session)


def test_session_without_views_is_freed() -> None:
    with make_relay() as relay:
        session, view = Session(relay, make_batches()), View()
        RefreshLoop.for_session(session).add(view)
        train(session, 1)
        session.close()
        RefreshLoop.for_session(session).remove(view)
        wait_until(lambda: not threads_named("refresh loop", "session"))
        view.seen.clear()
        left = ref(session)
        del session
        gc.collect()
        assert left() is None, "with its traces"
