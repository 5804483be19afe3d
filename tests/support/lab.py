"""A JupyterLab server of our own and what is on its pages: what the browser tests drive and read."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import psutil
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_notebook
from patience import HANG_S

from workbench.commands.lab_launcher import lab_command

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "out" / "browser"  # screenshots of the last run
TOKEN = "browser-tests"
# A kernel that gets this signal writes where its threads are, for a test that has waited in vain.
STACKS = """import faulthandler, os, signal
faulthandler.register(signal.SIGUSR1, open(f"stacks_{os.getpid()}.txt", "w"))"""
THEMES = "lab/user-settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"


def find_chromium() -> str | None:
    """Debian's chromium, wherever it is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Lab:
    """JupyterLab as it runs: its address, the folder that it serves, its process, its theme."""

    address: str
    folder: Path
    process: psutil.Process
    theme: str = "JupyterLab Light"

    def write(self, name: str, cells: list[str]) -> str:
        """A notebook of these code cells; its path below the folder."""
        kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=kernel), self.folder / name)
        return name

    def copy(self, notebook: Path) -> str:
        """A notebook of the repository, trusted as `workbench lab` does it; its path below the folder."""
        shutil.copy(notebook, self.folder)
        notary = NotebookNotary(data_dir=str(self.folder / ".jupyter/data"))
        try:
            notary.sign(nbformat.read(notebook, as_version=4))
        finally:
            notary.store.close()
        return notebook.name

    def set_theme(self, name: str) -> None:
        """The theme of what is opened from now on."""
        self.theme = name
        path = self.folder / ".jupyter/config" / THEMES
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"theme": name}))

    def close_all(self, page: Page) -> bool:
        """Close what is open in JupyterLab, without being asked; tells whether nothing but its launcher is left."""
        return bool(page.evaluate(_CLOSE_ALL))

    def kernels(self) -> list[psutil.Process]:
        """The processes of all kernels."""
        return [process for process in self.process.children() if "ipykernel" in " ".join(process.cmdline())]

    def condition(self) -> str:
        """Where the threads of all kernels are, and the end of the server's log."""
        kernels = self.kernels()
        for kernel in kernels:
            kernel.send_signal(signal.SIGUSR1)
        time.sleep(1)
        stacks = [(self.folder / f"stacks_{kernel.pid}.txt").read_text() for kernel in kernels]
        return "\n\n".join([*stacks, (self.folder / "server.log").read_text()[-3000:]])

    def shut_down_kernels(self) -> None:
        """End all kernels, as a person does in the list of running kernels."""
        old = self.process.children(recursive=True)
        for session in json.loads(self._ask("GET", "sessions")):
            self._ask("DELETE", f"sessions/{session['id']}")
        left = psutil.wait_procs(old, 20)[1]
        assert not left, f"shut down and still there: {left}"

    def _ask(self, method: str, what: str) -> bytes:
        request = urllib.request.Request(f"{self.address}/api/{what}?token={TOKEN}", method=method)
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.read()


@contextmanager
def serve_lab(folder: Path) -> Iterator[Lab]:
    """JupyterLab on `folder`, with settings of its own as on a first launch; nothing of it is left at the end."""
    port = free_port()
    startup = folder / ".jupyter/ipython/profile_default/startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "stacks.py").write_text(STACKS)
    command = lab_command(folder, "", port, no_browser=True, as_root=True)
    command += [
        f"--IdentityProvider.token={TOKEN}",
        "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",
    ]
    with serve(folder, command, f"http://127.0.0.1:{port}/api/status?token={TOKEN}") as server:
        yield Lab(f"http://127.0.0.1:{port}", folder, server)


def settings_of(folder: Path) -> dict[str, str]:
    """The environment of a process whose settings, of Jupyter and of IPython, are in `folder` alone."""
    places = {name: str(folder / ".jupyter" / name) for name in ("config", "data", "runtime", "ipython")}
    return {
        **os.environ,
        "JUPYTER_CONFIG_DIR": places["config"],
        "JUPYTER_DATA_DIR": places["data"],
        "JUPYTER_RUNTIME_DIR": places["runtime"],
        "IPYTHONDIR": places["ipython"],
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def serve(folder: Path, command: list[str], address: str) -> Iterator[psutil.Process]:
    """A server, from when this address answers; its kernels end with it."""
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=settings_of(folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_for(address, server, folder / "server.log")
            yield psutil.Process(server.pid)
        finally:
            below = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
            server.terminate()  # shuts its kernels down
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            for process in psutil.wait_procs(below, 5)[1]:
                process.kill()


# JupyterLab shows itself to scripts as `jupyterapp`.
_OPEN = """async ([path, theme]) => {
    const app = window.jupyterapp;
    if (!app) return false;
    await app.commands.execute("apputils:change-theme", {theme});
    await app.commands.execute("docmanager:open", {path});
    return true;
}"""
# What has just gone can hand its place to the launcher after something else was opened. A person would click at the tab.
_IN_FRONT = """path => {
    const { shell } = window.jupyterapp;
    const isIt = widget => widget?.context?.path === path;
    if (isIt(shell.currentWidget)) return true;
    for (const widget of shell.widgets("main")) if (isIt(widget)) shell.activateById(widget.id);
    return false;
}"""
# Where nothing is left open, JupyterLab opens its launcher some time later, in front of whatever is there by then.
_CLOSE_ALL = """async () => {
    clearInterval(window.watching);
    if (!window.jupyterapp) return false;
    for (const widget of [...window.jupyterapp.shell.widgets("main")]) {
        if (!widget.context) continue;
        widget.context.model.dirty = false;
        widget.close();
    }
    const find = selector => document.querySelector(selector);
    const isClear = () => find(".jp-Launcher") && !find(".jp-NotebookPanel, .jp-Dialog");
    for (let tries = 0; !isClear() && tries < 500; tries++) await new Promise(resolve => setTimeout(resolve, 20));
    return Boolean(isClear());
}"""


class Notebook:
    """A notebook open in JupyterLab, as a person sees it."""

    def __init__(self, page: Page, lab: Lab, path: str) -> None:
        self.page, self.lab, self.path = page, lab, path
        if not page.evaluate(_OPEN, [path, lab.theme]):
            page.goto(f"{lab.address}/lab/tree/{path}?token={TOKEN}&reset")
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.panel.locator(".jp-Cell").first.wait_for(timeout=1000 * HANG_S)
        self.panel.locator(".jp-Spinner").wait_for(state="detached")
        until(lambda: page.evaluate(_IN_FRONT, path), page, f"{path} to be in front")
        self.wait_until_idle()

    def cell(self, number: int) -> Locator:
        """The code cell of this number, from 0."""
        return self.panel.locator(".jp-CodeCell").nth(number)

    def output(self, number: int) -> str:
        """What is read below a cell."""
        return "\n".join(self.cell(number).locator(".jp-OutputArea-output:visible").all_inner_texts()).strip()

    def run_cell(self, number: int, timeout_s: float = HANG_S) -> str:
        """Click into a cell, press Shift-Enter, wait until it has run; what it has printed."""
        self.start_cell(number)
        self.wait_for_cell(number, timeout_s)
        return self.output(number)

    def start_cell(self, number: int) -> None:
        """Click into a cell and press Shift-Enter; the prompt is then a star until the cell has run."""
        prompt = self.cell(number).locator(".jp-InputPrompt")
        prompt.evaluate(
            """prompt => { window.started = false;
            new MutationObserver(() => { window.started = true }).observe(prompt, {childList: true, characterData: true,
            subtree: true}) }"""
        )
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        until(lambda: self.page.evaluate("window.started"), self.page, f"cell {number} to start", step_ms=5)

    def wait_for_cell(self, number: int, timeout_s: float = HANG_S) -> None:
        """Wait until a cell has run that has started."""
        prompt = self.cell(number).locator(".jp-InputPrompt")
        try:
            until(
                lambda: re.search(r"\[\d+\]", prompt.inner_text()),
                self.page,
                f"cell {number} to end",
                timeout_s,
                step_ms=10,
            )
        except AssertionError as error:
            bar = self.page.locator("#jp-main-statusbar").inner_text()
            raise AssertionError(f"{error}; status bar: {bar!r}\n{self.lab.condition()}") from None

    def restart(self) -> None:
        """Restart the kernel, from the menu, and confirm."""
        self.choose("Kernel", re.compile("^Restart Kernel(…|\\.\\.\\.)"))
        self.page.evaluate(
            """() => { const bar = document.getElementById("jp-main-statusbar"); window.wasBusy = false;
            new MutationObserver(() => { window.wasBusy ||= !bar.innerText.includes("| Idle") })
            .observe(bar, {subtree: true, childList: true, characterData: true}) }"""
        )
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        until(lambda: self.page.evaluate("window.wasBusy"), self.page, "the kernel to go")
        self.wait_until_idle()

    def wait_until_idle(self, timeout_s: float = HANG_S) -> None:
        """Wait until the kernel is there and runs no cell."""
        status = self.page.locator("#jp-main-statusbar", has_text=re.compile(r"\| Idle"))
        status.wait_for(timeout=1000 * timeout_s)

    def save(self) -> None:
        """Save, from the menu, and wait until it is saved."""
        self.choose("File", re.compile("^Save Notebook$"))
        self.page.locator(".jp-NotebookPanel:not(.jp-mod-dirty)").wait_for(state="attached")
        self.page.locator(".lm-TabBar-tab.lm-mod-current.jp-mod-dirty").wait_for(state="detached")

    def choose(self, menu: str, item: str | re.Pattern[str]) -> None:
        """An item of the menu bar."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
        self.page.locator(".lm-Menu-itemLabel", has_text=item).first.click()

    def bench(self, number: int) -> Bench:
        """The live workbench below a cell; what the cell raised instead is told."""
        root = self.cell(number).locator(".l2l-workbench")
        failed = "Traceback (most recent call last)"
        until(lambda: root.count() or failed in self.output(number), self.page, "a workbench")
        assert root.count(), self.output(number)
        return Bench(self.page, root)


class Bench:
    """A live workbench on the page, as a person sees it."""

    def __init__(self, page: Page, root: Locator) -> None:
        self.page, self.root = page, root
        root.locator(".l2l-state").wait_for(timeout=1000 * HANG_S)
        self.root.scroll_into_view_if_needed()

    @property
    def title(self) -> str:
        """The line of facts."""
        return self.root.locator(".l2l-title").inner_text()

    @property
    def state(self) -> str:
        """The word of the state, without its sign."""
        return self.root.locator(".l2l-state").inner_text().split(" ", 1)[1]

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return int(_find(r"step (\d+)", self.title))

    @property
    def loss(self) -> float:
        """The last step's loss."""
        return float(_find(r"loss ([\d.e+-]+)", self.title))

    @property
    def moment(self) -> str:
        """What is written in the relay picture."""
        return " ".join(self.root.locator(".l2l-halves text").all_text_contents())

    @property
    def event(self) -> int:
        """The number of the event that the relay picture shows."""
        return int(_find(r"event (\d+) of \d+", self.moment))

    def picture(self, number: int) -> Locator:
        """Relay 0, timeline 1, memory 2, loss 3, heat map 4."""
        return self.root.locator('svg.l2l:not([aria-label="Algorithm"])').nth(number)

    def button(self, name: str) -> Locator:
        """A button by its words, or by what it says to a pointer that rests on it; of several, as in What if, the first."""
        return self.root.locator(f'button:text-is("{name}"), button[title="{name}"]').first

    def press(self, name: str) -> None:
        """Click a button."""
        self.button(name).click()

    def handle(self, name: str) -> Locator:
        """What is dragged of the slider with this label; of several, as in What if, the first."""
        return self.root.locator(".widget-hslider", has_text=name).locator(".noUi-handle").first

    def wait_for_state(self, state: str, timeout_s: float = HANG_S) -> None:
        """Wait until the header says so."""
        until(lambda: self.state == state, self.page, f"the state {state!r}", timeout_s)

    def wait_for_step(self, step: int, timeout_s: float = HANG_S) -> None:
        """Wait until so many steps are done."""
        until(lambda: self.step >= step, self.page, f"step {step}", timeout_s)

    def watch(self) -> Callable[[], list[dict[str, Any]]]:
        """From now on note what header and pictures show, every 15 ms; returns a function that gives the notes so far."""
        self.root.evaluate(_WATCH)
        return lambda: self.page.evaluate("window.notes")

    def screenshot(self, name: str) -> None:
        """Keep what is seen in `PICTURES`."""
        keep(self.root, name)


_WATCH = """root => {
    window.notes = []; clearInterval(window.watching);
    window.watching = setInterval(() => {
        const title = root.querySelector(".l2l-title").innerText;
        const pictures = root.querySelectorAll('svg.l2l:not([aria-label="Algorithm"])');
        const note = {state: root.querySelector(".l2l-state").innerText, step: +(/step (\\d+)/.exec(title) || [0, -1])[1],
            loss: (/loss ([\\d.]+)/.exec(title) || [0, ""])[1],
            event: [...pictures[0].querySelectorAll("text")].map(e => e.textContent).find(t => t.startsWith("event ")) || "",
            timeline: pictures[1] ? pictures[1].querySelectorAll("*").length + pictures[1].textContent : ""};
        const last = window.notes.at(-1);
        if (!last || JSON.stringify(last) !== JSON.stringify(note)) window.notes.push(note);
    }, 15);
}"""


def until(holds: Callable[[], Any], page: Page, what: str, timeout_s: float = HANG_S, step_ms: float = 40) -> None:
    """Wait until a condition holds; `what` is said when it never does.

    A machine that stands still, as shared ones do, is not what is waited for: of a pause of this process a second counts.
    """
    waited_s, then_s = 0.0, time.monotonic()
    while not holds():
        now_s = time.monotonic()
        waited_s, then_s = waited_s + min(1.0, now_s - then_s), now_s
        assert waited_s < timeout_s, f"waited {timeout_s} s for {what}"
        page.wait_for_timeout(step_ms)


def keep(what: Page | Locator, name: str) -> None:
    """A screenshot in `PICTURES`."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    what.screenshot(path=PICTURES / f"{name}.png")


def brightness(words: Locator) -> float:
    """Of the colour of a text, from 0 to 255."""
    return words.evaluate(
        """e => { const style = getComputedStyle(e), colour = e instanceof SVGElement ? style.fill : style.color;
        return Math.max(...colour.match(/[\\d.]+/g).slice(0, 3).map(Number)) }"""
    )


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in {text!r}"
    return found[1]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path, timeout_s: float = HANG_S) -> None:
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the server did not start: {error}\n{log.read_text()[-3000:]}") from error
            time.sleep(0.1)
