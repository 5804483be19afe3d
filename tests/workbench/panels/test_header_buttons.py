"""Buttons of the header, and its display of failures."""

from __future__ import annotations

import threading
from typing import Any

from panel_reading import find, html_of, shown
from patience import HANG_S
from sessions import Batch, enter, held, make_batches

from l2l_core import Relay
from workbench.panels.header_panel import HeaderPanel
from workbench.session.session import Session


def test_run_trains_the_number_of_steps_set(header: HeaderPanel) -> None:
    find(header, "steps").value = 3
    find(header, "Run").click()
    now = header.session.wait(HANG_S)
    assert (now.state, now.step, now.target) == ("idle", 3, 3)
    shown(header)
    assert "step 3" in html_of(header) and "3 of 3 steps" in html_of(header)


def test_second_click_on_run_does_nothing(header: HeaderPanel) -> None:
    find(header, "steps").value = 2
    with held(header.session.relay):
        find(header, "Run").click()
        enter(header.session.relay)
        find(header, "Run").click()
    assert header.session.wait(HANG_S).step == 2


def test_second_click_on_run_does_nothing_in_the_queue(header: HeaderPanel) -> None:
    proceed = threading.Event()
    find(header, "steps").value = 2
    header.session.edit(lambda relay: proceed.wait(HANG_S))
    find(header, "Run").click()
    find(header, "Run").click()
    proceed.set()
    assert header.session.wait(HANG_S).step == 2


def test_run_resumes_after_pause(header: HeaderPanel) -> None:
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


def test_run_cancels_a_pending_pause(header: HeaderPanel) -> None:
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


def test_run_during_the_last_step_starts_no_endless_run(header: HeaderPanel) -> None:
    session = header.session
    find(header, "steps").value = 1
    with held(session.relay):
        find(header, "Run").click()
        enter(session.relay)
        find(header, "Pause").click()
        find(header, "Run").click()
    assert session.wait(HANG_S).step == 1


def test_queue_is_shown_at_once_and_can_be_emptied(header: HeaderPanel) -> None:
    session = header.session
    back = find(header, "Take back")
    assert back.layout.visibility == "hidden"
    with held(session.relay):
        find(header, "Step").click()
        enter(session.relay)
        find(header, "Step").click()  # without a frame afterwards
        assert "waits for step 1 to end: 1. step" in header._progress.value
        find(header, "Stop").click()
        assert "waits for step 1 to end: 1. step; 2. stop" in header._progress.value
        assert back.layout.visibility == "visible"
        back.click()
        assert session.snapshot().queued == ("step",) and "2. stop" not in header._progress.value
        back.click()
        assert back.layout.visibility == "hidden" and "waits" not in header._progress.value
    assert session.wait(HANG_S).step == 1


def test_run_after_stop_starts_a_new_run(header: HeaderPanel) -> None:
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


def test_step_trains_one_step_and_stop_ends_a_run(header: HeaderPanel) -> None:
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
    assert session.wait(HANG_S).step == 4, "the earlier run has ended"


# Failures ------------------------------------------------------------------------------------------------------------


def trouble(header: HeaderPanel) -> Any:
    """Return the error box below the settings."""
    return header.widget.children[-1]


def test_failed_step_is_shown_and_can_be_skipped(relay: Relay) -> None:
    made: list[int] = []

    def make_batch() -> Batch:
        made.append(len(made))
        return make_batches(1)[0]

    with Session(relay, make_batch) as session:
        header = HeaderPanel(session)
        shown(header)
        assert trouble(header).layout.display == "none"
        relay.model[2].error = ValueError("a <layer> failed\nwith details")
        find(header, "steps").value = 3
        find(header, "Run").click()
        session.wait(HANG_S)
        for _ in range(2):
            shown(header)
        output = html_of(header)
        assert trouble(header).layout.display == "" and find(header, "Skip this batch").layout.display == ""
        assert "Step 1 failed: " in output and "a &lt;layer&gt; failed" in output and "<layer>" not in output
        assert "Weights and optimizer are as they were" in output
        assert "Traceback (most recent call last)" in output and "failed" in output
        find(header, "Skip this batch").click()
        relay.model[2].error = None
        find(header, "Run").click()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.target) == ("idle", 3, 3), "the run continues"
        assert len(made) == 4, "the batch of the failed step was dropped"
        shown(header)
        assert trouble(header).layout.display == "none"


def test_other_failures_have_no_skip_button(header: HeaderPanel) -> None:
    header.session.edit(lambda relay: 1 / 0)
    header.session.wait(HANG_S)
    shown(header)
    assert trouble(header).layout.display == "" and "division by zero" in html_of(header)
    assert find(header, "Skip this batch").layout.display == "none"
    find(header, "Step").click()
    header.session.wait(HANG_S)
    shown(header)
    assert trouble(header).layout.display == "none"


def test_controls_of_a_closed_session_show_the_reason(header: HeaderPanel) -> None:
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
    assert "this session is closed" in html_of(header), "until the next click"
