"""Pressing, sliding and failing: what a person sees of a session that trains."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from lab import ROOT, Lab, Notebook, keep, until
from patience import HANG_S
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

OWN = 8  # the code cell of 00_start_here that shows a second workbench


def test_first_notebook_trains_before_the_eyes(page: Page, lab: Lab) -> None:
    notebook = Notebook(page, lab, lab.copy(ROOT / "notebooks/00_start_here.ipynb"))
    notebook.run_cell(0)  # needs no other one
    bench = notebook.bench(0)
    assert bench.state == "idle"
    bench.screenshot("first_idle")
    notes = bench.watch()

    bench.press("Run")
    bench.wait_for_step(3)
    bench.screenshot("first_running")
    bench.handle("emulated link").focus()
    for _ in range(3):  # 100, 50, 20, 10 MB/s: a step of seconds
        page.keyboard.press("ArrowLeft")
    bench.press("Loss")
    loss = bench.root.locator("svg.l2l[aria-label=Loss]")
    until(lambda: "→ 10 MB/s" in loss.text_content(), page, "the change beside the loss")
    bench.press("Relay")
    bench.wait_for_step(bench.step + 1)
    bench.press("Time")
    bench.press("Why: the bound of each phase")
    bench.wait_for_step(bench.step + 2)
    said = bench.root.locator(".l2l-why").inner_text()
    # a faster link, or more micro-batches where compute is slow enough to hide it
    assert "instead of 10 MB/s" in said or "instead of 4" in said, f"what binds the step, and what would help: {said}"
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


@pytest.mark.slow
def test_after_run_all_the_first_notebook_is_alive(page: Page, lab: Lab) -> None:
    """Whoever presses Run All first can press Run afterwards; and the kernel ends although nothing was closed."""
    notebook = Notebook(page, lab, lab.copy(ROOT / "notebooks/00_start_here.ipynb"))
    cells = notebook.panel.locator(".jp-CodeCell").count()
    notebook.choose("Run", re.compile("^Run All Cells$"))
    notebook.wait_for_cell(cells - 1, 3 * HANG_S)
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    for bench in (notebook.bench(0), notebook.bench(OWN)):
        bench.wait_for_state("idle")
        step = bench.step
        assert step > 12, "the notebook's own steps"
        bench.press("Run")
        bench.wait_for_step(step + 2)
        bench.press("Pause")
        bench.wait_for_state("paused")
    keep(page, "after_run_all")
    lab.shut_down_kernels()  # asserts that no process is left


@pytest.mark.slow
def test_step_without_room_is_drawn_until_the_next_run(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(
        RELAY,
        "with make_relay() as probe:\n    budget = probe.step(batches[0]).peak_device_bytes\n"
        "relay.device.ledger.limit_bytes = relay.device.memory_bytes = budget",
        WORKBENCH,
        "workbench.reconfigure(micro_batches=1)",
        "workbench.reconfigure(micro_batches=2)",
    )
    for number in range(3):
        notebook.run_cell(number)
    bench = notebook.bench(2)
    bench.press("Step")
    bench.wait_for_step(1)
    memory = bench.picture(2)
    assert "peak" in memory.text_content()
    notebook.run_cell(3)
    bench.press("Step")
    bench.wait_for_state("failed")
    until(lambda: "× failed at" in memory.text_content(), page, "the failed step in the memory picture")
    said = memory.text_content()
    assert "allocating" in said and "too much" in said and "budget" in said
    assert "× failed" not in bench.picture(1).text_content(), "the timeline is that of the last finished step"
    bench.screenshot("failed_memory")
    notebook.run_cell(4)
    bench.press("Step")
    bench.wait_for_step(2)
    until(lambda: "× failed" not in memory.text_content(), page, "the mark to go")


@pytest.mark.slow
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
    skip = bench.button("Skip the failed batch and continue with the next one").bounding_box()
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


@pytest.mark.slow
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
