"""Ways to train side by side, in the page: chosen by pointer and by keys, in both themes, and what stays without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, brightness, keep, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

TABLE = """
import torch
from torch import nn

import workbench
from l2l_core import EmulatedDevice
from l2l_core.strategies import Full, Lab, Offload, Plain, RelayPolicy, Rotor, StrategyTable

torch.set_num_threads(1)
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 4 * 64), nn.GELU(), nn.Linear(4 * 64, 64)) for _ in range(4)]
model, batch = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1)), (torch.randn(256, 8), torch.randn(256, 1))
link = EmulatedDevice(h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
lab = Lab(model, batch, device=link, layers=blocks, loss=lambda out, batch: nn.functional.mse_loss(out, batch[1]))
rows = lab.compare([Plain(), Full(), Offload(), Rotor(1), RelayPolicy()]).rows
table = StrategyTable(rows, (rows[0].peak_device_bytes + rows[1].peak_device_bytes) // 2)
"""
SHOW = "ways = workbench.Ways(table)\nways"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["Dark", pytest.param("Light", marks=pytest.mark.slow)])
def test_a_way_is_chosen_and_its_plan_is_shown(
    open_notebook: Callable[..., Notebook], page: Page, lab: Lab, theme: str
) -> None:
    lab.set_theme(f"JupyterLab {theme}")
    try:
        notebook = open_notebook(TABLE, SHOW, "print(ways.chosen.name)")
    finally:
        lab.set_theme("JupyterLab Light")
    notebook.run_cell(0), notebook.run_cell(1)
    root = notebook.cell(1).locator(".l2l-workbench")
    root.scroll_into_view_if_needed()
    assert chosen(root) == 1, "the fastest one that fits is marked from the start"
    keep(root, f"ways_{theme.lower()}")
    for words in root.locator("svg.l2l text.strong, td, th").all():
        assert (brightness(words) > 150) == (theme == "Dark"), words.text_content()

    mark(root, 1).click()
    until(lambda: plan(root).startswith("Full"), page, "the plan of the mark that was clicked")
    assert "recompute" in plan(root) and notebook.run_cell(2) == "Full"
    root.locator('tr[data-key="way-4"]').click()
    until(lambda: plan(root).startswith("Relay"), page, "that of the row that was clicked")
    root.locator('tr[data-key="way-3"]').click()  # it has no plan
    until(lambda: "smallest budget" in root.locator("p").last.inner_text(), page, "why there is none")

    picture = root.locator(".l2l-picks").first
    picture.focus()
    assert "choose a strategy" in (picture.get_attribute("aria-label") or "")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    until(lambda: plan(root).startswith("Plain"), page, "the way that needs most, by keys")
    assert notebook.panel.locator(".jp-mod-selected").count() == 1, "the keys stayed in the picture"
    page.set_viewport_size({"width": 900, "height": 2700})
    assert root.evaluate("e => e.scrollWidth <= e.clientWidth + 1"), "nothing is cut off in a narrow page"
    keep(root, f"ways_{theme.lower()}_narrow")


@pytest.mark.slow
def test_without_a_kernel_the_chosen_way_stays(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(TABLE, SHOW)
    notebook.run_cell(0), notebook.run_cell(1)
    root, still = notebook.cell(1).locator(".l2l-workbench"), notebook.cell(1).locator('[class$="-still"]')
    assert not still.is_visible()
    mark(root, 1).click()
    until(lambda: plan(root).startswith("Full"), page, "the plan that was chosen")
    notebook.restart()
    still.wait_for()
    assert not root.is_visible(), "nothing that cannot be pressed"
    assert still.locator("tr.l2l-chosen th").inner_text() == "2 Full"
    assert "Full" in (still.locator("svg.l2l").nth(1).locator("text").first.text_content() or "")
    headings = still.locator("table").first.locator("thead th").all_inner_texts()
    assert headings[:3] == ["measured", "counted", "simulated"]
    keep(still, "ways_still")


def mark(root: Locator, at: int) -> Locator:
    return root.locator(f'svg circle[data-key="way-{at}"]')


def plan(root: Locator) -> str:
    """The words of the second picture."""
    return " ".join(root.locator("svg.l2l").nth(1).locator("text").all_text_contents())


def chosen(root: Locator) -> int:
    """How many marks are framed as the chosen one."""
    wide = "marks => marks.filter(mark => getComputedStyle(mark).strokeWidth === '3px').length"
    return root.locator("svg path[data-key]").evaluate_all(wide)
