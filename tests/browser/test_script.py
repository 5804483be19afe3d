"""A session copied as a script: to the clipboard, or where a page may not, shown and selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_the_script_is_copied_or_shown_where_a_page_may_not(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY, "workbench = Workbench(relay, batches, view='edits')\nworkbench")
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.root.get_by_text("relay.apply(Insert(at=").wait_for()  # the line of code of what the form would do
    bench.press("Step")
    bench.wait_for_step(1)
    bench.press("Apply")
    until(lambda: "5 layers" in bench.title, page, "the new layer")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    bench.press("Copy as script")
    said = bench.root.locator(".l2l-script [role=status]")
    until(lambda: said.inner_text().startswith("copied, "), page, "the copy")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "relay.apply(Insert(at=('', 4)))" in copied and "train(1, loss=" in copied
    compile(copied, "script", "exec")
    text = bench.root.get_by_label("The session as a script", exact=True)
    assert not text.is_visible()

    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')) }")
    bench.press("Copy as script")
    until(text.is_visible, page, "the text")
    assert "refused access to the clipboard" in said.inner_text() and text.input_value() == copied
    selected = text.evaluate("e => e.selectionEnd - e.selectionStart")
    assert selected == len(copied)
    bench.screenshot("script")
    bench.press("The session as a script")
    until(lambda: not text.is_visible(), page, "the text closed")
