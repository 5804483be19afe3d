"""The Loss view in the page: a held-out curve, another axis, and values under the pointer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

BENCH = """held_out = [(torch.randn(12, 4), torch.randn(12, 1)) for _ in range(3)]
workbench = Workbench(relay, batches, view='loss')
workbench"""
TRAIN = """metrics = {"absolute": lambda outputs, batch: float((outputs - batch[1]).abs().mean())}
workbench.evaluate(held_out, metrics, every=5)
workbench.run(60)
workbench.wait(60).step"""


def test_a_held_out_curve_with_readable_values(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY.replace("0.03", "0.0005"), BENCH, TRAIN)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    assert notebook.run_cell(2) == "60"
    words = bench.root.locator("svg.l2l:visible text")
    until(lambda: "held out" in words.all_text_contents(), page, "the held-out curve")
    until(
        lambda: re.search(r"held out [\d.]+ · .*lr 0.01 · .*rows/s", bench.title) is not None,
        page,
        "rates in the header",
    )
    tips = bench.root.locator("svg.l2l:visible g[fill-opacity='0'] rect title")
    tip = next(text for text in tips.all_text_contents() if text.startswith("step 60 "))
    assert re.search(r"loss [\d.]+ · held-out loss [\d.]+ \(step 60\) · lr 0.01", tip), tip
    bench.screenshot("held_out")
    show, over = (
        bench.root.locator(".widget-dropdown:visible", has_text=name).locator("select") for name in ("show", "over")
    )
    show.select_option("held-out absolute")
    over.select_option("FLOP")
    until(lambda: {"absolute", "compute (FLOP)"} <= {*words.all_text_contents()}, page, "the metric over compute")
    bench.screenshot("held_out_metric")
