"""A JupyterLab server of our own and a page in chromium: what the browser tests drive."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.lab import lab_command

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "out" / "browser"  # screenshots of the last run
TOKEN = "browser-tests"


def find_chromium() -> str | None:
    """Debian's chromium, wherever it is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def serve_lab(folder: Path) -> Iterator[str]:
    """JupyterLab on `folder`, with settings of its own; gives the address of its root."""
    port = _free_port()
    settings = {name: str(folder / ".jupyter" / name) for name in ("config", "data", "runtime", "ipython")}
    env = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": settings["config"],
        "JUPYTER_DATA_DIR": settings["data"],
        "JUPYTER_RUNTIME_DIR": settings["runtime"],
        "IPYTHONDIR": settings["ipython"],
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    quiet = folder / ".jupyter/config/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')  # a question that hides what is below it
    command = lab_command(folder, "", port, no_browser=True, as_root=True)
    command += [f"--IdentityProvider.token={TOKEN}", "--ServerApp.port_retries=0"]
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", server, folder / "lab.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


class Notebook:
    """A notebook open in JupyterLab, as a person sees it."""

    def __init__(self, page: Page, address: str, path: str) -> None:
        self.page = page
        page.goto(f"{address}/lab/tree/{path}?token={TOKEN}&reset")
        page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").first.wait_for(timeout=60_000)
        page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Spinner").wait_for(state="detached")
        self.wait_until_idle()

    def cell(self, number: int) -> Locator:
        """The code cell of this number, from 0."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").nth(number)

    def run_all(self) -> None:
        """Run every cell, from the menu."""
        self._choose("Run", "Run All Cells")

    def run_cell(self, number: int) -> None:
        """Click into a cell and press Shift-Enter."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def restart(self) -> None:
        """Restart the kernel, from the menu, and confirm."""
        self._choose("Kernel", re.compile("^Restart Kernel…|^Restart Kernel\\.\\.\\."))
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.wait_until_idle()

    def wait_until_idle(self, timeout_s: float = 90) -> None:
        """Wait until the kernel is there and runs no cell."""
        status = self.page.locator("#jp-main-statusbar", has_text=re.compile(r"\| Idle"))
        status.wait_for(timeout=1000 * timeout_s)

    def wait_for_count(self, number: int, timeout_s: float = 90) -> None:
        """Wait until a cell has run."""
        prompt = self.cell(number).locator(".jp-InputPrompt")
        until_s = time.monotonic() + timeout_s
        while not re.search(r"\[\d+\]", prompt.inner_text()):
            assert time.monotonic() < until_s, f"cell {number} has not run: {prompt.inner_text()!r}"
            self.page.wait_for_timeout(50)

    def save(self) -> None:
        """Save, from the keyboard."""
        self.page.keyboard.press("Control+s")
        self.page.wait_for_timeout(500)

    def _choose(self, menu: str, item: str | re.Pattern[str]) -> None:
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
        self.page.locator(".lm-Menu-itemLabel", has_text=item).first.click()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path, timeout_s: float = 60) -> None:
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"JupyterLab did not start: {error}\n{log.read_text()[-3000:]}") from error
            time.sleep(0.1)


__all__ = ["PICTURES", "ROOT", "TOKEN", "Notebook", "find_chromium", "serve_lab"]
if __name__ == "__main__":
    sys.exit("a helper of the tests, not a program")
