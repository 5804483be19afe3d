"""Launcher of JupyterLab at the first notebook, on 127.0.0.1 only and with its token."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from workbench.commands.copy_notebooks import QUIET_LAB, refresh_copies

ROOT = Path(__file__).resolve().parents[2]
SETTINGS_FOLDER = Path(__file__).resolve().parents[1] / "pages"  # its overrides.json is read by JupyterLab
FIRST_NOTEBOOK, COPIES = "00_start_here.ipynb", "out/notebooks"


def open_copies(root: Path) -> str:
    """Copy the notebooks below `root` to `COPIES` and return the path of the first page there.

    Raises:
        ValueError: there are no notebooks, as in an installation without the repository.
        OSError: they cannot be copied.
    """
    folder = root / "notebooks"
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: run this from a clone of the repository; or copy the notebooks of the "
            "package, `python -m workbench notebooks --to notebooks`, and then run the command that it prints"
        )
    copies = refresh_copies(sorted(folder.glob("*.ipynb")), root / COPIES)
    return f"{COPIES}/{FIRST_NOTEBOOK}" if any(path.name == FIRST_NOTEBOOK for path in copies) else COPIES


def lab_command(root: Path, page: str, port: int, *, no_browser: bool = False, as_root: bool = False) -> list[str]:
    """Return the command that opens `page`; it sets no token or password, so Jupyter makes a token."""
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    # the page is set as the default address, so that the printed address contains it
    command += [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{page}"]
    # switches off the first question, whether JupyterLab may fetch news; its settings can still allow that
    command += [f"--LabApp.app_settings_dir={SETTINGS_FOLDER}", QUIET_LAB]
    if no_browser:
        command.append("--no-browser")
    if as_root:
        command.append("--allow-root")  # Jupyter refuses otherwise, and a bare container has no other user
    return command


def trust_notebooks(root: Path) -> list[Path]:
    """Sign the copies of the notebooks below `root`, as `jupyter trust` does, and return them.

    JupyterLab hides HTML and SVG of unsigned notebooks until they are run again.

    Raises:
        OSError, ValueError: a file cannot be read or is no notebook, or signatures cannot be stored.
    """
    paths = sorted((root / COPIES).glob("*.ipynb"))
    notary = NotebookNotary()
    try:
        for path in paths:
            notary.sign(nbformat.read(path, as_version=4))
    finally:
        notary.store.close()
    return paths


def main(port: int, no_browser: bool) -> int:
    """Run JupyterLab until it is stopped; return its exit status."""
    try:
        page = open_copies(ROOT)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"these are copies of the notebooks, in {COPIES}: change them as you like")
    try:
        trust_notebooks(ROOT)
    except (OSError, ValueError) as error:  # JupyterLab starts anyway
        print(f"the notebooks' stored pictures will show only after they are run: {error}", file=sys.stderr)
    return run_lab(ROOT, page, port, no_browser)


def run_lab(root: Path, page: str, port: int, no_browser: bool) -> int:
    """Run JupyterLab on a folder, opened at a page, until it is stopped; return its exit status."""
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0
    process = subprocess.Popen(lab_command(root, page, port, no_browser=no_browser, as_root=as_root))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # Jupyter received the same Ctrl-C and prompts the user before it stops
