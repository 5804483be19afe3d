"""A recorded run replayed in JupyterLab: the notebook of the command, its slider and its player."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, keep, until
from recordings import record

from workbench.commands.replay import write_replay_notebook
from workbench.runs.run_loader import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_a_recorded_run_is_seen_again(page: Page, lab: Lab) -> None:
    folder = lab.folder / "recorded"
    write_replay_notebook([load_run(record(folder / "run.jsonl.gz", title="a run"))])
    try:
        notebook = Notebook(page, lab, "recorded/replay.ipynb")
        notebook.run_cell(0)
        root = notebook.cell(0).locator(".l2l-workbench")
        title = root.locator(".l2l-title")
        until(lambda: "step 10" in title.inner_text(), page, "the end of the run")
        root.locator('button:text-is("Loss")').click()
        until(lambda: "micro_batches 2 → 3" in root.inner_text(), page, "the loss")
        root.locator('button:text-is("Relay")').click()
        assert "a run, recorded" in root.inner_text()
        for name in ("Run", "Pause", "Stop", "Undo", "Live"):
            assert not root.locator(f'button:text-is("{name}"):visible').count(), name
        keep(root, "replay")

        picture = root.locator("svg.l2l").first
        words = lambda: " ".join(picture.locator("text").all_text_contents())  # noqa: E731
        until(lambda: "event " in words(), page, "the relay picture")
        began = _event(words())
        root.locator('button[title="Next event"]').click()
        until(lambda: _event(words()) == began + 1, page, "the next event")

        slider = root.locator(".widget-hslider", has_text="after step").locator(".noUi-handle")
        slider.focus()
        page.keyboard.press("Home")
        until(lambda: re.search(r"step 1\b", title.inner_text()), page, "the first step")
        root.locator('button:text-is("Loss")').click()
        until(lambda: "micro_batches 2 → 3" not in root.inner_text(), page, "the loss till then")
        slider.focus()
        page.keyboard.press("ArrowRight")
        until(lambda: re.search(r"step 2\b", title.inner_text()), page, "the second step")
    finally:
        shutil.rmtree(folder)


def _event(words: str) -> int:
    found = re.search(r"event (\d+) of", words)
    assert found, words
    return int(found[1])
