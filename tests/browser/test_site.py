"""The documentation site as its files: the player plays, search finds, pages fit a phone, nothing is asked of a network.

Slow: builds the site. Skipped where the extra `docs` is not installed, as before the first `make docs`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lab import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PAGES = "index start first_step workbench docs/PEERS docs/BENCHMARKS notebooks/02_memory reference/relay".split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="Sphinx is not installed: make docs")
    out = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "docs/site/build.py", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def event(page: Page) -> int:
    words = " ".join(page.locator('.l2l-player [data-part="picture"] text').all_text_contents())
    found = re.search(r"event (\d+) of (\d+)", words)
    assert found, words
    return int(found[1])


def test_the_site_works_from_its_files(chromium: Browser, site: Path) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 844}, color_scheme="light")
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for name in PAGES:
        page.goto((site / f"{name}.html").as_uri())
        wide, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window, f"{name} scrolls sideways on a phone: {wide} px"

    page.goto((site / "reference" / "integrations.html").as_uri())
    signature = page.locator('[id="l2l_core.integrations.RelayStrategy"]').text_content() or ""
    assert "config: RelayConfig = RelayConfig()" in signature, "Lightning is a mock there, whose classes have *args"

    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto((site / "index.html").as_uri())
    player = page.locator(".l2l-player")
    page.get_by_role("button", name="Next event").click()
    page.keyboard.press("Home")
    assert event(page) == 1
    page.get_by_role("button", name="▶ Play").click()
    until(lambda: event(page) > 3, page, "the player to play")
    back = "host => getComputedStyle(host).backgroundColor"
    light = player.evaluate(back)
    toggle = page.locator(".content-icon-container .theme-toggle")
    for _ in range(2):  # auto, light, dark: one of two presses changes the colours
        toggle.click()
        if page.evaluate("document.body.dataset.theme") == "dark":
            assert player.evaluate(back) != light, "the player follows the switch of the theme"
            break
    else:
        raise AssertionError("the switch of the theme did not become dark")

    page.locator(".sidebar-search").fill("stash")
    page.keyboard.press("Enter")
    results = page.locator("#search-results li")
    results.first.wait_for()
    assert results.count() > 5
    results.first.locator("a").first.click()
    page.wait_for_url(re.compile(r"(?<!search)\.html"))
    assert wrong == [] and all(url.startswith(("file:", "data:")) for url in asked)
    context.close()
