"""Each view fits a screen, narrow pages lose nothing, the keyboard goes everywhere, and a lecture room can read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Bench, Lab, Notebook, keep, until
from patience import rarely
from tiny import RELAY

from workbench.app import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

TABBED = "workbench = Workbench(relay, batches)\nworkbench"
BELOW = """root => { const page = root.closest(".jp-WindowedPanel-outer").getBoundingClientRect();
    return root.getBoundingClientRect().height - page.height }"""
OUTSIDE = """root => { const box = root.getBoundingClientRect();
    return [...root.querySelectorAll("svg.l2l, button, .l2l-verdict, .l2l-title")].filter(e => e.getClientRects().length)
    .filter(e => e.getBoundingClientRect().right > box.right + 1).map(e => e.className + ": " + e.textContent.slice(0, 40)) }"""


LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"


@pytest.fixture
def bench(open_notebook: Callable[..., Notebook], page: Page, lab: Lab, theme: str) -> Bench:
    """After one step, on a page of 1440 x 900."""
    page.set_viewport_size({"width": 1440, "height": 900})
    lab.set_theme(theme)
    try:
        notebook = open_notebook(RELAY, TABBED)
    finally:
        lab.set_theme(LIGHT)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    return bench


@pytest.mark.parametrize("theme", [LIGHT, rarely(DARK)])
def test_views_fit_a_screen(bench: Bench, page: Page, theme: str) -> None:
    for name in VIEWS:
        bench.press(name.capitalize())
        if name != "race":  # there has been none
            until(lambda: bench.root.locator(".l2l-empty:visible").count() == 0, page, f"something to see of {name}")
        bench.screenshot(f"view_{name}_{theme[11:].lower()}")
        below = bench.root.evaluate(BELOW)
        assert below <= 0, f"{name} is {below:.0f} px too high"
    bench.press("Layers")
    bench.root.locator(".l2l-layers-box [data-key]").nth(1).click()
    until(lambda: bench.root.locator(".l2l-card-charts svg:visible").count() == 2, page, "the card with its charts")
    keep(page, "view_layers_with_card")
    below = bench.root.evaluate(BELOW)
    assert below <= 0, f"with a layer's card the view is {below:.0f} px too high"


@pytest.mark.slow
@pytest.mark.parametrize("theme", [DARK, rarely(LIGHT)])
def test_narrow_pages_lose_nothing(bench: Bench, page: Page, theme: str) -> None:
    page.set_viewport_size({"width": 900, "height": 900})
    bench.press("Relay")
    left, right = bench.root.locator(".l2l-halves > div").all()
    until(lambda: top(right) >= bottom(left), page, "the algorithm below the device")
    for name in VIEWS:
        bench.press(name.capitalize())
        assert bench.root.evaluate(OUTSIDE) == [], (name, bench.root.evaluate("e => e.getBoundingClientRect().width"))
    keep(page, f"narrow_{theme[11:].lower()}")
    page.set_viewport_size({"width": 800, "height": 900})  # as in half of a screen, with the list of files open
    bench.press("Run")
    until(lambda: bench.root.locator(".l2l-progress span").count() > 0, page, "how far the run has come")
    cut = bench.root.locator(".l2l-progress").evaluate("e => e.scrollWidth - e.clientWidth")
    keep(page, "narrowest")
    assert cut <= 0, f"{cut} px of the run's progress are cut off"


@pytest.mark.slow
def test_a_lecture_room_reads_it_and_the_keyboard_turns_views(
    open_notebook: Callable[..., Notebook], page: Page
) -> None:
    page.set_viewport_size({"width": 1280, "height": 720})
    notebook = open_notebook(RELAY, TABBED)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    bench.button("Memory").focus()
    page.keyboard.press("Enter")
    until(lambda: "Memory over a step" in bench.root.inner_html(), page, "the view memory")
    bench.button("Relay").focus()
    page.keyboard.press("Space")
    bench.root.locator(".l2l-present").click()
    until(lambda: page.evaluate("!!document.fullscreenElement"), page, "the whole screen")
    words = bench.root.locator("svg.l2l:visible text", has_text="device").first
    assert words.evaluate("e => e.getBoundingClientRect().height") >= 18
    keep(page, "presents")
    bench.root.locator(".l2l-present").click()
    until(lambda: not page.evaluate("!!document.fullscreenElement"), page, "the page again")
    meant = bench.root.locator(".l2l-term").first
    meant.focus()
    shown = meant.evaluate("e => getComputedStyle(e, '::after').content")
    assert meant.get_attribute("data-means") in shown and meant.get_attribute("data-means") in meant.get_attribute(
        "aria-label"
    )


def top(part: Locator) -> float:
    return part.evaluate("e => e.getBoundingClientRect().top")


def bottom(part: Locator) -> float:
    return part.evaluate("e => e.getBoundingClientRect().bottom")
