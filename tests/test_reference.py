"""The API reference: every public name is explained and listed, and the examples in docstrings run as they stand."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "site" / "reference"
LATE_PACKAGES = ("l2l_core", "workbench")  # they import most names on first use
PACKAGES = (*LATE_PACKAGES, "l2l_core.strategies", "l2l_core.pipelines", "l2l_core.parallel", "l2l_core.integrations")
OPTIONAL = {"accelerate", "lightning", "torchmetrics"}  # of an extra, which need not be installed


def public_names(package: str) -> list[str]:
    """Names that the package's `__init__.py` imports as themselves, for users or for type checkers."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return sorted(alias.name for node in imports for alias in node.names if alias.asname == alias.name)


def public_objects() -> dict[str, Any]:
    """The public names that can be imported here, by where they are imported from."""
    objects: dict[str, Any] = {}
    for package, name in ((each, name) for each in PACKAGES for name in public_names(each)):
        try:
            objects[f"{package}.{name}"] = getattr(importlib.import_module(package), name)
        except ModuleNotFoundError as error:
            if package != "l2l_core.integrations" or error.name not in OPTIONAL:
                raise
    return objects


@pytest.mark.parametrize("package", LATE_PACKAGES)
def test_a_public_name_is_imported_for_type_checkers_too(package: str) -> None:
    module = importlib.import_module(package)
    late = {*getattr(module, "_LATE", ()), *getattr(module, "_MODULE_OF", ())}
    assert len(late) > 10 and late <= {*public_names(package)}


def test_every_public_name_stands_in_the_reference_once() -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.rst"))]
    listed = [name for page in pages for name in re.findall(r"^\.\. (?:auto\w+|data):: (\S+)$", page, re.MULTILINE)]
    assert sorted(listed) == sorted(f"{each}.{name}" for each in PACKAGES for name in public_names(each))


def test_every_document_and_notebook_stands_in_the_contents_of_the_site() -> None:
    """Sphinx warns of others, and warnings are errors there; it is not installed for the tests."""
    index = (ROOT / "docs" / "site" / "index.md").read_text(encoding="utf-8").splitlines()
    shown = [path for pattern in ("docs/*.md", "notebooks/*.ipynb") for path in ROOT.glob(pattern)]
    missing = [path.name for path in shown if path.relative_to(ROOT).with_suffix("").as_posix() not in index]
    assert len(shown) > 20 and not missing, missing


def test_every_public_name_has_a_docstring() -> None:
    bare = [name for name, value in public_objects().items() if not (value.__doc__ or "").strip()]
    assert not bare, bare


def texts_of_data() -> dict[str, str]:
    """Texts on the pages of public values that are neither classes nor functions, so that their docstrings are Python's."""
    pages = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.rst")))
    return dict(re.findall(r"^\.\. data:: (\S+)\n((?:(?: {3}.*)?\n)*)", pages, re.MULTILINE))


def texts_of_integrations() -> dict[str, str]:
    """Docstrings as they stand in the files, since the frameworks need not be installed."""
    texts = {}
    imports = ast.walk(ast.parse((ROOT / "l2l_core" / "integrations" / "__init__.py").read_text(encoding="utf-8")))
    for node in (each for each in imports if isinstance(each, ast.ImportFrom) and each.module.startswith("l2l_core.")):
        file = ast.parse((ROOT / f"{node.module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        defined = {each.name: each for each in file.body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
        texts |= {f"l2l_core.integrations.{each.name}": ast.get_docstring(defined[each.name]) for each in node.names}
    return texts


def examples() -> dict[str, doctest.DocTest]:
    """Examples of public names and their methods."""
    finder, parser = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestParser()
    every = {name: parser.get_doctest(text, {}, name, None, 0) for name, text in texts_of_data().items()}
    for name, value in public_objects().items():
        module = importlib.import_module(getattr(value, "__module__", "builtins"))
        every |= {test.name: test for test in finder.find(value, name, module=module, globs={}) if test.examples}
    return {name: test for name, test in every.items() if test.examples}


EXAMPLES = examples()


def test_every_public_name_has_an_example_or_the_name_of_one() -> None:
    """Where a function returns a type, or raises an error, its example may be theirs: "See `run_pipeline`"."""
    texts = {name: str(value.__doc__) for name, value in public_objects().items()}
    texts |= {**texts_of_data(), **texts_of_integrations()}
    with_examples = {*EXAMPLES, *(name for name, text in texts.items() if ">>>" in text)}
    bare = []
    for name, text in texts.items():
        link = re.search(r"Example:?\n\s+See `([\w.]+)`", text)
        shown = link and any(each.endswith(f".{link[1]}") for each in with_examples)
        if name not in with_examples and not shown:
            bare.append(name)
    assert len(texts) > 180 and not bare, bare


# Names that people use most. Their examples always run; of the others one runs by default, and all with `-m slow`.
VERBS = "step verify forward evaluate probe plan forecast apply undo fork switch save load".split()
NAMES = "Relay RelayConfig Insert Duplicate Drop Swap Move Freeze Depth EmulatedDevice find_layers simulate".split()
COMMON = [*(f"l2l_core.{name}" for name in NAMES), *(f"l2l_core.Relay.{verb}" for verb in VERBS), "workbench.Study"]


def failures_of(name: str) -> str:
    """Run an example after the lines with which all of them begin; return what differs from what it states."""
    source = (PAGES / "example_setup.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "example_setup.py", "exec"), names)
    relay, test, said = names["relay"], EXAMPLES[name], []
    test.globs = names
    with relay:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).attempted > 0
    return "".join(said)


@pytest.mark.all_cases
@pytest.mark.parametrize("name", COMMON)
def test_an_example_of_a_common_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not failures_of(name)


FRAMEWORKS = pytest.mark.filterwarnings("ignore")  # they warn of settings that an example need not have
OTHERS = [
    pytest.param(name, marks=[FRAMEWORKS] if name.startswith("l2l_core.integrations.") else [])
    for name in sorted({*EXAMPLES} - {*COMMON})
]


@pytest.mark.parametrize("name", OTHERS)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not failures_of(name)
