"""The notebooks of the repository are stored executed, small, without widget state; and each fault would be found."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from workbench.__main__ import main
from workbench.commands.notebook_runner import (
    MAX_BYTES,
    WIDGET_VIEW,
    find_faults,
    find_notebooks,
    has_output,
    strip_notebook,
)


@pytest.mark.parametrize("path", find_notebooks(), ids=lambda path: path.stem)
def test_every_notebook_is_stored_as_it_should_be(path: Path) -> None:
    assert find_faults(path) == []


def well_stored() -> NotebookNode:
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell("x = 1", execution_count=1),
        new_code_cell("x", execution_count=2, outputs=[new_output("execute_result", {"text/plain": "1"})]),
    ]
    return strip_notebook(new_notebook(cells=cells))


def faults(nb: NotebookNode, folder: Path) -> list[str]:
    path = folder / "some.ipynb"
    nbformat.write(nb, path)
    return find_faults(path)


def test_a_well_stored_notebook_has_no_faults(tmp_path: Path) -> None:
    assert faults(well_stored(), tmp_path) == []


def widgets(nb: NotebookNode) -> None:
    nb.metadata["widgets"] = {}


def not_run(nb: NotebookNode) -> None:
    nb.cells[1].execution_count = None


def out_of_order(nb: NotebookNode) -> None:
    nb.cells[1].execution_count = 7


def no_output(nb: NotebookNode) -> None:
    nb.cells[2].outputs = []


def failed(nb: NotebookNode) -> None:
    nb.cells[1].outputs = [new_output("error", ename="KeyError", evalue="'a'", traceback=[])]


def timed(nb: NotebookNode) -> None:
    nb.cells[0].metadata["execution"] = {}


def dead_widget(nb: NotebookNode) -> None:
    nb.cells[2].outputs[0].data[WIDGET_VIEW] = {"model_id": "a"}


def address(nb: NotebookNode) -> None:
    nb.cells[2].outputs[0].data["text/plain"] = "<object at 0x7f12ab34cd56>"


def large(nb: NotebookNode) -> None:
    nb.cells[2].outputs[0].data["text/plain"] = "x" * MAX_BYTES


@pytest.mark.parametrize(
    "spoil, said",
    [
        (widgets, "holds the state of widgets"),
        (not_run, "not executed once from top to bottom: its counts are [None, 2]"),
        (out_of_order, "not executed once from top to bottom: its counts are [7, 2]"),
        (no_output, "cell 2: has no output"),
        (failed, "cell 1: ended in KeyError: 'a'"),
        (dead_widget, "cell 2: shows a widget whose kernel has ended"),
        (address, "cell 2: shows an address in memory, 0x7f12ab34cd56"),
        (large, "bytes, 300,000 are allowed"),
    ],
)
def test_each_fault_is_found(spoil: Callable[[NotebookNode], None], said: str, tmp_path: Path) -> None:
    nb = well_stored()
    spoil(nb)
    (fault,) = faults(nb, tmp_path)
    assert said in fault


@pytest.mark.parametrize("spoil", [widgets, timed, dead_widget])
def test_stripping_mends_what_it_can(spoil: Callable[[NotebookNode], None], tmp_path: Path) -> None:
    nb = well_stored()
    spoil(nb)
    assert faults(strip_notebook(nb), tmp_path) == []


def test_stripping_keeps_tags_and_outputs() -> None:
    nb = well_stored()
    nb.cells[2].metadata["tags"] = ["nbval-ignore-output"]
    before = nb.cells[2].outputs[0].data
    cell = strip_notebook(nb).cells[2]
    assert cell.metadata["tags"] == ["nbval-ignore-output"] and cell.outputs[0].data == before


@pytest.mark.parametrize(
    "source, shows",
    [
        ("x", True),
        ("f(x)", True),
        ("f(x);", False),
        ("x = 1", False),
        ("print(x)\ny = 1", True),
        ("print(x);", True),
        ("for x in y:\n    print(x)", True),
        ("with a:\n    b = 1\n    print(b)", True),
        ("def f():\n    print(1)", False),
        ("if x:\n    print(1)", False),
        ("%config InlineBackend.x = 1", True),
        ("# only a comment", False),
    ],
)
def test_which_cells_should_have_an_output(source: str, shows: bool) -> None:
    assert has_output(source) == shows


def test_the_command_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    nbformat.write(well_stored(), good)
    nb = well_stored()
    not_run(nb)
    nbformat.write(nb, bad)
    assert main(["notebooks", "--check", str(good)]) == 0
    assert main(["notebooks", "--check", str(good), str(bad)]) == 1
    said = capsys.readouterr().out
    assert "good.ipynb: ok" in said and "bad.ipynb: FAILED\n  not executed" in said


def test_what_is_no_notebook_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ipynb").write_text("no json")
    assert main(["notebooks", "--check", str(tmp_path / "a.ipynb"), str(tmp_path / "b.ipynb")]) == 1
    said = capsys.readouterr().out
    assert "a.ipynb is not a notebook" in said and "b.ipynb is not a notebook" in said
