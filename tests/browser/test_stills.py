"""What stays on the page when the kernel is gone: pictures of the last step, and no debris of widgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, keep, until
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

STILL, LIVE = '[class$="-still"]', ".l2l-workbench"
PICTURES = ["Relay", "Timeline of a step", "Memory over a step", "Loss", "Gradient norm of layers"]


def test_pictures_survive_restart_and_reload(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab, request: pytest.FixtureRequest
) -> None:
    notebook = open_notebook(RELAY, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    still = notebook.cell(1).locator(STILL)
    until(lambda: len(titles(notebook)) == len(PICTURES), page, "the still of the step")
    assert bench.root.is_visible() and not still.is_visible(), "the widget lives and stands for both"

    notebook.restart()
    still.wait_for()
    assert not bench.root.is_visible(), "no dead buttons"
    assert titles(notebook) == PICTURES
    keep(page, "restarted")

    notebook.save()
    page.reload()
    still.wait_for()
    assert titles(notebook) == PICTURES
    assert "widget" not in notebook.output(1), "neither loading nor an error"

    page.goto("about:blank")
    lab.shut_down_kernels()
    notebook = Notebook(page, lab, notebook.path)
    still.wait_for()
    assert titles(notebook) == PICTURES
    error = page.locator(".jp-OutputArea-output", has_text="Error displaying widget")
    error.wait_for(state="attached")  # JupyterLab writes it
    assert not error.is_visible()
    assert "step 1" in still.inner_text()
    keep(page, "reloaded")


def test_a_prediction_is_a_plain_line_without_its_kernel(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab
) -> None:
    ask = "from workbench.lessons.exercises import predict\nloads = predict('How many?', unit='loads')\nloads"
    notebook = open_notebook(ask)
    notebook.run_cell(0)
    box, still = notebook.cell(0).locator(".widget-vbox"), notebook.cell(0).locator(STILL)
    box.wait_for()
    assert not still.is_visible()
    box.get_by_role("textbox").fill("12")
    box.get_by_role("button", name="Lock").click()
    until(lambda: "locked: 12 loads" in (still.text_content() or ""), page, "the answer in the still")
    notebook.save()
    page.goto("about:blank")
    lab.shut_down_kernels()
    notebook = Notebook(page, lab, notebook.path)
    still.wait_for()
    assert "How many?" in still.inner_text() and "locked: 12 loads" in still.inner_text()
    error = page.locator(".jp-OutputArea-output", has_text="Error displaying widget")
    error.wait_for(state="attached")
    assert not error.is_visible()
    keep(page, "prediction")


@pytest.mark.slow
def test_closed_workbench_leaves_a_still_and_the_other_one_runs(
    open_notebook: Callable[..., Notebook], page: Page
) -> None:
    other = "second = Workbench(make_relay(), batches)\nsecond"
    notebook = open_notebook(RELAY, WORKBENCH, other, "workbench.close()")
    for number in range(3):
        notebook.run_cell(number)
    first, second = notebook.bench(1), notebook.bench(2)
    first.press("Run")
    second.press("Run")
    first.wait_for_step(2)
    second.wait_for_step(2)
    still = notebook.cell(1).locator(STILL)
    assert not still.is_visible()

    notebook.run_cell(3)
    still.wait_for()
    assert first.root.count() == 0
    assert titles(notebook) == PICTURES
    assert "closed: Sequential" in still.inner_text()
    step = second.step
    second.wait_for_step(step + 2)
    keep(page, "two_workbenches")


def titles(notebook: Notebook) -> list[str]:
    """Of the pictures in the still below the second cell."""
    return (
        notebook.cell(1)
        .locator(f"{STILL} svg.l2l > title")
        .evaluate_all("titles => titles.map(title => title.textContent).filter(title => !title.includes(':'))")
    )
