"""One JupyterLab and one chromium for all tests of this folder, and one page in which test after test opens its notebook.

To load JupyterLab takes a page as long as a test. What a test has opened is closed after it, and its kernels are ended; after one
that fails the page goes as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lab import Lab, Notebook, find_chromium, keep, serve_lab
from patience import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZE: Any = {"width": 1440, "height": 2700}  # px: a whole workbench is in sight

HERE = Path(__file__).parent
RUNNING = pytest.StashKey[tuple["Browser", ExitStack]]()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    skip_without_chromium()
    with serve_lab(tmp_path_factory.mktemp("lab")) as served:
        yield served


@pytest.fixture
def chromium(request: pytest.FixtureRequest) -> Browser:
    """Started by the first test that wants it: a start and an end cost as much as many pages."""
    skip_without_chromium()
    from playwright.sync_api import sync_playwright

    stash = request.session.stash
    if RUNNING not in stash:
        until_left = ExitStack()
        playwright = until_left.enter_context(sync_playwright())
        started = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        until_left.callback(started.close)
        stash[RUNNING] = started, until_left
    return stash[RUNNING][0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Not for the session: while playwright is there, an event loop runs in this thread, and other tests want their own."""
    try:
        return (yield)
    finally:
        if nextitem is None or HERE not in nextitem.path.parents:
            end_chromium(item.session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where a run was cut short."""
    end_chromium(session)


def end_chromium(session: pytest.Session) -> None:
    if RUNNING in session.stash:
        session.stash[RUNNING][1].close()
        del session.stash[RUNNING]


def skip_without_chromium() -> None:
    if find_chromium() is None:
        pytest.skip("no chromium on this machine")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip('playwright is not installed (pip install -e ".[browser]")')


@pytest.fixture
def browser(chromium: Browser, lab: Lab) -> Browser:
    """One that has a JupyterLab to go to."""
    return chromium


@pytest.fixture
def page(browser: Browser, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Page]:
    failed_before = request.session.testsfailed
    made = next((page for context in browser.contexts for page in context.pages), None) or new_page(browser)
    made.set_viewport_size(SIZE)
    yield made
    stays = False
    try:
        if request.session.testsfailed > failed_before:
            keep(made, f"failed_{request.node.name}")
        else:
            stays = lab.close_all(made)
    finally:
        if not stays:
            made.context.close()
        lab.shut_down_kernels()


@pytest.fixture
def first_page(browser: Browser) -> Iterator[Page]:
    """One of somebody who has never been here."""
    made = new_page(browser)
    yield made
    made.context.close()


def new_page(browser: Browser) -> Page:
    context = browser.new_context(viewport=SIZE)
    context.set_default_timeout(1000 * HANG_S)
    return context.new_page()


@pytest.fixture
def open_notebook(page: Page, lab: Lab, request: pytest.FixtureRequest) -> Callable[..., Notebook]:
    """A notebook of these code cells, open in JupyterLab."""
    return lambda *cells: Notebook(page, lab, lab.write(f"{request.node.name}.ipynb", list(cells)))
