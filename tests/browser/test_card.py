"""The card of a layer in the page: a row is clicked, arrow keys go on from there, Enter goes to the card."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, keep, until
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

GPT2 = """
import os
from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import EmulatedDevice, Relay, RelayConfig
from workbench import Workbench

torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(n_layer=12, n_embd=64, n_head=2, vocab_size=128, n_positions=32)
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
relay = Relay(model, partial(torch.optim.AdamW, lr=1e-3), EmulatedDevice(), config=RelayConfig(micro_batches=2))
ids = torch.randint(0, 128, (4, 32))
batches = [{"input_ids": ids, "labels": ids}]
"""
BELOW = """root => { const page = root.closest(".jp-WindowedPanel-outer").getBoundingClientRect();
    return root.getBoundingClientRect().height - page.height }"""
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

    bench.press("Measure all layers")
    until(lambda: card.locator("svg").count() == 3, page, "bars for all layers")
    until(lambda: bench.button("Stop measuring").is_disabled(), page, "all measurements")
    bench.screenshot("card")
    bench.press("Drop")
    until(lambda: "No layer is chosen" in card.inner_text(), page, "the layer gone")
    assert bench.state == "running" and "3 layers" in bench.title


@pytest.mark.slow
def test_a_layer_of_twelve_parameters_fits_a_screen(open_notebook: Callable[..., Notebook], page: Page) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    notebook = open_notebook(GPT2, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    bench.root.locator('tr[data-key="L006"]').click()
    card = bench.root.locator(".l2l-card-panel")
    until(lambda: card.locator(".l2l-card-charts svg:visible").count() == 2, page, "the card with its charts")
    keep(page, "card_of_gpt2")
    assert card.locator(".l2l-card-facts th").count() == 12
    assert card.locator(".l2l-card-parts").evaluate("e => e.scrollHeight <= e.clientHeight"), "all of them are seen"
    row = "e => [e.closest('.l2l-layers-box').getBoundingClientRect(), e.getBoundingClientRect()].map(b => [b.top, b.bottom])"
    (top, bottom), (row_top, row_bottom) = bench.root.locator('tr[data-key="L006"]').evaluate(row)
    assert top < row_top and row_bottom <= bottom + 1, "the row of the chosen layer stays in sight"
    below = bench.root.evaluate(BELOW)
    assert below <= 0, f"the view is {below:.0f} px too high"
