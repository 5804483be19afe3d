"""Layers inserted, dropped, swapped and brought back while training runs, with mouse and with keyboard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Bench, Notebook, until
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

QUICK = RELAY.replace("0.03", "0.01")


def test_edits_while_training_runs(open_notebook: Callable[..., Notebook], page: Page) -> None:
    bench = start(open_notebook)
    bench.press("Apply")  # the form begins with a new layer after the last one
    until(lambda: edits(bench) == ["inserted after the last layer (identity)"], page, "the new layer in the journal")
    assert "5 layers" in bench.title

    choice(bench, "edit").focus()
    page.keyboard.press("ArrowDown")  # Insert, Duplicate, Drop
    page.keyboard.press("ArrowDown")
    until(lambda: "0 · L000 leaves the stack" in outlook(bench), page, "the questions of Drop")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")  # from the second layer
    until(lambda: "1 · L001 leaves the stack" in outlook(bench), page, "what would happen")
    tab_to(page, "Apply")
    page.keyboard.press("Space")
    until(lambda: edits(bench)[0] == "dropped 1 · L001", page, "the layer gone")
    assert page.evaluate("document.activeElement.textContent").strip() == "Apply", "where the next key goes to"

    choice(bench, "edit").select_option("Swap")
    choice(bench, "and").select_option("2 · L003")
    until(lambda: "0 · L000 and 2 · L003 change places" in outlook(bench), page, "what would happen")
    bench.press("Apply")
    until(lambda: edits(bench)[0] == "swapped 0 · L000 and 2 · L003", page, "the layers swapped")
    bench.screenshot("edits")

    undo(bench).click()
    until(
        lambda: edits(bench)[:2] == ["undid: swapped 0 · L000 and 2 · L003", "undone: swapped 0 · L000 and 2 · L003"],
        page,
        "the swap undone",
    )
    step = bench.step
    bench.wait_for_step(step + 2)
    assert bench.state == "running" and "4 layers" in bench.title
    marks = " ".join(bench.picture(3).locator("text").all_text_contents())
    assert all(mark in marks for mark in ("inserted after", "dropped 1 · L001", "swapped 0 · L000")), marks
    assert_steps_change_nothing_of_the_form(bench, page)


def assert_steps_change_nothing_of_the_form(bench: Bench, page: Page) -> None:
    page.evaluate(
        """() => { window.changes = 0; new MutationObserver(() => { window.changes += 1 })
        .observe(document.querySelector(".l2l-form"), {subtree: true, childList: true, attributes: true}) }"""
    )
    before = top_of(bench.root.locator(".l2l-journal"))
    other = choice(bench, "and")
    other.focus()
    page.keyboard.press("ArrowUp")
    chosen = other.input_value()
    page.wait_for_timeout(300)
    made, step = page.evaluate("window.changes"), bench.step
    bench.wait_for_step(step + 3)
    assert other.evaluate("e => e === document.activeElement") and other.input_value() == chosen
    assert page.evaluate("window.changes") == made, "nothing of the form was drawn again"
    assert top_of(bench.root.locator(".l2l-journal")) == before, "nothing has moved"


@pytest.mark.slow
def test_an_edit_that_cannot_be_says_why_and_training_goes_on(
    open_notebook: Callable[..., Notebook], page: Page
) -> None:
    bench = start(open_notebook)
    choice(bench, "edit").select_option("Drop")
    choice(bench, "to").select_option("3 · L003")
    until(lambda: "0 to 3 leave the stack" in outlook(bench), page, "what would happen")
    bench.press("Apply")
    alert = bench.root.get_by_role("alert")
    alert.wait_for()
    assert "one must stay: drop fewer" in alert.inner_text() and "Nothing was changed." in alert.inner_text()
    step = bench.step
    bench.wait_for_step(step + 2)
    assert bench.state == "running" and "4 layers" in bench.title and alert.is_visible()
    bench.screenshot("edit_refused")
    assert_branches_are_forked_and_compared(bench, page)


def assert_branches_are_forked_and_compared(bench: Bench, page: Page) -> None:
    choice(bench, "edit").select_option("Insert")
    bench.root.get_by_label("new branch").fill("wide")
    bench.press("Fork")
    until(lambda: choice(bench, "branch").locator("option").all_inner_texts() == ["main"], page, "the branch")
    bench.press("Apply")
    until(lambda: "5 layers" in bench.title, page, "the new layer")
    bench.wait_for_step(bench.step + 2)
    bench.press("Switch")
    until(lambda: "4 layers" in bench.title, page, "the first branch")
    until(lambda: edits(bench) == [], page, "the journal of the first branch")
    bench.wait_for_step(bench.step + 1)
    names = bench.picture(3).locator("text").all_text_contents()
    assert "wide" in names and "main" in names
    bench.screenshot("branches")


def test_every_branch_has_a_whole_row(open_notebook: Callable[..., Notebook], page: Page) -> None:
    page.set_viewport_size({"width": 1366, "height": 768})
    fork = "for name in ('slim', 'mine', 'other'):\n    workbench.fork(name).result()"
    notebook = open_notebook(RELAY, "workbench = Workbench(relay, batches, view='edits')\nworkbench", fork)
    notebook.run_cell(0), notebook.run_cell(1), notebook.run_cell(2)
    rows = notebook.bench(1).root.locator(".l2l-branches tbody tr")
    until(lambda: rows.count() == 4, page, "a row of each branch")
    box = notebook.bench(1).root.locator(".l2l-branches>.widget-html")
    assert box.evaluate("e => e.scrollHeight <= e.clientHeight"), "no row is cut"


@pytest.mark.slow
def test_a_span_is_one_layer_again_after_apply_and_what_waits_says_so(
    open_notebook: Callable[..., Notebook], page: Page
) -> None:
    notebook = open_notebook(RELAY.replace("0.03", "0.06"), WORKBENCH, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    choice(bench, "edit").select_option("Drop")
    choice(bench, "from").select_option("1 · L001")
    until(lambda: chosen(bench, "to") == "1 · L001", page, "the end to go along")
    choice(bench, "to").select_option("2 · L002")
    until(lambda: "1 to 2 leave the stack" in outlook(bench), page, "what would happen")
    bench.press("Step")
    bench.press("Apply")  # a step takes seconds here
    pending = bench.root.locator(".l2l-pending")
    until(
        lambda: "waits for step 1 to end: place 1 of 1 in the queue" in pending.inner_text(), page, "what it waits for"
    )
    until(lambda: "waits for step 1 to end" in bench.root.locator(".l2l-queued").inner_text(), page, "the header too")
    assert chosen(bench, "to") == "1 · L001", "the next press takes one layer"
    bench.screenshot("waiting")
    until(lambda: edits(bench) == ["dropped 1 to 2"], page, "the layers gone")
    assert pending.inner_text().strip() == ""
    bench.screenshot("numbers")
    assert_taken_over_is_grey(notebook, page)


def assert_taken_over_is_grey(notebook: Notebook, page: Page) -> None:
    first = notebook.bench(1)
    notebook.run_cell(2)
    second = notebook.bench(2)
    ended = first.root.locator(".l2l-ended")
    ended.wait_for()
    assert "taken over by another one on the same relay: use that one, or run this cell again" in ended.inner_text()
    # turning views changes nothing, nor does copying what was done, which is there still
    looks = "button:enabled:not(.l2l-viewbar *, .l2l-tour *, .l2l-glossary *, .l2l-script *)"
    until(lambda: first.root.locator(f"{looks}, select:enabled, input:enabled").count() == 0, page, "all grey")
    first.screenshot("taken_over")
    assert second.button("Run").is_enabled() and second.root.locator(".l2l-ended").count() == 0


def start(open_notebook: Callable[..., Notebook]) -> Bench:
    """A workbench that trains."""
    notebook = open_notebook(QUICK, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Run")
    bench.wait_for_step(1)
    return bench


def choice(bench: Bench, words: str) -> Locator:
    """A dropdown by its label."""
    return bench.root.locator(".l2l-edits").get_by_label(words, exact=True)


def chosen(bench: Bench, words: str) -> str:
    """What a dropdown stands at."""
    return choice(bench, words).locator("option:checked").inner_text().replace("\xa0", " ")


def undo(bench: Bench) -> Locator:
    return bench.root.locator("button", has_text="Undo")


def edits(bench: Bench) -> list[str]:
    """The lines of the journal, newest first."""
    return bench.root.locator(".l2l-journal tbody th").all_inner_texts()


def outlook(bench: Bench) -> str:
    return bench.root.locator(".l2l-outlook").inner_text()


def top_of(what: Locator) -> float:
    """Where it begins on the page."""
    box = what.bounding_box()
    assert box is not None
    return box["y"]


def tab_to(page: Page, name: str, most: int = 8) -> None:
    """Press Tab until a button has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent").strip() == name:
            return
    raise AssertionError(f"{most} times Tab, and {name} has not the focus")
