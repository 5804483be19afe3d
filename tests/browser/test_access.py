"""For screen readers and small screens: names, units and tabs, and nothing that is cut; axe-core, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from page_checks import HAS_AXE, find_cut_parts, find_violations
from tiny import RELAY

from workbench.app import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

SMALL, LARGE = {"width": 1280, "height": 720}, {"width": 1440, "height": 900}
NAMES = """root => [...root.querySelectorAll("[role=slider]")].filter(e => e.checkVisibility())
    .map(e => [e.closest(".widget-hslider").querySelector(".widget-label").textContent, e.ariaLabel, e.ariaValueText])"""


def test_every_view_is_whole_and_named(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY, "workbench = Workbench(relay, batches)\nworkbench")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    tabs = bench.root.get_by_role("tablist", name="Views of the workbench").get_by_role("tab")
    assert tabs.all_inner_texts() == [name.capitalize() for name in VIEWS]
    tabs.first.focus()
    faults: list[str] = []
    for name in VIEWS:
        tab = bench.root.get_by_role("tab", name=name.capitalize(), exact=True, selected=True)
        until(lambda tab=tab: tab.count() == 1, page, f"the view {name}, by an arrow key")
        panel = bench.root.get_by_role("tabpanel", name=name.capitalize(), exact=True)
        until(panel.is_visible, page, f"what is in {name}")
        assert tab.get_attribute("tabindex") == "0"
        for size in (LARGE, SMALL):
            page.set_viewport_size(size)
            faults += [f"{name}, {size['width']} px: {part}" for part in find_cut_parts(bench.root)]
        faults += [f"{name}: {one}" for one in find_violations(bench.root)] if HAS_AXE else []
        sliders = bench.root.evaluate(NAMES)
        assert sliders and all(label == name and value for label, name, value in sliders), sliders
        page.keyboard.press("ArrowRight")
    assert faults == []
    until(lambda: tabs.first.get_attribute("aria-selected") == "true", page, "the first view after the last")
    assert ["layers ahead", "layers ahead", "layers ahead: 1"] in bench.root.evaluate(NAMES)

    bench.root.locator(".l2l-present").click()
    until(lambda: page.evaluate("!!document.fullscreenElement"), page, "the whole screen")
    until(
        lambda: bench.button("Presenting: leave").is_visible(), page, "the button that leaves"
    )  # renamed after the change
    assert bench.handle("layers ahead").is_visible()
    assert find_cut_parts(bench.root) == []


def test_a_typed_text_and_a_layer_pulled_out(open_notebook: Callable[..., Notebook], page: Page) -> None:
    decoder = """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=128, n_positions=24))
model.loss_type = "ForCausalLM"
text = torch.tensor([list(b"the relay carries on. \\n")] * 8)
relay = Relay(model.train(), partial(torch.optim.AdamW, lr=3e-3), EmulatedDevice(), config=RelayConfig(micro_batches=2))
batches = [{"input_ids": text, "labels": text}]
workbench = Workbench(relay, batches, probe=batches, view="inside", decode=lambda ids: bytes(ids).decode())
workbench
"""
    notebook = open_notebook(RELAY, decoder)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    own = bench.root.locator(".l2l-own-text")
    own.get_by_label("your text").fill("the re")
    until(lambda: own.locator('svg[aria-label="Next words by depth"]').count() == 1, page, "the next words")
    assert own.locator(".l2l-tokens").inner_text() == "the·re"
    own.get_by_role("button", name="Pull out layer 1 · L001").click()
    until(lambda: own.locator("svg text", has_text="without 1").count() == 1, page, "the words without the layer")
    assert own.get_by_role("button", name="Pull out layer 1 · L001", pressed=True).count() == 1
    bench.screenshot("own_text")
    bench.press("Put all back")
    until(lambda: own.locator("svg text", has_text="without").count() == 0, page, "the words with all layers")
