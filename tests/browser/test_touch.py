"""Layers touched in the page: opened by one press and marked in all pictures, dragged, inserted between, by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Bench, Notebook, until
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

BOARD = "workbench = Workbench(relay, batches, view='relay')\nworkbench"


@pytest.mark.slow
def test_a_layer_is_touched_while_training_runs(open_notebook: Callable[..., Notebook], page: Page) -> None:
    bench = start(open_notebook)
    bench.press("Run")
    bench.wait_for_step(1)

    press(page, cell(bench, "L001"))  # the picture is drawn again under the pointer meanwhile
    until(bench.root.locator(".l2l-card-panel select").is_visible, page, "the card after one press")
    assert bench.root.locator(".l2l-card-panel select").input_value() == "1 · L001 2"
    for view in ("Relay", "Figures", "Memory", "Time"):
        bench.press(view)
        until(lambda: marked(bench) == {"L001"}, page, f"the same layer in {view}")
    bench.press("Relay")

    drag(page, cell(bench, "L001"), cell(bench, "L003"))
    until(lambda: order(bench) == ["L000", "L002", "L003", "L001"], page, "the layer at the place of the other")
    until(lambda: marked(bench) == {"L001"}, page, "the mark on the one that is still chosen")

    drag(page, cell(bench, "L000"), cell(bench, "L002"), let_go=(2, 2))
    page.mouse.move(*at(page, cell(bench, "L003")))
    page.wait_for_timeout(300)
    assert order(bench) == ["L000", "L002", "L003", "L001"], "let go outside, nothing moves"
    assert bench.root.locator(".l2l-dragged:visible").count() == 0

    page.mouse.move(*at(page, cell(bench, "L002"), 0.95))
    bench.root.locator(".l2l-plus").click()
    until(lambda: order(bench) == ["L000", "L002", "L004", "L003", "L001"], page, "a new layer between two")
    step = bench.step
    bench.wait_for_step(step + 2)
    assert bench.state == "running"


@pytest.mark.slow
def test_the_keyboard_does_the_same(open_notebook: Callable[..., Notebook], page: Page) -> None:
    bench = start(open_notebook)
    bench.press("Step")
    bench.wait_for_step(1)
    picture = bench.root.locator(".l2l-picks:visible")
    picture.focus()
    assert "Arrow keys" in (picture.get_attribute("aria-label") or "")
    for _ in range(3):  # faster than the kernel answers
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    until(lambda: marked(bench) == {"L001"}, page, "the second layer")
    page.keyboard.press("Enter")
    chooser = bench.root.locator(".l2l-card-panel select")
    until(lambda: chooser.evaluate("e => e === document.activeElement"), page, "the card of the layer")
    until(lambda: chooser.input_value() == "1 · L001 2", page, "the same layer in it")
    bench.button("Move later").focus()
    page.keyboard.press("Enter")
    bench.press("Relay")
    until(lambda: order(bench) == ["L000", "L002", "L001", "L003"], page, "the layer one place further on")


def start(open_notebook: Callable[..., Notebook]) -> Bench:
    notebook = open_notebook(RELAY.replace("0.03", "0.01"), BOARD)
    notebook.run_cell(0), notebook.run_cell(1)
    return notebook.bench(1)


def cell(bench: Bench, key: str) -> Locator:
    return bench.root.locator(f'[data-cell][data-key="{key}"]')


def order(bench: Bench) -> list[str]:
    return bench.root.locator("[data-cell]").evaluate_all("all => all.map(e => e.dataset.key)")


def marked(bench: Bench) -> set[str]:
    """Keys of layers of which a visible part is framed as chosen."""
    framed = "all => all.filter(e => e.checkVisibility() && getComputedStyle(e).strokeWidth === '3px').map(e => e.dataset.key)"
    return set(bench.root.locator("svg [data-key]").evaluate_all(framed))


def at(page: Page, part: Locator, share: float = 0.5) -> tuple[float, float]:
    """A point of it, so much of its width from the left; the picture may be drawn again at any moment."""
    box: list[float] = []

    def measured() -> bool:
        box[:] = part.evaluate("e => { const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height] }")
        return box[2] > 0

    until(measured, page, "it on the page")
    return box[0] + share * box[2], box[1] + box[3] / 2


def press(page: Page, part: Locator) -> None:
    """As a hand does it: longer than the picture lasts."""
    page.mouse.move(*at(page, part))
    page.mouse.down()
    page.wait_for_timeout(300)
    page.mouse.up()


def drag(page: Page, part: Locator, to: Locator, let_go: tuple[float, float] | None = None) -> None:
    page.mouse.move(*at(page, part))
    page.mouse.down()
    page.mouse.move(*at(page, to), steps=8)
    page.wait_for_timeout(300)
    if let_go is not None:
        page.mouse.move(*let_go)
    page.mouse.up()
