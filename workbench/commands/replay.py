"""Replay of recorded runs in JupyterLab: `python -m workbench replay`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from workbench.commands.lab_launcher import run_lab
from workbench.runs import RecordedRun, load_run

REPLAY_NOTEBOOK = "replay.ipynb"


def open_replay(paths: Sequence[Path], port: int, no_browser: bool) -> int:
    """Open a replay notebook in JupyterLab; return its exit status, or 2 if a run cannot be read."""
    try:
        runs = [load_run(path) for path in paths]
        notebook = write_replay_notebook(runs)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return run_lab(notebook.parent, notebook.name, port, no_browser)


def write_replay_notebook(runs: Sequence[RecordedRun]) -> Path:
    """Write a notebook that replays these runs beside the first one, replacing an earlier one, and return its path."""
    path = runs[0].path.resolve().parent / REPLAY_NOTEBOOK
    cells = [
        new_markdown_cell("Run the cells to see the recorded run again. Nothing is trained, and no model is built.")
    ]
    names = [
        repr(run.path.name if run.path.resolve().parent == path.parent else str(run.path.resolve())) for run in runs
    ]
    if len(runs) > 1:
        cells.append(new_code_cell(f"import workbench\n\nworkbench.compare({', '.join(names)})"))
    cells += [new_code_cell(f"import workbench\n\nworkbench.replay({name})") for name in names]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
    return path
