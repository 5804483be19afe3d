"""The card of a layer in the page: a row is clicked, arrow keys go on from there, Enter goes to the card."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

WORKBENCH = "workbench = Workbench(relay, batches, view='layers')\nworkbench"


@pytest.mark.slow
def test_a_layer_is_chosen_in_the_table_while_training_runs(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY.replace("0.03", "0.01"), WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Run")
    bench.wait_for_step(1)
    card = bench.root.locator(".l2l-card-panel")

    def marked() -> list[str]:
        marks = "rows => rows.filter(r => getComputedStyle(r.cells[0]).boxShadow !== 'none').map(r => r.dataset.key)"
        return bench.root.locator("tr[data-key]").evaluate_all(marks)

    bench.root.locator('tr[data-key="L001"]').click()
    until(lambda: "1 · L001" in card.locator(".l2l-card-facts").inner_text(), page, "the card of the row")
    table = bench.root.locator(".l2l-layers-box")
    table.focus()
    for _ in range(2):  # faster than the kernel answers
        page.keyboard.press("ArrowDown")
    until(lambda: "3 · L003" in card.locator(".l2l-card-facts").inner_text(), page, "the card two rows below")
    bench.wait_for_step(bench.step + 2)
    assert marked() == ["L003"], "the new rows of a step have the mark too"
    assert table.evaluate("e => e === document.activeElement"), "and the focus stays"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    until(lambda: card.locator("select").evaluate("e => e === document.activeElement"), page, "the list of the card")
    until(lambda: card.locator("select").input_value() == "2 · L002 3", page, "the same layer in it")
    page.keyboard.press("ArrowUp")
    until(lambda: marked() == ["L001"], page, "the row of what the list has chosen")

    bench.press("All layers")
    until(lambda: card.locator("svg").count() == 3, page, "bars for all layers")
    until(lambda: bench.button("Stop measuring").is_disabled(), page, "all measurements")
    bench.screenshot("card")
    bench.press("Drop")
    until(lambda: "No layer is chosen" in card.inner_text(), page, "the layer gone")
    assert bench.state == "running" and "3 layers" in bench.title
