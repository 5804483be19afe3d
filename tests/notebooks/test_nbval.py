"""Every notebook runs again and shows what is stored; cells tagged nbval-ignore-output may differ.

nbval runs in a separate process, without our settings of pytest: they turn warnings into errors, also those of nbval.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from patience import HANG_S, rarely

from workbench.commands.notebook_runner import ROOT, find_notebooks

LONG = {
    "02_memory",
    "04_finetune",
    "05_dynamic_depth",
    "09_your_own_depth_experiment",
    "10_how_large_models_are_trained",
}  # compute for half a minute or more
SANITIZE = Path(__file__).with_name("sanitize.cfg")
PATHS = str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
OFFLINE["WORKBENCH_SOURCES"] = "built-in"  # 04 trains for minutes where the real model is installed


def nbval(*paths: Path) -> subprocess.CompletedProcess[str]:
    """Run notebooks against what they store."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q"]
    command += [
        "-p",
        "patient_nbval",
        "--nbval",
        f"--nbval-cell-timeout={HANG_S:.0f}",
        f"--nbval-sanitize-with={SANITIZE}",
    ]
    env = {**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(PATHS)}  # kernels start in the notebook's folder
    env.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [*command, "--color=no", *map(str, paths)], env=env, capture_output=True, text=True, timeout=4 * HANG_S
    )


@pytest.mark.timeout(5 * HANG_S)  # all notebooks together
@pytest.mark.parametrize("long", [False, rarely(True)])
def test_notebooks_show_what_is_stored(long: bool) -> None:
    done = nbval(*(path for path in find_notebooks() if (path.stem in LONG) == long))
    assert done.returncode == 0, f"`make notebooks` stores them anew\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_a_changed_output_fails_unless_its_cell_is_tagged(tmp_path: Path) -> None:
    def cell(stored: str, *tags: str) -> nbformat.NotebookNode:
        printed = new_output("stream", name="stdout", text=stored)
        return new_code_cell("print(6 * 7)", execution_count=1, outputs=[printed], metadata={"tags": list(tags)})

    cells = [cell("42\n"), cell("43\n"), cell("43\n", "nbval-ignore-output")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "some.ipynb")
    done = nbval(tmp_path / "some.ipynb")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout and "Cell 1" in done.stdout
