"""Every notebook runs again and shows what is stored; cells tagged nbval-ignore-output may differ.

nbval runs in a process of its own, without our settings of pytest: they turn warnings into errors, also those of its own.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from workbench.notebooks import CELL_TIMEOUT_S, FOLDER, ROOT, find_notebooks

BUDGET_S = 240  # for all notebooks together
SANITIZE = Path(__file__).with_name("sanitize.cfg")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
OFFLINE["WORKBENCH_SOURCES"] = "built-in"  # 04 trains for minutes where the real model is installed


def nbval(*paths: Path, timeout_s: float = BUDGET_S) -> subprocess.CompletedProcess[str]:
    """Run notebooks against what they store."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q"]
    command += ["--nbval", f"--nbval-cell-timeout={CELL_TIMEOUT_S}", f"--nbval-sanitize-with={SANITIZE}"]
    env = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)}  # kernels start in the notebook's folder
    env.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [*command, "--color=no", *map(str, paths)], env=env, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.timeout(BUDGET_S + 60)
@pytest.mark.skipif(not find_notebooks(), reason="no notebooks yet")
def test_notebooks_show_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.perf_counter()
    done = nbval(FOLDER)
    with capsys.disabled():
        seconds = time.perf_counter() - began_s
        print(f"\n{len(find_notebooks())} notebooks ran in {seconds:.0f} s of {BUDGET_S} s allowed")
    assert done.returncode == 0, f"`make notebooks` stores them anew\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_a_changed_output_fails_unless_its_cell_is_tagged(tmp_path: Path) -> None:
    def cell(stored: str, *tags: str) -> nbformat.NotebookNode:
        printed = new_output("stream", name="stdout", text=stored)
        return new_code_cell("print(6 * 7)", execution_count=1, outputs=[printed], metadata={"tags": list(tags)})

    cells = [cell("42\n"), cell("43\n"), cell("43\n", "nbval-ignore-output")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "some.ipynb")
    done = nbval(tmp_path / "some.ipynb", timeout_s=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout and "Cell 1" in done.stdout
