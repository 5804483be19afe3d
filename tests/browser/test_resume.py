"""A session that goes on after its kernel was restarted, by the button above the header."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

BENCH = """
from workbench import Autosave
rows = torch.linspace(-1, 1, 48).reshape(12, 4)
Workbench(relay, [(rows, rows[:, :1])], autosave=Autosave("saved session", steps=2), view="loss")
"""


@pytest.mark.slow
def test_a_session_is_resumed_after_its_kernel_was_restarted(
    open_notebook: Callable[..., Notebook], page: Page
) -> None:
    notebook = open_notebook(RELAY, BENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    for step in (1, 2, 3):
        bench.press("Step")
        bench.wait_for_step(step)
    until(lambda: "saved after step 3" in bench.title, page, "the save")
    loss = bench.loss

    notebook.restart()
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    offer = bench.root.get_by_text("A session of 3 steps was saved on")
    offer.wait_for()
    bench.screenshot("resume_offer")
    until(bench.button("Run").is_disabled, page, "Run to be disabled")
    assert bench.step == 0
    bench.press("Resume")
    bench.wait_for_step(3)
    until(lambda: not offer.is_visible(), page, "the offer to go")
    assert bench.loss == loss
    until(bench.button("Run").is_enabled, page, "Run to be enabled")
    bench.screenshot("resumed")
    bench.press("Step")
    bench.wait_for_step(4)
