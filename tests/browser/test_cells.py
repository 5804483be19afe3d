"""Cells that run again, panels by themselves, kernels that restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest
from lab import Lab, Notebook, keep, until
from tiny import RELAY, THREADS, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_cell_that_runs_again_replaces_its_workbench(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY, WORKBENCH, THREADS)
    for number in (0, 1, 1, 1):
        notebook.run_cell(number)
    assert page.locator(".l2l-workbench").count() == 1
    bench = notebook.bench(1)
    bench.press("Run")
    bench.wait_for_step(2)
    notebook.run_cell(1)  # while it trains
    bench = notebook.bench(1)
    assert page.locator(".l2l-workbench").count() == 1
    bench.press("Step")
    until(lambda: "loss" in bench.title, page, "a step of the new session")
    until(lambda: notebook.run_cell(2) == "['pump', 'session']", page, "the threads of one workbench")


@pytest.mark.slow
def test_panel_alone_shows_and_follows(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(
        RELAY,
        "from workbench.panels.timeline_panel import TimelinePanel\nfrom workbench.session import Session\n"
        "session = Session(relay, batches)\nTimelinePanel(session)",
        "session.run()",
    )
    notebook.run_cell(0), notebook.run_cell(1)
    live = notebook.cell(1).locator('[class*="-live"]')
    assert "The timeline appears with the first step." in live.inner_text()
    notebook.run_cell(2)
    figures = set()

    def changed() -> bool:
        figures.add("".join(live.locator("svg text").all_text_contents()))
        return len(figures) > 5

    until(changed, page, "six different timelines")
    assert "compute" in live.locator("svg text").all_text_contents()
    fold = live.locator(".l2l-behind button").bounding_box()
    assert fold is not None and fold["width"] < 300, "the style of the workbench"
    keep(notebook.cell(1), "panel_alone")


@pytest.mark.slow
def test_restart_while_training_leaves_no_kernel_behind(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab
) -> None:
    notebook = open_notebook(RELAY, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Run")
    bench.wait_for_step(1)
    (old,) = lab.kernels()
    notebook.restart()
    assert not psutil.pid_exists(old.pid) or not old.is_running()
    (new,) = lab.kernels()
    assert new.pid != old.pid
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
