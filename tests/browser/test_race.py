"""Branches race in the page, and after a switch every view is of the branch that trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from tiny import RELAY

from workbench.app import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

BOARD = """probe = [(torch.randn(12, 4), torch.randn(12, 1)) for _ in range(3)]
workbench = Workbench(relay, batches, probe=probe, view='race')
workbench"""
SLIM = """from l2l_core import Drop
workbench.step(), workbench.fork("slim"), workbench.edit(Drop("L001")), workbench.step(), workbench.switch("main")
workbench.wait(60).branch"""


def test_branches_race_and_a_switch_is_seen_everywhere(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY.replace("0.03", "0.002"), BOARD, SLIM)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    assert "Make a second branch first" in bench.root.inner_text()
    assert notebook.run_cell(2) == "'main'"
    until(lambda: bench.button("Start race").is_enabled(), page, "two branches")
    steps = bench.root.locator(".widget-text:visible", has_text="steps").locator("input").last
    steps.fill("12")
    steps.press("Enter")
    bench.press("Start race")
    until(lambda: bench.root.locator("svg.l2l:visible text", has_text="Race: loss").count(), page, "the race")
    until(lambda: bench.button("Stop race").is_disabled(), page, "the end of the race")
    words = " ".join(bench.root.locator("svg.l2l:visible text").all_text_contents())
    assert "main" in words and "slim" in words
    bench.press("compute (FLOP)")
    until(lambda: "FLOP" in " ".join(bench.root.locator("svg.l2l:visible text").all_text_contents()), page, "compute")
    bench.root.locator("button:visible", has_text="The race as a table").click()
    table = bench.root.locator("table:visible", has_text="probe at equal FLOP")
    until(lambda: table.locator("tbody tr").count() == 2, page, "a row for each branch")
    slim = table.locator("tr", has_text="slim").inner_text()
    assert re.search(r"± \S+ over \d+ batches", slim), slim
    bench.screenshot("race")

    bench.press("Edits")
    until(lambda: bench.button("Switch").is_enabled(), page, "another branch to switch to")
    bench.press("Switch")
    until(lambda: "3 layers" in bench.title, page, "the other branch")
    for view in VIEWS:
        if view not in ("race", "edits"):
            bench.press(view.capitalize())
            said = " ".join(bench.root.locator(".l2l-caption:visible, .l2l-verdict .l2l-step").all_inner_texts())
            assert set(re.findall(r"step \d+ of (\w+)", said)) == {"slim"}, (view, said)
