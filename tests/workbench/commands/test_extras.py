"""Without the extra `workbench`, each entrance names the command that installs it in one line; `doctor` runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INSTALL = 'pip install "l2l-workbench[workbench]"'

# Runs the last argument where the packages of the extra cannot be imported.
WITHOUT = """
import sys

NOT_HERE = {"transformers", "datasets", "jupyterlab", "ipykernel", "IPython", "ipywidgets", "nbclient", "nbformat", "plotly",
            "anywidget", "rich", "platformdirs", "jupyter_core", "jupyter_client", "tokenizers"}

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NOT_HERE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
exec(sys.argv.pop())
"""


def run_without(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *arguments, code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "command", [["demo"], ["lab"], ["report", "x"], ["replay", "x"], ["notebooks"], ["calibrate"]], ids=" ".join
)
def test_a_command_gives_the_remedy_in_one_line(command: list[str]) -> None:
    done = run_without("from workbench.__main__ import main; sys.exit(main(sys.argv[1:]))", *command)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "is not installed for" in line and INSTALL in line


def test_a_name_of_the_package_gives_the_remedy() -> None:
    done = run_without("import workbench; workbench.Workbench")
    assert "ModuleNotFoundError: workbench.Workbench: " in done.stderr.splitlines()[-1] and INSTALL in done.stderr


def test_sessions_run_without_a_notebook() -> None:
    assert run_without("from workbench import Session, Snapshot").returncode == 0
