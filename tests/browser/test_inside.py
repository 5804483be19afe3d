"""A look inside in the page: nothing until Look is pressed, then pictures of the tiny model while it may train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, until
from patience import rarely
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

WORKBENCH = "workbench = Workbench(relay, batches, view='inside')\nworkbench"
DECODER = """
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=6, n_embd=32, n_head=4, vocab_size=128, n_positions=24, bos_token_id=None, eos_token_id=None)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
model.loss_type = "ForCausalLM"
text = torch.tensor([list(b"the relay carries on. \\n")] * 8)
relay = Relay(model.train(), partial(torch.optim.AdamW, lr=3e-3), EmulatedDevice(), config=RelayConfig(micro_batches=2))
workbench = Workbench(relay, [{"input_ids": text, "labels": text}], view="inside", decode=lambda ids: bytes(ids).decode())
workbench
"""


@pytest.mark.slow
def test_look_shows_pictures_of_the_tiny_model(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    seen = bench.root.locator(".l2l-inside")
    bench.press("Step")
    bench.wait_for_step(1)
    assert "Nothing is recorded until you press Look" in seen.inner_text() and seen.locator("svg").count() == 0
    bench.press("Look")
    until(lambda: seen.locator('svg[aria-label="The stream over depth"]').count() == 1, page, "the stream")
    assert "after step 1; took" in seen.inner_text()
    bench.press("Spread")
    until(lambda: seen.locator('svg[aria-label="Activations after each layer"]').count() == 1, page, "histograms")
    bench.press("Attention")
    until(lambda: "no attention maps were requested" in seen.inner_html(), page, "the reason for no map")
    bench.press("Step")
    until(lambda: "old: after step 1, now it is step 2" in seen.inner_text(), page, "that it is old")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["JupyterLab Light", rarely("JupyterLab Dark")])
def test_a_decoder_shows_attention_and_what_it_says_at_each_depth(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab, theme: str
) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    lab.set_theme(theme)
    try:
        notebook = open_notebook(RELAY, DECODER)
    finally:
        lab.set_theme("JupyterLab Light")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    seen = bench.root.locator(".l2l-inside")
    bench.press("Run")
    bench.wait_for_step(20)
    bench.press("Pause")
    bench.wait_for_state("paused")
    for words in ("attention maps", "head at each depth"):
        seen.get_by_label(words).check()
    seen.get_by_label("tokens to write").fill("6")
    page.keyboard.press("Tab")
    until(lambda: "generate=6" in seen.inner_text(), page, "the line of code")
    bench.press("Look")
    for part, label in (
        ("Stream", "The stream over depth"),
        ("Attention", "Attention"),
        ("Lens", "Head output at each depth"),
    ):
        until(lambda part=part: bench.button(part).is_visible(), page, f"the button {part}")
        bench.press(part)
        until(lambda label=label: seen.locator(f'svg[aria-label="{label}"]').count() == 1, page, label)
        bench.screenshot(f"inside_{part.lower()}_{theme[11:].lower()}")
    assert seen.locator('svg[aria-label="Head output at each depth"] text', has_text="6 layers").count() == 1
    bench.press("Text")
    until(lambda: seen.locator(".l2l-inside-text tr").count() == 6, page, "text of six depths")
    bench.screenshot(f"inside_text_{theme[11:].lower()}")
    page.set_viewport_size({"width": 900, "height": 900})
    bench.screenshot(f"inside_narrow_{theme[11:].lower()}")
