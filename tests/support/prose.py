"""The prose of the tree: docstrings, comments and messages of Python files, text of notebooks and documents.

python tests/support/prose.py                every sentence with a turn of phrase that readers stumble over
python tests/support/prose.py l2l_core/eps   the same for one file or folder
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

# Each is a phrase that has to be read twice, or that makes a person of a thing.
STUMBLES = {
    "indefinite subject": r"\b(?:whoever|whomever|whatever|whichever|somebody|anybody|nobody)\b",
    "what as subject": r"(?:^|[.!?;:]\s+|\n\s*\n\s*|\*\*)What (?!if\b|[^.!?:;]*\?)",
    "there is ... that": r"\bthere (?:is|are|was|were) [^.,;:()]{1,60}\b(?:that|which|who)\b",
    "of which": r"\bof (?:which|whom)\b",
    "let ... be": r"\blet(?:s|ting)? [^.,;:()]{1,40} be\b",
    "be it": r"\bbe it\b",
    "of its own": r"\bof (?:its|their|his|one's) own\b",
    "thing that speaks": r"\b(?:says?|said|hears?|heard|asks?|asked|tells?|told|knows?|knew)\b",
    "thing that looks": r"\blooks? (?:at|for|after|whether|how|like)\b",
    "thing that comes or goes": r"\b(?:comes|goes|gives? way|came|went)\b",
}
_STUMBLE = re.compile(
    "|".join(
        f"(?P<p{i}>{pattern})" if name == "what as subject" else f"(?P<p{i}>(?i:{pattern}))"
        for i, (name, pattern) in enumerate(STUMBLES.items())
    ),
    re.MULTILINE,
)
_CODE = re.compile(r"```.*?```|``[^`]+``|`[^`\n]+`", re.DOTALL)


class Text(NamedTuple):
    """A piece of prose and where it stands."""

    path: Path
    line: int
    kind: str  # "docstring" | "comment" | "message" | "document"
    text: str


class Stumble(NamedTuple):
    """A phrase that was found, and where."""

    path: Path
    line: int
    pattern: str
    sentence: str


@cache
def texts_of_python(path: Path) -> tuple[Text, ...]:
    """Docstrings, comments (adjacent lines together), and strings of four words or more; the file is read once."""
    return tuple(_texts_of_python(path))


def _texts_of_python(path: Path) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.add(id(first.value))
                yield Text(path, first.lineno, "docstring", first.value.value)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inside:
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            text = "".join(str(part) for part in parts)
        if text.count(" ") >= 3:
            yield Text(path, node.lineno, "message", text)
    yield from _comments(path, source)


def _comments(path: Path, source: str) -> Iterator[Text]:
    began, lines = -2, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != began + len(lines):
            if lines:
                yield Text(path, began, "comment", "\n".join(lines))
            began, lines = token.start[0], []
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield Text(path, began, "comment", "\n".join(lines))


def texts_of_notebook(path: Path) -> Iterator[Text]:
    """The markdown of a notebook, and its code cells as Python."""
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"], start=1):
        if cell["cell_type"] == "markdown":
            yield Text(path, number, "document", "".join(cell["source"]))


def texts_of(path: Path) -> Iterator[Text]:
    """The prose of a file; nothing of a file of another type."""
    if path.suffix == ".py":
        yield from texts_of_python(path)
    elif path.suffix == ".ipynb":
        yield from texts_of_notebook(path)
    elif path.suffix == ".md":
        yield Text(path, 1, "document", path.read_text(encoding="utf-8"))


def stumbles_of(text: Text) -> Iterator[Stumble]:
    """The phrases of a piece of prose that are in `STUMBLES`; what is marked as code is left out."""
    plain = _CODE.sub(lambda match: "`" + "\n" * match[0].count("\n") + "`", text.text)
    for match in _STUMBLE.finditer(plain):
        name = list(STUMBLES)[int(match.lastgroup[1:])] if match.lastgroup else ""
        around = " ".join(plain[max(0, match.start() - 60) : match.end() + 60].split())
        yield Stumble(text.path, text.line + plain[: match.start()].count("\n"), name, around)


def files_under(*places: str) -> list[Path]:
    """Tracked files under the places, of the whole tree's prose if none is given."""
    asked = list(places) or ["l2l_core", "workbench", "notebooks", "docs", "examples", "*.md"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *asked]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).is_file() and name != "LICENSE"]


def main() -> int:
    found = [s for path in files_under(*sys.argv[1:]) for text in texts_of(path) for s in stumbles_of(text)]
    for stumble in found:
        print(f"{stumble.path.relative_to(ROOT)}:{stumble.line}: {stumble.pattern}: {stumble.sentence}")
    print(len(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
