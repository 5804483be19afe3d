"""Sentences in the tree: plain subject, verb and object, counted by the phrases of `support/prose.py`."""

import ast
from pathlib import Path

import pytest
from prose import ROOT, STUMBLES, Text, files_under, stumbles_of, texts_of, texts_of_python

MOST = 30  # in the whole tree
LONGEST_FIRST_LINE = 20  # words

EXAMPLES = {
    "indefinite subject": "Whatever crosses is read through an entry.",
    "what as subject": "What may be missing in a recompute.",
    "there is ... that": "There is a thread that copies.",
    "of which": "Two records, of which one is committed.",
    "let ... be": "Let nothing be added there.",
    "be it": "Workers, be it one or several.",
    "of its own": "It has a thread of its own.",
    "thing that speaks": "The plan says how.",
    "thing that looks": "The check looks for names.",
    "thing that comes or goes": "The slot goes to another layer.",
}


@pytest.mark.all_cases
@pytest.mark.parametrize("pattern", STUMBLES)
def test_a_phrase_is_noticed(pattern: str) -> None:
    found = {stumble.pattern for stumble in stumbles_of(Text(Path("x.py"), 1, "docstring", EXAMPLES[pattern]))}
    assert pattern in found
    assert not list(stumbles_of(Text(Path("x.py"), 1, "docstring", f"Load a layer. `{EXAMPLES[pattern]}`")))


def test_the_tree_is_written_in_plain_english() -> None:
    found = [stumble for path in files_under() for text in texts_of(path) for stumble in stumbles_of(text)]
    lines = [f"{s.path.relative_to(ROOT)}:{s.line}: {s.pattern}: {s.sentence}" for s in found]
    assert len(found) <= MOST, "\n".join([f"{len(found)} phrases, {MOST} are allowed:", *lines[:80]])


def test_first_lines_of_docstrings_are_short() -> None:
    long = []
    for path in files_under("l2l_core", "workbench"):
        if path.suffix != ".py":
            continue
        for text in texts_of_python(path):
            first = text.text.strip().split("\n")[0]
            if text.kind == "docstring" and len(first.split()) > LONGEST_FIRST_LINE:
                long.append(f"{path.relative_to(ROOT)}:{text.line}: {len(first.split())} words")
    assert not long, "\n".join([f"{len(long)} first lines of more than {LONGEST_FIRST_LINE} words:", *long[:60]])


def test_strings_and_comments_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text('"""Doc."""\n# one\n# two\nx = f"a {1} b c d"\ny = "short"\n', encoding="utf-8")
    assert [(text.kind, text.text) for text in texts_of(path)] == [
        ("docstring", "Doc."),
        ("message", "a {} b c d"),
        ("comment", "one\ntwo"),
    ]
    assert ast.parse(path.read_text(encoding="utf-8"))


def test_documents_are_short_enough_to_be_read() -> None:
    architecture = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    glossary = (ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8").splitlines()
    entries = [line for line in glossary if line.startswith("| ") and not line.startswith(("| term", "| -"))]
    assert len(architecture) <= 250, len(architecture)
    assert 20 <= len(entries) <= 60, len(entries)
