"""Open JupyterLab where a reader should start. It listens on 127.0.0.1 only and keeps its token."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

ROOT = Path(__file__).resolve().parents[2]
SETTINGS_FOLDER = Path(__file__).resolve().parents[1] / "pages"  # its overrides.json is read by JupyterLab
FIRST_NOTEBOOK = "00_start_here.ipynb"


def start_page(root: Path) -> str:
    """Choose where to start, as a path below `root`: the first notebook if it is there, else the folder of notebooks.

    Raises:
        ValueError: there is no such folder, as when the package was installed without the repository.
    """
    folder = root / "notebooks"
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: run this from a clone of the repository; or copy the notebooks that came with the "
            "package, `python -m workbench notebooks --to notebooks`, and open them with `jupyter lab notebooks`"
        )
    return f"notebooks/{FIRST_NOTEBOOK}" if (folder / FIRST_NOTEBOOK).is_file() else "notebooks"


def lab_command(root: Path, page: str, port: int, *, no_browser: bool = False, as_root: bool = False) -> list[str]:
    """Make the command that opens `page`; it says nothing about token or password, so Jupyter makes a token."""
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    # the page as default address and not as an argument: so it is also in the address that is printed
    command += [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{page}"]
    # JupyterLab would first ask whether it may fetch its news; in its settings a person may still say yes
    command.append(f"--LabApp.app_settings_dir={SETTINGS_FOLDER}")
    if no_browser:
        command.append("--no-browser")
    if as_root:
        command.append("--allow-root")  # Jupyter refuses otherwise, and a bare container has no other user
    return command


def trust_notebooks(root: Path) -> list[Path]:
    """Sign the notebooks directly in `root`/notebooks, as `jupyter trust` does; returns them.

    JupyterLab hides HTML and SVG of notebooks that nobody has vouched for until they are run again.

    Raises:
        OSError, ValueError: a file that cannot be read, or is no notebook; or no place for signatures.
    """
    paths = sorted((root / "notebooks").glob("*.ipynb"))
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
        page = start_page(ROOT)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        trust_notebooks(ROOT)
    except (OSError, ValueError) as error:  # no reason not to start
        print(f"the notebooks' stored pictures will show only after they are run: {error}", file=sys.stderr)
    return run_lab(ROOT, page, port, no_browser)


def run_lab(root: Path, page: str, port: int, no_browser: bool) -> int:
    """Run JupyterLab on a folder, opened at a page of it, until it is stopped; return its exit status."""
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0
    process = subprocess.Popen(lab_command(root, page, port, no_browser=no_browser, as_root=as_root))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # Jupyter got the same Ctrl-C and asks whether to stop; wait for what it is told
