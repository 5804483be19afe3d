"""A bench over a lab, in the page: a plan that does not fit is seen to fail, another one is chosen, in both themes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, brightness, keep, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

LAB = """
import torch
from torch import nn

import workbench
from l2l_core import EmulatedDevice
from l2l_core.strategies import Full, Lab, Offload, Plain, RelayPolicy, Rotor

torch.set_num_threads(1)
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 4 * 64), nn.GELU(), nn.Linear(4 * 64, 64)) for _ in range(6)]
model, batch = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1)), (torch.randn(512, 8), torch.randn(512, 1))
lab = Lab(model, batch, layers=blocks, loss=lambda out, batch: nn.functional.mse_loss(out, batch[1]))
least, most = (lab.plan(way).peak_device_bytes for way in (Full(), Plain()))
lab = lab.on_device(EmulatedDevice((least + most) // 2, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9))
"""
SHOW = """bench = workbench.LabBench(lab, [batch], ways=[Plain(), Full(), Offload(), Rotor(1), RelayPolicy()], plan="Plain")
bench"""


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["Dark", pytest.param("Light", marks=pytest.mark.slow)])
def test_a_plan_that_does_not_fit_fails_and_another_one_trains(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab, theme: str
) -> None:
    lab.set_theme(f"JupyterLab {theme}")
    try:
        notebook = open_notebook(LAB, SHOW, "print(*(row.loss for row in bench.snapshot().steps))")
    finally:
        lab.set_theme("JupyterLab Light")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    assert bench.state == "idle" and bench.button("Relay").is_disabled() and bench.button("Offload").is_enabled()
    assert "The next step follows Plain" in bench.root.inner_text()
    bench.press("Step")
    bench.wait_for_state("failed")
    memory = bench.root.locator("svg.l2l[aria-label='Memory over a step that failed']")
    until(lambda: memory.count() == 1, page, "where it ran out of memory")
    said = bench.root.inner_text()
    assert "the smallest budget that would do" in said and "Plans that fit: Full" in said
    keep(bench.root, f"lab_bench_{theme.lower()}_failed")

    bench.press("Full")
    until(lambda: "The next step follows Full" in bench.root.inner_text(), page, "the other plan")
    bench.press("Step")
    bench.wait_for_step(1)
    bench.press("Offload")
    bench.press("Step")
    bench.wait_for_step(2)
    bench.wait_for_state("idle")
    assert float(f"{float(notebook.run_cell(2).split()[1]):.4g}") == bench.loss, "of the second step that was made"
    for view, drawn in (("Memory", "Memory over a step"), ("Loss", "Loss"), ("Time", "Timeline of a step")):
        bench.press(view)
        picture = bench.root.locator(f"svg.l2l[aria-label='{drawn}']:visible")
        until(lambda picture=picture: picture.count() == 1, page, drawn)
        keep(bench.root, f"lab_bench_{theme.lower()}_{view.lower()}")
    for words in bench.root.locator("svg.l2l:visible text.strong").all():
        assert (brightness(words) > 150) == (theme == "Dark"), words.text_content()
    page.set_viewport_size({"width": 900, "height": 2700})
    assert bench.root.evaluate("e => e.scrollWidth <= e.clientWidth + 1"), "nothing is cut off in a narrow page"
