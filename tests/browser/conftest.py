"""One JupyterLab for all tests, one chromium per file, and a fresh page for every test."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from lab import Lab, Notebook, find_chromium, keep, serve_lab
from patience import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTH, HEIGHT = 1440, 2700  # px: a whole workbench is in sight


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if find_chromium() is None:
        pytest.skip("no chromium on this machine")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip('playwright is not installed (pip install -e ".[browser]")')
    with serve_lab(tmp_path_factory.mktemp("lab")) as served:
        yield served


# Not for the session: while playwright is there, an event loop runs in this thread, and other tests want their own.
@pytest.fixture(scope="module")
def browser(lab: Lab) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser, lab: Lab, request: pytest.FixtureRequest) -> Iterator[Page]:
    failed_before = request.session.testsfailed
    with browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}) as context:
        context.set_default_timeout(1000 * HANG_S)
        made = context.new_page()
        yield made
        if request.session.testsfailed > failed_before:
            keep(made, f"failed_{request.node.name}")
    lab.shut_down_kernels()


@pytest.fixture
def open_notebook(page: Page, lab: Lab, request: pytest.FixtureRequest) -> Callable[..., Notebook]:
    """A notebook of these code cells, open in JupyterLab."""
    return lambda *cells: Notebook(page, lab, lab.write(f"{request.node.name}.ipynb", list(cells)))
