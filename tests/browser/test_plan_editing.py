"""A plan edited in the page: by keys and by drag, refused and mended, selected in the lanes, written, and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, keep, until
from page_checks import HAS_AXE, find_cut_parts, find_violations

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

RELAY = """
import torch
from torch import nn

import workbench
from l2l_core import EmulatedDevice, Relay, RelayConfig

torch.set_num_threads(1)
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(3)]
model, batch = nn.Sequential(*blocks, nn.Linear(128, 1)), (torch.randn(32, 128), torch.randn(32, 1))
link = EmulatedDevice(h2d_bytes_per_s=1e7, d2h_bytes_per_s=1e7)
relay = Relay(model, torch.optim.AdamW, link, blocks, nn.MSELoss(), config=RelayConfig(micro_batches=2))
"""
VIEW = "view = workbench.PlanView(relay, batch)\nview"
SMALL, LARGE = {"width": 1280, "height": 720}, {"width": 1440, "height": 900}


def test_a_plan_is_moved_refused_mended_and_run(open_notebook: Callable[..., Notebook], page: Page, lab: Lab) -> None:
    lab.set_theme("JupyterLab Dark")
    try:
        notebook = open_notebook(RELAY, VIEW, "print(relay.steps, view.result.plan == view.plan)")
    finally:
        lab.set_theme("JupyterLab Light")
    notebook.run_cell(0), notebook.run_cell(1)
    root = notebook.cell(1).locator(".l2l-workbench")
    until(lambda: root.locator(".l2l-plan-lanes svg").count(), page, "the lanes")
    root.scroll_into_view_if_needed()
    plan = root.get_by_role("listbox")
    before = root.locator(".l2l-plan-figures").inner_text()

    line(root, "0 L000").get_by_role("option", name="L:L001>1").click()
    until(lambda: "Load the weights of layer L001 into slot 1" in about(root), page, "the action in words")
    assert root.locator(".l2l-plan-mark rect").count() == 1, "marked in the lanes"
    plan.focus()
    page.keyboard.press("Shift+ArrowRight")
    until(lambda: words(root, "0 L000") == "L:L000>0 | L:L001>1 F0 F1", page, "the load behind the bar")
    page.keyboard.press("Shift+ArrowDown")
    until(lambda: "its weights are in no slot" in message(root), page, "the refusal")
    assert root.locator(".l2l-plan-bar.l2l-plan-wrong").count() == 1, "the bar of the visit is marked"
    assert root.locator(".l2l-plan-lanes.l2l-plan-stale svg").count() == 1, "the last picture stays, grey"
    assert root.get_by_role("button", name="Apply").is_disabled()
    keep(root, "plan_refused")
    page.keyboard.press("Control+z")
    until(lambda: not message(root), page, "the plan to be mended")
    until(lambda: not root.locator(".l2l-plan-stale").count(), page, "a picture of it")

    drag(
        page,
        line(root, "1 L001").get_by_role("option", name="L:L002>0"),
        line(root, "1 L001").get_by_role("option", name="F1"),
    )
    until(lambda: words(root, "1 L001") == "| F0 L:L002>0 F1", page, "the load between the micro-batches")
    until(lambda: root.locator(".l2l-plan-figures").inner_text() != before, page, "other figures")
    page.keyboard.press("Enter")
    page.keyboard.type("L:L002>9\n")
    until(lambda: "there are 2 weight slots" in message(root), page, "the refusal of a word")
    assert root.get_by_role("option", name="L:L002>9").get_attribute("aria-selected") == "true"
    page.keyboard.press("Control+z")
    until(lambda: not message(root), page, "the word to be mended")

    line(root, "0' L000").get_by_role("option", name="B1").click()
    until(lambda: "Backward of layer L000 on micro-batch 1" in about(root), page, "another action")
    place = root.locator(".l2l-plan-mark rect").bounding_box()
    page.keyboard.press("Home")
    until(lambda: "Start micro-batch 0" in about(root), page, "the first action, by key")
    assert place
    page.mouse.click(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    until(
        lambda: "Backward of layer L000 on micro-batch 1" in about(root),
        page,
        "the action that is clicked in the lanes",
    )
    keep(root, "plan_edited")

    root.get_by_role("button", name="Apply").click()
    until(lambda: "step 1 by this plan" in root.inner_text(), page, "the step")
    assert "equal to the step in core, to the bit" in root.inner_text()
    assert "step 1, measured" in " ".join(root.locator("th").all_inner_texts())
    assert notebook.run_cell(2) == "1 True"
    faults: list[str] = []
    for size in (LARGE, SMALL):
        page.set_viewport_size(size)
        faults += find_cut_parts(root)
    assert faults + (find_violations(root) if HAS_AXE else []) == []
    assert notebook.panel.locator(".jp-mod-selected").count() == 1, "the keys stayed in the plan"


def line(root: Locator, name: str) -> Locator:
    number, layer = name.split()
    return root.get_by_role("group", name=f"visit {number}, layer {layer}", exact=True)


def words(root: Locator, name: str) -> str:
    return " ".join(line(root, name).locator("[data-action]").all_inner_texts())


def about(root: Locator) -> str:
    return root.locator(".l2l-plan-about").inner_text()


def message(root: Locator) -> str:
    return root.locator(".l2l-plan-message").inner_text()


def drag(page: Page, word: Locator, before: Locator) -> None:
    """Drag a word to the left half of another one."""
    start, end = word.bounding_box(), before.bounding_box()
    assert start and end
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(end["x"] + 20, end["y"] + 8, steps=4)
    page.mouse.move(end["x"] + 3, end["y"] + end["height"] / 2, steps=4)
    page.mouse.up()
