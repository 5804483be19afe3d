"""Without a mouse: Tab reaches the controls, Space and Enter press them, and JupyterLab's own keys do not interfere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_keyboard_alone_runs_and_pauses(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(f"{RELAY}\n{WORKBENCH}")
    page.keyboard.press("Control+Enter")  # runs the cell, which stays active, in command mode
    bench = notebook.bench(0)
    tab_to(page, "Run")
    page.keyboard.press("Space")
    bench.wait_for_step(1)
    assert bench.state == "running"
    page.keyboard.press("Tab")
    assert focused(page) == "Pause"
    page.keyboard.press("Space")
    bench.wait_for_state("paused")
    assert focused(page) == "Pause", "where the next key goes to"

    page.keyboard.press("Shift+Tab")
    assert focused(page) == "Run"
    page.keyboard.press("Enter")
    bench.wait_for_state("running")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    bench.wait_for_state("paused")
    assert page.locator(".jp-mod-editMode").count() == 0, "Enter pressed the button and nothing else"
    bench.screenshot("keyboard")


@pytest.mark.slow
def test_arrow_keys_move_a_slider_and_no_cell(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(f"{RELAY}\n{WORKBENCH}", "")
    notebook.run_cell(0)
    bench = notebook.bench(0)
    handle = bench.handle("layers ahead")
    handle.focus()
    active = active_cells(page)
    for key, ahead in (("ArrowUp", 2), ("ArrowRight", 3), ("ArrowDown", 2), ("ArrowLeft", 1), ("ArrowLeft", 0)):
        page.keyboard.press(key)
        until(
            lambda ahead=ahead: handle.get_attribute("aria-valuenow") == f"{ahead}.0", page, f"{ahead} after {key}", 5
        )
    assert active_cells(page) == active


def active_cells(page: Page) -> list[bool]:
    """Of every cell, whether it is the active one."""
    return page.locator(".jp-Notebook .jp-Cell").evaluate_all(
        "cells => cells.map(cell => cell.classList.contains('jp-mod-active'))"
    )


def focused(page: Page) -> str:
    """The words of what has the focus."""
    return page.evaluate("document.activeElement.textContent").strip()


def tab_to(page: Page, name: str, most: int = 6) -> None:
    """Press Tab until a button has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if focused(page) == name:
            return
    raise AssertionError(f"{most} times Tab, and the focus is on {focused(page)!r}")
