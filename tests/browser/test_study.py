"""A study in the page: Run, a kernel that ends in the middle, and the same run again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, keep, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

# The batches of seed 1 wait for a file, so that the kernel is restarted in the middle.
STUDY = """import time, torch
from pathlib import Path
from torch import nn
from l2l_core import Depth, EmulatedDevice, Relay, RelayConfig
from workbench import Study

torch.manual_seed(5)
held_out = [(torch.randn(16, 4), torch.randn(16, 1))]

def make_relay(seed):
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(4, 1))
    loss = lambda outputs, batch: nn.functional.mse_loss(outputs, batch[1])
    adam = lambda params: torch.optim.AdamW(params, lr=1e-2)
    return Relay(model, adam, EmulatedDevice(), [*model[0]], loss, config=RelayConfig(verify="never"))

def batches(seed):
    for step in range(100):
        while seed == 1 and step == 5 and not Path("go").exists():
            time.sleep(0.01)
        yield torch.randn(4, 4), torch.randn(4, 1)

def make_study(folder):
    variants = {"two layers": Depth(2), "grown": Depth({0: 2, 6: 4})}
    return Study(make_relay, variants, seeds=range(2), steps=12, batches=batches, held_out=held_out, folder=folder,
                 evaluate_every=2, autosave_s=0)
study = make_study("study")
study"""
EQUAL = """other = make_study("undisturbed")
other.run(report=None)
one, two = (each.frame(seconds=False).to_csv().encode() for each in (study, other))
(one == two, str(study.table()) == str(other.table()), len(one) > 1000)"""


@pytest.mark.slow
def test_a_study_survives_a_restart_of_the_kernel(open_notebook: Callable[..., Notebook], page: Page, lab: Lab) -> None:
    notebook = open_notebook(STUDY, EQUAL)
    notebook.run_cell(0)
    view = notebook.cell(0).locator(".l2l-workbench:visible")
    bands, status = view.locator("svg.l2l path[fill-opacity]"), view.locator("[role=status]")
    assert "0 of 4 runs finished" in status.inner_text() and view.get_by_role("button", name="Cancel").is_disabled()
    view.get_by_role("button", name="Run").click()
    until(lambda: bands.count() > 0, page, "bands over two seeds")
    assert "2 of 4 runs finished: seed 1" in status.inner_text()
    notebook.restart()

    (lab.folder / "go").touch()
    notebook.run_cell(0)
    assert "2 of 4 runs finished" in status.inner_text()
    view.get_by_role("button", name="Run").click()
    until(lambda: "4 of 4 runs finished." in status.inner_text(), page, "the end of the study")
    assert notebook.run_cell(1) == "(True, True, True)"

    view.get_by_label("Horizontal axis").select_option(label="tokens")
    until(lambda: view.locator("svg.l2l text", has_text=re.compile("^tokens$")).count(), page, "the other axis")
    tip = view.locator("svg.l2l circle title").first.text_content()
    assert tip is not None and re.fullmatch(r"two layers\n8 tokens: loss [\d.]+ ± [\d.]+ \(2 seeds\)", tip), tip
    assert view.get_by_role("progressbar", name="trained share of the study").get_attribute("aria-valuenow") == "100"
    keep(page, "study")
