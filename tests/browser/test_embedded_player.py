"""A recorded step in a page of somebody's own: one script, no kernel, no network, whatever the page's styles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lab import until
from recordings import record

import workbench

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

# The encoding is not declared, and styles of the page would spoil the player.
PAGE = """<!doctype html><title>lecture</title>
<style>button { display: none } svg { opacity: 0 } p { font-size: 90px }</style>
<h1>Before</h1><script src="step.js"></script><h2>After</h2>"""


def event(page: Page) -> int:
    words = " ".join(page.locator('.l2l-player [data-part="picture"] text').all_text_contents())
    found = re.search(r"event (\d+) of (\d+)", words)
    assert found, words
    return int(found[1])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_plays_in_any_page(chromium: Browser, tmp_path: Path, scheme: str) -> None:
    run = workbench.load_run(record(tmp_path / "run.jsonl.gz"))
    workbench.write_player(run, tmp_path / "step.js")
    more = "" if scheme == "light" else "<style>:root { color-scheme: dark }</style>"
    (tmp_path / "page.html").write_text(PAGE + more, encoding="utf-8")
    context = chromium.new_context(viewport={"width": 900, "height": 800})
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(Path(request.url).name))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())

    page.locator('.l2l-player [data-part="controls"]').wait_for()
    play = page.get_by_role("button", name="▶ Play")
    assert play.is_visible()
    page.get_by_role("button", name="Next event").click()
    page.keyboard.press("Home")
    assert event(page) == 1
    page.locator('[data-part="pace"]').select_option("fast")
    play.click()
    until(lambda: event(page) > 3, page, "the player to play")
    page.keyboard.press("End")
    assert run.snapshot().last is not None and event(page) == run.snapshot().last.counts[0]  # type: ignore[union-attr]

    box, before, after = (page.locator(name).bounding_box() for name in (".l2l-player", "h1", "h2"))
    assert box and before and after and before["y"] < box["y"] < after["y"], "it stands where the script does"
    back = page.locator(".l2l-player").evaluate("host => getComputedStyle(host).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light"), "it follows the page's colour scheme"
    page.screenshot(path=tmp_path / "page.png")
    assert asked == ["page.html", "step.js"] and wrong == []
    context.close()
