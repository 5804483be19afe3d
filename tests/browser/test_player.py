"""Going through the last step, event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from lab import Notebook, until
from tiny import RELAY, WORKBENCH

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_player_goes_through_the_last_step(open_notebook: Callable[..., Notebook], page: Page) -> None:
    notebook = open_notebook(RELAY, WORKBENCH)
    notebook.run_cell(0), notebook.run_cell(1)
    bench = notebook.bench(1)
    bench.press("Run")
    bench.wait_for_step(1)
    bench.press("Pause")
    bench.wait_for_state("paused")
    until(lambda: "no step is under way" in bench.moment, page, "the picture of rest")

    bench.press("Next event")
    until(lambda: "event 2 of" in bench.moment, page, "the second event")
    bench.press("Next visit")
    until(lambda: bench.event > 2, page, "the next visit")
    visit = bench.event
    bench.press("Previous event")
    until(lambda: bench.event == visit - 1, page, "the event before")

    bench.handle("event").focus()
    page.keyboard.press("End")
    until(lambda: f"event {bench.event} of {bench.event}" in bench.moment, page, "the last event")
    page.keyboard.press("Home")
    until(lambda: bench.event == 1, page, "the first event")

    seen = bench.watch()
    bench.root.locator(".widget-play button").first.click()
    until(lambda: len({note["event"] for note in seen()}) >= 5, page, "the player to play on its own")
    bench.screenshot("playing")

    bench.press("Live")
    until(lambda: "no step is under way" in bench.moment, page, "the session as it is")
    bench.press("Run")
    step = bench.step
    bench.wait_for_step(step + 1)
    until(lambda: "event" in bench.moment, page, "the step under way")
