"""What if: a slider that moves changes picture and words at once, and Apply hands its setting to the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Bench, Notebook, keep, until
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

BELOW = """root => { const page = root.closest(".jp-WindowedPanel-outer").getBoundingClientRect();
    return root.getBoundingClientRect().height - page.height }"""
# Quick layers that are wide enough for a slow link to show: 263 kB each are a quarter of a second at 1 MB/s.
QUICK = RELAY.replace("0.03", "0.01").replace("8", "256")


def test_sliders_answer_and_apply_changes_the_next_step(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(QUICK, WORKBENCH, "print(relay.config.resident, relay.config.keep)")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    until(lambda: "a guess by formula" in forecast(bench), page, "a guess before the first step")
    for step in (1, 2, 3):
        bench.press("Step")
        bench.wait_for_step(step)
        known = f"costs of step {step}" if step == 1 else f"step {step}, measured"
        until(lambda known=known: known in forecast(bench), page, "the forecast of the next step")
    assert "(exact)" in forecast(bench), "bytes as forecast"

    until(lambda: "The settings of the last step." in words(bench), page, "an answer")
    assert "as long as before (0%)" in words(bench), "a simulation beside a simulation"
    assert "±: mean error of the last 2 forecasts" in words(bench)
    assert "settings of step 3, simulated" in picture(bench) and "what if, simulated" in picture(bench)
    before = picture(bench)
    handle(bench, "link to device").focus()
    for _ in range(15):  # from no limit down to 1 MB/s
        page.keyboard.press("ArrowLeft")
    until(lambda: "link to the device no limit → 1 MB/s" in words(bench), page, "the words to follow")
    until(lambda: picture(bench) != before, page, "the picture to follow")
    handle(bench, "micro-batches").focus()
    page.keyboard.press("ArrowRight")
    until(lambda: "micro-batches 2 → 3" in words(bench), page, "the other slider")
    root(bench).get_by_role("button", name="host", exact=True).click()
    until(lambda: "stash on device → host" in words(bench), page, "the stash")
    handle(bench, "graphs kept").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    until(
        lambda: "weights that stay 0 → 1; graphs kept 0 → 3" in words(bench), page, "weights to stay with their graphs"
    )
    assert "a recompute as long as forward" in root(bench).inner_text()
    name = root(bench).locator(".widget-hslider", has_text="graphs kept").locator("label")
    assert name.inner_text() == "graphs kept" and "instead of recomputed" in (name.get_attribute("title") or "")
    keep(root(bench), "what_if")
    assert bench.step == 3, "nothing has run"

    row = bench.root.locator(".l2l-buttons", has=page.locator("button:text-is('Reset')")).first
    row.locator("button:text-is('Apply')").click()
    until(lambda: "set for the next step" in row.inner_text(), page, "the note of Apply")
    until(lambda: "stash device → host" in bench.picture(3).text_content(), page, "the change beside the loss")
    bench.press("Step")
    bench.wait_for_step(4)
    until(lambda: "settings of step 4, simulated" in picture(bench), page, "the new step above")
    until(lambda: "The settings of the last step." in words(bench), page, "what was asked to be what has run")
    keep(root(bench), "what_if_applied")
    assert notebook.run_cell(2) == "1 3", "resident and keep of the relay"

    handle(bench, "layers").first.focus()
    page.keyboard.press("ArrowRight")
    offer = root(bench).locator(".l2l-offer")
    until(lambda: "workbench.edit(*(Insert(at) for at in range(4, 6)))" in offer.inner_text(), page, "the edit as code")
    keep(root(bench), "what_if_depth")
    root(bench).locator("button:text-is('Insert 2 layers')").click()
    until(lambda: "6 layers" in bench.title, page, "the layers")
    until(lambda: "Insert 2 layers: done" in offer.inner_text(), page, "what became of it")


def root(bench: Bench) -> Locator:
    return bench.root.locator(".l2l-what-if")


def handle(bench: Bench, name: str) -> Locator:
    return root(bench).locator(".widget-hslider", has_text=name).locator(".noUi-handle")


def words(bench: Bench) -> str:
    found = root(bench).locator(".l2l-what-if-words")
    return found.inner_text() if found.count() else ""


def forecast(bench: Bench) -> str:
    found = bench.root.locator(".l2l-forecast")
    return found.inner_text() if found.count() else ""


def picture(bench: Bench) -> str:
    return " ".join(root(bench).locator("svg.l2l text").all_text_contents())


@pytest.mark.slow
def test_fit_proposes_settings_and_use_applies_them(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(QUICK, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    bench.press("Fit")
    until(lambda: "proposed RelayConfig(" in bench.root.inner_text(), page, "the proposal")
    said = bench.root.inner_text()
    assert "a step by the forecast" in said and "settings were compared in" in said
    in_force = bench.root.locator(".l2l-in-force")
    assert "(was" not in in_force.inner_text(), "a proposal is not in force"
    keep(page, "what_if_fit")
    bench.root.locator("button[title^='Use these settings from']").click()
    until(lambda: "(was" in in_force.inner_text(), page, "the settings in the header")
    keep(page, "what_if_fit_used")
    bench.press("Step")
    bench.wait_for_step(2)
    assert bench.step == 2, "a step with what was proposed"
    bench.press("Reset settings")
    until(lambda: "(was" not in in_force.inner_text(), page, "the settings as they were")


@pytest.mark.slow
def test_it_fits_a_screen_unfolded(open_notebook: Callable[..., Notebook], page: Page) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    notebook = open_notebook(RELAY, "workbench = Workbench(relay, batches, view='what if')\nworkbench")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Step")
    bench.wait_for_step(1)
    if bench.button("▸ What if").count():
        until(lambda: "The settings of the last step." in words(bench), page, "an answer")
    keep(page, "what_if_on_a_screen")
    below = bench.root.evaluate(BELOW)
    assert below <= 0, f"what if is {below:.0f} px too high"
