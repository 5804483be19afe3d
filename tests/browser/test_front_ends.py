"""The workbench in other front ends than JupyterLab, each in chromium; and what a first launch asks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from lab import TOKEN, Bench, Lab, free_port, keep, serve, settings_of, until
from nbformat.v4 import new_code_cell, new_notebook
from patience import HANG_S, rarely
from tiny import RELAY

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.browser

SHOW = "workbench = Workbench(relay, batches)\nworkbench"
STILL = '[class$="-still"]'
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def write(folder: Path, *cells: str) -> Path:
    """A notebook of these cells."""
    path = folder / "bench.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=KERNEL), path)
    return path


class FrontEnd:
    """A program that shows notebooks: how it is started, where the notebook is, and what a person does there."""

    name = ""

    def command(self, folder: Path, port: int) -> list[str]:
        options = [f"--ServerApp.port={port}", "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder}"]
        options += [f"--IdentityProvider.token={TOKEN}", "--ServerApp.port_retries=0", "--no-browser", "--allow-root"]
        return [sys.executable, "-m", self.name, *options]

    def path(self) -> str:
        return f"notebooks/bench.ipynb?token={TOKEN}"

    def run_cells(self, page: Page) -> None:
        """Run all of them."""

    def restart(self, page: Page) -> None:
        """Give the notebook another kernel, if a person can do that here."""


class Notebook7(FrontEnd):
    name = "notebook"

    def run_cells(self, page: Page) -> None:
        page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(state="attached")
        page.wait_for_timeout(4000)  # it says so before it has a kernel
        self._choose(page, "Run", "Run All Cells")

    def restart(self, page: Page) -> None:
        self._choose(page, "Kernel", "Restart Kernel…")
        page.locator(".jp-Dialog .jp-mod-accept").click()

    def _choose(self, page: Page, menu: str, item: str) -> None:
        page.locator(".lm-MenuBar-itemLabel", has_text=menu).first.click()
        page.locator(".lm-Menu-itemLabel", has_text=item).first.click()


class Classic(FrontEnd):
    name = "nbclassic"

    def path(self) -> str:
        return f"nbclassic/notebooks/bench.ipynb?token={TOKEN}"

    def run_cells(self, page: Page) -> None:
        page.wait_for_function("window.Jupyter?.notebook?.kernel?.is_connected()")
        page.locator("#celllink").click()
        page.locator("#run_all_cells").click()

    def restart(self, page: Page) -> None:
        page.evaluate("Jupyter.notebook.kernel.restart()")


class Voila(FrontEnd):
    name = "voila"

    def command(self, folder: Path, port: int) -> list[str]:
        return [sys.executable, "-m", "voila", "bench.ipynb", f"--port={port}", "--no-browser", "--Voila.ip=127.0.0.1"]

    def path(self) -> str:
        return ""


@pytest.fixture(params=[Notebook7, Classic, Voila], ids=lambda kind: kind.name)
def front_end(request: pytest.FixtureRequest) -> FrontEnd:
    made = request.param()
    if importlib.util.find_spec(made.name) is None:
        pytest.skip(f'{made.name} is not installed (pip install -e ".[frontends]")')
    return made


@pytest.fixture
def address(front_end: FrontEnd, tmp_path: Path) -> Iterator[str]:
    write(tmp_path, RELAY, SHOW)
    port = free_port()
    where = f"http://127.0.0.1:{port}/"
    # Voila answers its first address by running the notebook, so something else is asked for
    alive = where + ("voila/static/voila.js" if front_end.name == "voila" else f"api/status?token={TOKEN}")
    with serve(tmp_path, front_end.command(tmp_path, port), alive):
        yield where


def focus(control: Locator) -> Locator:
    control.focus()
    return control


def test_a_person_watches_steers_and_presents(front_end: FrontEnd, address: str, page: Page) -> None:
    page.goto(f"{address}{front_end.path()}")
    front_end.run_cells(page)
    bench = Bench(page, page.locator(".l2l-workbench"))
    assert page.locator(STILL).count() == 1 and not page.locator(STILL).is_visible(), "the widget stands for both"

    bench.press("Run")
    bench.wait_for_step(2)
    moment = bench.moment
    until(lambda: bench.moment != moment, page, "the picture to move")
    keep(page, f"{front_end.name}_running")
    focus(bench.button("Pause")).press("Enter")
    bench.wait_for_state("paused")
    step = bench.step
    focus(bench.button("Step")).press("Space")
    bench.wait_for_step(step + 1)

    focus(bench.button("Layers")).press("Enter")
    focus(bench.root.locator(".l2l-layers-box")).press("ArrowDown")
    bench.root.locator(".l2l-layers tr.l2l-selected").wait_for()
    focus(bench.button("Edits")).press("Enter")
    edit = bench.root.locator("select:visible").first
    before = edit.input_value()
    focus(edit).press("ArrowDown")
    until(lambda: edit.input_value() != before, page, "another edit to be chosen")
    bench.handle("layers ahead").press("ArrowUp")
    until(lambda: "2" in bench.root.locator(".widget-hslider", has_text="layers ahead").inner_text(), page, "2 ahead")

    focus(bench.button("Time")).press("Enter")
    bench.root.locator('button:text-is("Perfetto"):visible').click()
    bench.root.locator(".l2l-written:visible", has_text="step_").wait_for()
    keep(page, f"{front_end.name}_written")
    bench.press("Present")
    page.wait_for_function("document.fullscreenElement?.classList.contains('l2l-workbench')")
    keep(page, f"{front_end.name}_presenting")
    bench.press("Present")
    page.wait_for_function("document.fullscreenElement === null")


def test_when_the_kernel_is_gone_the_still_takes_its_place(front_end: FrontEnd, address: str, page: Page) -> None:
    if type(front_end).restart is FrontEnd.restart:
        pytest.skip(f"{front_end.name} has no button that restarts the kernel")
    page.goto(f"{address}{front_end.path()}")
    front_end.run_cells(page)
    bench = Bench(page, page.locator(".l2l-workbench"))
    bench.press("Step")
    bench.wait_for_step(1)
    still = page.locator(STILL)
    until(lambda: still.locator("svg.l2l").count() >= 5, page, "the still of the step")
    front_end.restart(page)
    still.wait_for()
    assert not bench.root.is_visible() and "step 1" in still.inner_text()
    keep(page, f"{front_end.name}_restarted")


@pytest.mark.parametrize("template", ["lab", rarely("classic"), rarely("basic")])
def test_exported_html_shows_the_pictures_without_a_network(template: str, browser: Browser, tmp_path: Path) -> None:
    notebook = write(tmp_path, RELAY, SHOW, "workbench.run(2)\nworkbench.wait()\nworkbench.close()")
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", "--template", template, str(notebook)]
    done = subprocess.run(command, env=settings_of(tmp_path), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    with browser.new_context(offline=True, viewport={"width": 1200, "height": 1600}) as context:
        page = context.new_page()
        page.goto(notebook.with_suffix(".html").as_uri())
        still = page.locator(STILL)
        still.wait_for()
        assert still.locator("svg.l2l:visible").count() >= 5 and page.locator(".l2l-workbench").count() == 0
        assert "step 2" in still.inner_text()
        keep(still, f"exported_{template}")


def test_the_first_launch_asks_nothing(lab: Lab, first_page: Page) -> None:
    """The server's folders of settings are new, and so is the browser's profile."""
    written = lab.write("first.ipynb", ["1 + 1"])
    first_page.goto(f"{lab.address}/lab/tree/{written}?token={TOKEN}")
    first_page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()  # a kernel was chosen without a question
    first_page.wait_for_timeout(3000)  # news would be asked for by now
    assert first_page.locator(".jp-Dialog, .Toastify__toast, .jp-toastContainer .jp-Notification-Toast").count() == 0
    keep(first_page, "first_launch")
