"""Pressing, sliding and failing: what a person sees of a session that trains."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from lab import ROOT, Lab, Notebook, keep, until
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_first_notebook_trains_before_the_eyes(page: Page, lab: Lab) -> None:
    notebook = Notebook(page, lab, lab.copy(ROOT / "notebooks/00_start_here.ipynb"))
    for number in range(5):  # the fifth ends in the workbench
        notebook.run_cell(number)
    bench = notebook.bench(4)
    assert bench.state == "idle"
    bench.screenshot("first_idle")
    notes = bench.watch()

    bench.press("Run")
    bench.wait_for_step(3)
    bench.screenshot("first_running")
    bench.handle("emulated link").focus()
    for _ in range(3):  # 100, 50, 20, 10 MB/s: a step of seconds
        page.keyboard.press("ArrowLeft")
    until(lambda: "→ 10 MB/s" in bench.picture(3).text_content(), page, "the change beside the loss")
    bench.wait_for_step(bench.step + 2)
    said = " ".join(bench.picture(1).locator("text").all_text_contents())
    assert "instead of 10 MB/s" in said, "what binds the step, and what would help"
    bench.screenshot("first_slow_link")
    assert longest_run_of_changes(notes(), "event") > 2, "the relay picture moves within a step"
    assert longest_run_of_changes(notes(), "timeline") > 2, "the timeline moves within a step"
    steps = {note["step"]: note["loss"] for note in notes()}
    assert len(steps) >= 3 and len(set(steps.values())) >= 3, f"step number and loss go on: {steps}"

    bench.press("Pause")
    bench.wait_for_state("paused")
    paused_at = bench.step
    keep(page, "first_paused")
    assert_stays_for(1.6, page, lambda: (bench.state, bench.step), ("paused", paused_at))
    bench.press("Run")
    bench.wait_for_step(paused_at + 1)
    assert bench.state == "running"


def test_slider_changes_the_next_step(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    bench.handle("micro-batches").focus()
    for _ in range(3):  # 2, 3, 4, 6
        page.keyboard.press("ArrowRight")
    until(lambda: "→ 6" in bench.picture(3).text_content(), page, "the change beside the loss", 10)
    bench.press("Step")
    bench.wait_for_step(2)
    bench.press("Next visit")
    until(lambda: "of 6" in bench.picture(0).text_content(), page, "six micro-batches in the relay picture")
    bench.screenshot("six_micro_batches")


@pytest.mark.slow
def test_error_in_a_layer_is_readable_and_mended(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(
        RELAY,
        WORKBENCH,
        "weights = [p.clone() for p in relay.model.parameters()]\nlayers = relay.model[1:5]\nlayers[2].broken = True",
        "print(all(torch.equal(a, b) for a, b in zip(weights, relay.model.parameters())))\nlayers[2].broken = False",
    )
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    notebook.run_cell(2)
    bench.press("Run")
    bench.wait_for_state("failed")

    alert = bench.root.get_by_role("alert")
    assert "this layer wants 7 features and got 8" in alert.inner_text(), "the layer's own words"
    assert "Weights and optimizer are as they were" in alert.inner_text(), "what holds now"
    assert "Traceback" not in alert.inner_text(), "folded"
    skip = bench.button("Let go of the batch that failed; the next step takes another one").bounding_box()
    assert skip is not None and skip["width"] < 200
    bench.screenshot("failed")
    alert.locator("summary").click()
    assert "Traceback (most recent call last)" in alert.inner_text()
    bench.screenshot("failed_unfolded")
    assert page.locator(".jp-Dialog").count() == 0

    assert notebook.run_cell(3) == "True", "weights are as before"
    bench.press("Run")
    bench.wait_for_step(3)
    assert bench.state == "running"
    until(lambda: not alert.is_visible(), page, "the message to go")


def test_kernel_answers_while_training_runs(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY, WORKBENCH, "1+1")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Run")
    bench.wait_for_step(1)
    notebook.start_cell(2)
    until(lambda: notebook.output(2) == "2", page, "the answer", step_ms=10)
    assert bench.state == "running", "it did not wait for the end of the run"


def longest_run_of_changes(notes: list[dict[str, Any]], what: str) -> int:
    """How many different values were seen while the step number stayed the same, at most."""
    seen = defaultdict(set)
    for note in notes:
        seen[note["step"]].add(note[what])
    return max(map(len, seen.values()))


def assert_stays_for(seconds: float, page: Page, what: Callable[[], Any], value: Any) -> None:
    """It is so, and remains so."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        assert what() == value
        page.wait_for_timeout(50)
