"""The report in a browser, opened from its file: it asks the network for nothing, and its player plays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lab import keep, until
from patience import rarely
from recordings import record

from workbench.runs.html_report import write_report
from workbench.runs.run_loader import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report([load_run(record(folder / "run.jsonl.gz", title="a run"))], folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def asked() -> list[str]:
    """Addresses that the page has asked for."""
    return []


@pytest.fixture
def wrong() -> list[str]:
    """Errors and warnings of the page."""
    return []


@pytest.fixture
def open_report(chromium: Browser, file: Path, asked: list[str], wrong: list[str]) -> Iterator[Open]:
    contexts: list[BrowserContext] = []

    def open_it(width: int = 1200, height: int = 900, path: Path = file, **options: object) -> Page:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert wrong == []


def event(page: Page) -> int:
    """Number of the event that the picture shows."""
    words = " ".join(page.locator('[data-part="picture"] text').all_text_contents())
    found = re.search(r"event (\d+) of (\d+)", words)
    assert found, words
    return int(found[1])


def wait_for_player(page: Page) -> None:
    page.locator('[data-part="controls"]').wait_for(state="visible")


def test_it_asks_for_nothing_but_itself(open_report: Open, asked: list[str], file: Path) -> None:
    page = open_report()
    wait_for_player(page)
    page.get_by_role("button", name="Play").click()
    page.wait_for_timeout(300)
    for fold in page.locator("summary").all():
        fold.click()
    page.mouse.wheel(0, 5000)
    page.wait_for_timeout(200)
    assert asked == [file.as_uri()]


def test_its_policy_lets_no_other_script_run_and_nothing_be_fetched(open_report: Open, wrong: list[str]) -> None:
    page = open_report()
    found = page.evaluate(
        """async () => {
            const script = document.createElement("script");
            script.textContent = "window.broken = true";
            document.body.append(script);
            return [window.broken, await fetch("http://127.0.0.1:9/").then(() => "", (error) => String(error))];
        }"""
    )
    assert found[0] is None and "Failed to fetch" in found[1]
    assert len([words for words in wrong if "Content Security Policy" in words]) >= 2
    wrong.clear()


def test_buttons_and_keys_move_the_player(open_report: Open, file: Path) -> None:
    page = open_report()
    wait_for_player(page)
    began = event(page)
    page.get_by_role("button", name="Next event").click()
    assert event(page) == began + 1
    page.keyboard.press("ArrowLeft")  # the button has the focus
    page.keyboard.press("ArrowLeft")
    assert event(page) == began - 1
    page.get_by_role("button", name="Next layer").click()
    later = event(page)
    assert later >= began
    page.keyboard.press("Shift+ArrowLeft")
    assert event(page) < later
    page.keyboard.press("Home")
    assert event(page) == 1
    page.keyboard.press("End")
    run = load_run(file.parent).snapshot()
    assert run.last is not None and event(page) == run.last.counts[0]
    slider = page.get_by_role("slider", name="Event")
    slider.fill("3")
    assert event(page) == 4
    assert slider.get_attribute("aria-valuetext") == page.locator('[data-part="said"]').text_content()
    assert "Event 4 of" in page.locator('[data-part="said"]').inner_text()


def test_it_plays_pauses_and_stops_at_the_end(open_report: Open) -> None:
    page = open_report()
    wait_for_player(page)
    page.locator('[data-part="pace"]').select_option("fast")
    page.locator('[data-part="play"]').focus()
    began = event(page)
    page.keyboard.press("Space")
    until(lambda: event(page) > began + 3, page, "the player to play")
    page.keyboard.press("Space")
    held = event(page)
    page.wait_for_timeout(250)
    assert event(page) == held
    page.keyboard.press("End")
    last = event(page)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    until(lambda: event(page) == last, page, "the last event")
    until(lambda: "Play" in page.locator('[data-part="play"]').inner_text(), page, "the player to stop")
    page.keyboard.press("Space")
    until(lambda: event(page) < last, page, "the player to begin again")


def test_the_words_follow_the_picture(open_report: Open) -> None:
    page = open_report()
    wait_for_player(page)
    page.get_by_text("This moment in words").click()
    page.get_by_role("slider", name="Event").fill("0")
    before = page.locator('[data-part="table"]').inner_text()
    page.get_by_role("slider", name="Event").fill("20")
    assert (
        page.locator('[data-part="table"]').is_visible() and page.locator('[data-part="table"]').inner_text() != before
    )


def test_without_scripts_it_reads(open_report: Open) -> None:
    page = open_report(java_script_enabled=False)
    assert page.locator('[data-part="picture"] svg').is_visible()
    assert not page.locator('[data-part="controls"]').is_visible()
    assert page.get_by_text("the player needs them").is_visible()


@pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (500, "dark"), rarely(1200, "dark"), rarely(500, "light")]
)
def test_nothing_sticks_out_and_words_stand_out(open_report: Open, width: int, scheme: str) -> None:
    page = open_report(width, color_scheme=scheme)
    wait_for_player(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ink, paper = page.evaluate(
        "() => [document.querySelector('.player svg text'), document.body]"
        ".map((e, i) => getComputedStyle(e)[i ? 'backgroundColor' : 'fill'])"
    )
    lights = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (ink, paper)]
    assert abs(lights[0] - lights[1]) > 150 and (lights[1] < 60) == (scheme == "dark"), (ink, paper)
    keep(page, f"report_{width}_{scheme}")


def test_two_runs_have_a_player_each(open_report: Open, file: Path, tmp_path: Path, asked: list[str]) -> None:
    run = load_run(file.parent)
    write_report([run, run], tmp_path / "two.html")
    page = open_report(path=tmp_path / "two.html")
    players = page.locator('[data-part="controls"]')
    until(lambda: players.nth(1).is_visible(), page, "the second player")
    assert players.count() == 2
    began = event(page)
    players.nth(1).get_by_role("button", name="Next event").click()
    pictures = page.locator('[data-part="picture"]')
    assert f"event {began + 1} of" in " ".join(pictures.nth(1).locator("text").all_text_contents())
    assert f"event {began} of" in " ".join(pictures.nth(0).locator("text").all_text_contents())
    assert len(asked) == 1
