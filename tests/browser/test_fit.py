"""Will it fit? A way is chosen by pointer and keys, controls have names, and settings change the table in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, brightness, keep, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

SHOW = 'import workbench\nfit = workbench.Fit("gpt2", card="L4 24GB", host="64GB", disk="1TB", rows=4)\nfit'


@pytest.mark.parametrize("theme", ["Dark", pytest.param("Light", marks=pytest.mark.slow)])
def test_a_way_is_chosen_and_its_program_is_shown(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab, theme: str
) -> None:
    lab.set_theme(f"JupyterLab {theme}")
    try:
        notebook = open_notebook(SHOW, "print(fit.chosen.name, fit.chosen.micro_batches)")
    finally:
        lab.set_theme("JupyterLab Light")
    notebook.run_cell(0)
    root = notebook.cell(0).locator(".l2l-workbench")
    root.locator("tr.l2l-chosen").wait_for()
    assert root.locator("tr.l2l-chosen th").inner_text() == "in core", "the fastest that fits"
    for words in root.locator("tbody th").all():
        assert (brightness(words) > 150) == (theme == "Dark"), words.text_content()

    root.get_by_role("button", name="Its program").click()
    program = root.get_by_label("Its program", exact=True)
    until(lambda: "AutoModelForCausalLM" in program.input_value(), page, "the program of the way that is chosen")
    root.locator('tr[data-key="fit-relay"]').click()
    until(lambda: "with Relay(" in program.input_value(), page, "that of the row that was clicked")
    root.locator(".l2l-picks").focus()
    page.keyboard.press("ArrowRight")
    until(lambda: "quantize='nf4'" in program.input_value(), page, "the way between")
    page.keyboard.press("ArrowRight")
    until(lambda: "FileShelf(" in program.input_value(), page, "the next way, by keys")

    root.get_by_label("tokens of a row").fill("512")
    root.get_by_label("tokens of a row").press("Enter")
    until(lambda: "512 tokens" in root.inner_text(), page, "the table of the new length")
    assert root.locator("tr.l2l-chosen th").inner_text() == "relay on disk", "the choice stays"
    root.get_by_label("host memory, GB").fill("1")
    root.get_by_label("host memory, GB").press("Enter")
    until(lambda: "of host memory" in root.locator('tr[data-key="fit-relay"]').inner_text(), page, "what it lacks")
    assert notebook.run_cell(1).startswith("relay on disk")
    page.set_viewport_size({"width": 1280, "height": 720})
    assert root.evaluate("e => e.scrollWidth <= e.clientWidth + 1"), "nothing is cut off"
    keep(root, f"fit_{theme.lower()}")
