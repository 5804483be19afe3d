"""Execution and storage of notebooks: `python -m workbench notebooks`.

Source and outputs are stored. Execution times, widget state and views of closed widgets are removed: they differ in every
run, and JupyterLab shows an error for such a view in place of the HTML beside it. A file is replaced only when its whole
notebook ran, by one rename.
"""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
MAX_BYTES = 300_000
CELL_TIMEOUT_S = 900  # a guard against hanging

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
VOLATILE = {"ExecuteTime", "collapsed", "execution", "scrolled", "trusted", "vscode"}  # metadata of cells
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


def main(paths: Sequence[Path], check: bool) -> int:
    """Execute and store notebooks, or with `check` only check the stored ones; return 1 if anything is wrong."""
    wrong = 0
    bar = tqdm(list(paths) or find_notebooks(), unit="notebook", disable=check, dynamic_ncols=True)
    for path in bar:
        bar.set_description(path.stem)
        began_s = time.perf_counter()
        try:
            faults = find_faults(path) if check else []
            if not check:
                execute_and_store(path)
        except (ValueError, OSError) as error:
            faults = [str(error)]
        wrong += bool(faults)
        state = (
            f"{time.perf_counter() - began_s:.1f} s, {path.stat().st_size / 1000:.0f} kB" if not faults else "FAILED"
        )
        bar.write(
            "\n".join([f"{path.name}: {'ok' if check and not faults else state}", *(f"  {line}" for line in faults)])
        )
    return 1 if wrong else 0


def find_notebooks(folder: Path = FOLDER) -> list[Path]:
    """Return the notebooks of the repository, in order."""
    return sorted(folder.glob("*.ipynb"))


def execute_and_store(path: Path, timeout_s: float = CELL_TIMEOUT_S) -> None:
    """Execute a notebook and replace the file by the result.

    Raises:
        ValueError: the file is no notebook, a cell failed or took too long, or the result is too large; nothing is written.
    """
    text = nbformat.writes(strip_notebook(execute_notebook(read_notebook(path), path.parent, timeout_s))) + "\n"
    size = len(text.encode("utf-8"))
    if size > MAX_BYTES:
        raise ValueError(
            f"{path} would have {size:,} bytes, {MAX_BYTES:,} are allowed, so it was not written. The largest outputs: "
            f"{', '.join(_largest_outputs(nbformat.reads(text, as_version=4)))}. Show less, or smaller pictures"
        )
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook from its file.

    Raises:
        ValueError: the file is no notebook.
    """
    try:
        return nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, FileNotFoundError) as error:
        raise ValueError(f"{path} is not a notebook that can be read: {str(error).splitlines()[0]}") from error


def execute_notebook(nb: NotebookNode, folder: Path, timeout_s: float) -> NotebookNode:
    """Run all cells in a new kernel in `folder`, and return `nb` with outputs and execution counts.

    Raises:
        ValueError: a cell raised, took longer than `timeout_s`, or ended the kernel.
    """
    client = NotebookClient(
        nb,
        kernel_name="python3",
        timeout=timeout_s,
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        return client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise ValueError(f"a cell failed, so nothing was written.\n{error}") from error


def strip_notebook(nb: NotebookNode) -> NotebookNode:
    """Remove everything but source, outputs and tags from `nb`, and return it."""
    rest = {name: value for name, value in nb.metadata.items() if name not in ("widgets", "signature", "vscode")}
    nb.metadata = nbformat.from_dict({**rest, "kernelspec": KERNEL, "language_info": LANGUAGE})
    for cell in nb.cells:
        for name in VOLATILE & set(cell.metadata):
            del cell.metadata[name]
        if cell.cell_type == "code":
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET_VIEW, None)
            cell.outputs = [output for output in cell.outputs if output.get("data", True)]
    return nb


# Checks of stored notebooks -------------------------------------------------------------------------------------------


def find_faults(path: Path) -> list[str]:
    """Return the faults of a stored notebook; none if `execute_and_store` has written it.

    Raises:
        ValueError: the file is no notebook.
    """
    nb, size = read_notebook(path), path.stat().st_size
    faults = [f"{size:,} bytes, {MAX_BYTES:,} are allowed"] if size > MAX_BYTES else []
    faults += ["holds the state of widgets (metadata.widgets)"] if "widgets" in nb.metadata else []
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        faults.append(f"not executed once from top to bottom: its counts are {counts}")
    for count, cell in enumerate(code, start=1):
        faults += [f"cell {count}: {fault}" for fault in _cell_faults(cell)]
    return faults


def _cell_faults(cell: NotebookNode) -> Iterator[str]:
    if has_output(cell.source) and not cell.outputs:
        yield "has no output, but prints or ends in a value; end its last line with ; if no output is intended"
    for name in sorted(VOLATILE & set(cell.metadata)):
        yield f"has the metadata {name}"
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"ended in {output.ename}: {output.evalue}"
        if WIDGET_VIEW in output.get("data", {}):
            yield "shows a widget whose kernel has ended"
        if found := ADDRESS.search(str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))):
            yield f"shows an address in memory, {found[0]}, which differs in every run"


def has_output(source: str) -> bool:
    """Return True if a cell prints, or ends in an expression without a semicolon."""
    body = ast.parse(TransformerManager().transform_cell(source)).body  # magics become calls
    ends_in_a_value = bool(body) and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";")
    return ends_in_a_value or any(map(_is_print_or_display, body))


def _is_print_or_display(statement: ast.AST) -> bool:
    """Return True if a statement prints or displays unconditionally, outside of functions."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.If | ast.IfExp):
        return False
    if isinstance(statement, ast.Call) and getattr(statement.func, "id", "") in ("print", "display"):
        return True
    return any(map(_is_print_or_display, ast.iter_child_nodes(statement)))


def _largest_outputs(nb: NotebookNode, count: int = 3) -> list[str]:
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    sizes = sorted(((len(str(cell.outputs)), cell.execution_count) for cell in code), key=lambda pair: -pair[0])
    return [f"cell {number} with {size / 1000:.0f} kB" for size, number in sizes[:count]]
