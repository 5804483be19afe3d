"""Nothing is clipped, hidden or illegible, also in the dark theme."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, brightness, keep, until
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

CLIPPED = """root => [...root.querySelectorAll(".widget-readout, button, label, .l2l-state, .l2l-progress")]
    .filter(e => e.getClientRects().length && (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight + 2))
    .map(e => e.className + ": " + e.textContent)"""
STRETCHED = """root => [...root.querySelectorAll("button")].filter(e => e.clientWidth > 300).map(e => e.textContent)"""
FOLDS = [
    "The moment in words",
    "The last step's lanes as a table",
    "The last step's peaks as a table",
    "Losses as a table",
    "Figures of the layers as a table",
]


@pytest.mark.slow
def test_nothing_is_clipped_or_dark_on_dark_and_folds_open(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab
) -> None:
    lab.set_theme("JupyterLab Dark")
    try:
        notebook = open_notebook(RELAY, WORKBENCH)
    finally:
        lab.set_theme("JupyterLab Light")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Run")
    bench.wait_for_step(2)
    bench.screenshot("dark_running")
    bench.press("Pause")
    bench.wait_for_state("paused")
    bench.press("Next visit")
    until(lambda: "event" in bench.moment, page, "a visit of the last step")
    for words in bench.root.locator(".l2l-state, .l2l-title > span:last-child, svg.l2l text.strong").all():
        assert brightness(words) > 150, f"{words.text_content()!r} is dark on dark"
    assert bench.root.evaluate(CLIPPED) == []

    for words in FOLDS:
        bench.press(words)
    until(lambda: bench.root.locator(".l2l-behind table:visible").count() == len(FOLDS), page, "a table in each")
    assert bench.root.evaluate(STRETCHED) == []
    keep(page, "dark_folds_open")
