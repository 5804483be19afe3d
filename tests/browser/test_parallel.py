"""Ways to train over ranks, in the page: chosen by pointer and keys, sliders that change the table, in both themes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, brightness, keep, until
from page_checks import HAS_AXE, find_cut_parts, find_violations

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SHOW = 'import workbench\nbench = workbench.Parallel("7.5B", ranks=64)\nbench'


@pytest.mark.parametrize("theme", ["Dark", "Light"])
def test_a_way_is_chosen_and_explained(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab, theme: str
) -> None:
    lab.set_theme(f"JupyterLab {theme}")
    try:
        notebook = open_notebook(SHOW, "print(bench.chosen)")
    finally:
        lab.set_theme("JupyterLab Light")
    notebook.run_cell(0)
    root = notebook.cell(0).locator(".l2l-workbench")
    root.locator("tr.l2l-chosen").wait_for()
    assert root.locator("tr.l2l-chosen th").inner_text() == "ZeRO 3", "the fastest that fits"
    for words in root.locator("svg.l2l text.strong, tbody th").all():
        assert (brightness(words) > 150) == (theme == "Dark"), words.text_content()
    root.locator('tr[data-key="layout-16"]').click()
    until(lambda: root.locator("pre").count() == 1, page, "the schedule of the row that was clicked")
    assert "R0" in root.locator("pre").inner_text()
    root.locator(".l2l-picks").focus()
    page.keyboard.press("ArrowUp")
    until(lambda: "interleaved" in root.locator("tr.l2l-chosen th").inner_text(), page, "the way above, by keys")
    keep(root, f"parallel_{theme.lower()}")
    slider = root.get_by_role("slider").nth(3)  # memory of a rank
    slider.focus()
    page.keyboard.press("ArrowLeft")
    until(
        lambda: "budget 79 GB" in (root.locator("svg").first.text_content() or ""), page, "the picture of less memory"
    )
    root.get_by_role("button", name="The finder").click()
    until(lambda: "the fastest that fits" in root.locator(".l2l-behind").first.inner_text(), page, "the finder's table")
    assert notebook.run_cell(1).startswith("interleaved 1F1B")
    keep(root, f"parallel_{theme.lower()}_finder")
    page.set_viewport_size({"width": 1280, "height": 720})
    assert root.evaluate("e => e.scrollWidth <= e.clientWidth + 1"), "nothing is cut off"
    assert find_cut_parts(root) + (find_violations(root) if HAS_AXE else []) == []
