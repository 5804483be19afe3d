"""Executing a notebook stores outputs and nothing volatile, in one go, or leaves the file as it was."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from workbench.__main__ import main
from workbench.commands.notebook_runner import execute_and_store, find_faults


def write(folder: Path, *sources: str) -> Path:
    path = folder / "some.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    return path


def test_executing_stores_outputs_and_nothing_volatile(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import ipywidgets as widgets\nfor i in range(3): print(i, flush=True)",
        "class Both:\n"
        "    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {**widgets.IntSlider()._repr_mimebundle_(), 'text/html': '<b>shown</b>'}\n"
        "Both()",
    )
    assert main(["notebooks", str(path)]) == 0
    assert find_faults(path) == []
    nb = nbformat.read(path, as_version=4)
    assert [output.text for output in nb.cells[0].outputs] == ["0\n1\n2\n"]
    assert nb.cells[1].outputs[0].data["text/html"] == "<b>shown</b>"
    assert set(nb.metadata) == {"kernelspec", "language_info"} and "version" not in nb.metadata.language_info
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.ipynb"]
    before = path.read_bytes()
    execute_and_store(path)
    assert path.read_bytes() == before, "a second run of a deterministic notebook changes the file"


def test_a_notebook_that_fails_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "x = 1", "1 / 0")
    before = path.read_bytes()
    assert main(["notebooks", str(path)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_a_notebook_that_grows_too_large_is_not_written(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1", "print(('x' * 99 + '\\n') * 4_000)")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"some\.ipynb would have 4\d\d,\d+ bytes.*cell 2 with 404 kB"):
        execute_and_store(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
