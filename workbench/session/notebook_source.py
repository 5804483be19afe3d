"""Statements of notebook cells that made the relay and the batches of a session, for its script.

The cells are taken from IPython's history when the session is made. Kept are the statements that define a name that is
needed later, those that use such a name, and calls of torch, numpy and random, which set seeds. Comments are lost.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_SESSIONS = ("Workbench", "Session")
_SEEDED = {"torch", "np", "numpy", "random"}  # modules whose calls may set a seed or draw numbers


@dataclass(frozen=True)
class NotebookSource:
    """Code that made the relay and the batches.

    Attributes:
        code: statements.
        relay, batches: expressions, to evaluate after them.
    """

    code: str
    relay: str
    batches: str


def find_notebook_source(relay: Any) -> NotebookSource | None:
    """Return the code of the running notebook that made this relay and its batches; None where it is not known."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cells = [] if shell is None else list(shell.user_ns.get("In", ()))
    found = source_of_cells(cells)
    if found is None or shell is None or shell.user_ns.get(found.relay) is not relay:
        return None
    return found


def source_of_cells(cells: Sequence[str]) -> NotebookSource | None:
    """Return the code before the last call of `Workbench(relay, batches)` at the top of a cell; None without one."""
    statements = [statement for cell in cells for statement in _parse(cell)]
    for i in reversed(range(len(statements))):
        if (call := _session_call(statements[i])) is not None:
            relay, batches = call.args[:2]
            kept = _needed_statements(statements[:i], {*_names(relay), *_names(batches)})
            return NotebookSource("\n".join(map(ast.unparse, kept)), ast.unparse(relay), ast.unparse(batches))
    return None


def _parse(cell: str) -> Sequence[ast.stmt]:
    try:
        return ast.parse(cell).body
    except SyntaxError:  # a cell that did not run
        return []


def _session_call(statement: ast.stmt) -> ast.Call | None:
    if not isinstance(statement, ast.Expr | ast.Assign):
        return None
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SESSIONS:
            return node if len(node.args) > 1 else None
    return None


def _needed_statements(statements: Sequence[ast.stmt], needed: set[str]) -> Sequence[ast.stmt]:
    kept = []
    for statement in reversed(statements):
        defined, used = _defined(statement), set(_names(statement))
        calls = isinstance(statement, ast.Expr | ast.For | ast.With | ast.If | ast.While)
        if defined & needed or (calls and used & (needed | _SEEDED) and _session_call(statement) is None):
            kept.append(statement)
            needed = (needed - (set() if calls else defined)) | (used - defined if not calls else used)
    return kept[::-1]


def _defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns, imports or defines."""
    found: set[str] = set()
    for node in _outer_nodes(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _outer_nodes(statement: ast.AST) -> Iterable[ast.AST]:
    """Return the nodes of a statement, without those inside functions and classes."""
    yield statement
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(statement):
            yield from _outer_nodes(child)


def _names(node: ast.AST) -> Iterable[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
