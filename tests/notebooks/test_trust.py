"""`make lab` vouches for the repository's notebooks, so that JupyterLab shows their stored pictures at once."""

from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_notebook, new_output

from workbench.commands.lab_launcher import trust_notebooks


def is_trusted(path: Path) -> bool:
    notary = NotebookNotary()
    try:
        return notary.check_signature(nbformat.read(path, as_version=4))
    finally:
        notary.store.close()


def test_notebooks_are_trusted_until_something_else_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "out" / "notebooks"
    (folder / "deeper").mkdir(parents=True)
    picture = new_output("display_data", {"image/svg+xml": "<svg/>", "text/html": "<svg/>"})
    nb = new_notebook(cells=[new_code_cell("show()", execution_count=1, outputs=[picture])])
    ours, other = folder / "01.ipynb", folder / "deeper" / "02.ipynb"
    nbformat.write(nb, ours)
    nb.cells[0].source = "other()"
    nbformat.write(nb, other)
    assert not is_trusted(ours)
    assert trust_notebooks(tmp_path) == [ours]
    assert is_trusted(ours) and not is_trusted(other)
    nb.cells[0].source = "changed()"
    nbformat.write(nb, ours)
    assert not is_trusted(ours)


def test_without_notebooks_there_is_nothing_to_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    assert trust_notebooks(tmp_path) == []
