"""Names in the tree: classes, files and context objects, so that a newcomer finds a thing under the name that it has."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from prose import ROOT

PACKAGES = ("l2l_core", "workbench")
FILES = {path.relative_to(ROOT).as_posix(): path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
SOURCES = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}


@cache
def trees() -> dict[str, ast.Module]:
    """Parsed once, by the first test that looks: every process that runs tests imports this file."""
    return {name: ast.parse(source) for name, source in SOURCES.items()}


# Files of 60 lines or less with one importer that stay apart, and why.
SEAMS: dict[str, str] = {
    "l2l_core/step/guards/kept_weights.py": "one file per class of failure",
    "workbench/commands/fit.py": "one file per command, imported when it is called",
    "workbench/commands/replay.py": "one file per command, imported when it is called",
    "workbench/commands/study_runner.py": "one file per command, imported when it is called",
}
SMALL = 60

# A file is called after what it holds. These are adverbs, prepositions, verb forms and adjectives that stand alone.
NO_NOUNS = """
    above ahead alike alone apart aside asleep away back before behind below beside between beyond due early here how
    inside late later meanwhile near next now off once out outside over past since so soon still then there through
    together twice under unseen until up when where with within without
    asked at_hand at_work built chosen configured done found given gone held kept known learned left lost made measured
    moved named noted owed paced parked planned read recorded ran remembered replayed said saved seen shaken shown stashed
    taken told     trained tried unread wanted watched
    add ask begin come do draw end find finish get give go hear keep know let look lose make move note pass
    put rearrange replace resume run say see show split stand start stop swap take tell try turn wait write
    alike big empty few full great late long many more new old recent same small some whole
    asking beginning coming doing ending finding getting giving going keeping knowing letting looking losing making saying
    seeing showing standing taking telling trying turning waiting
""".split()


def imports() -> dict[str, set[tuple[str, str]]]:
    """Module -> (file, name) of everything that is imported from it by name, in functions too."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    found[node.module].add((file, alias.name))
                    found[f"{node.module}.{alias.name}"].add((file, ""))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add((file, ""))
    return found


def importers_of(name: str, graph: dict[str, set[tuple[str, str]]]) -> set[str]:
    """Files that import from the file `name`, directly or through its room's door, which hands names on."""
    module = name[: -len(".py")].replace("/", ".")
    direct = graph[module]
    door = f"{name.rpartition('/')[0]}/__init__.py"
    handed_on = {symbol for file, symbol in direct if file == door}
    through = {file for file, symbol in graph[module.rpartition(".")[0]] if symbol in handed_on and file != door}
    return {file for file, _ in direct if file != door} | through


def test_no_class_name_has_two_meanings() -> None:
    """A protocol and its double may share a name within one file, and nowhere else."""
    homes: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(name)
    twice = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert len(homes) > 500 and not twice, twice


def test_no_class_name_differs_by_an_underscore_alone() -> None:
    homes = {
        node.name: name for name, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    alike = {name: (file, homes[name[1:]]) for name, file in homes.items() if name[0] == "_" and name[1:] in homes}
    apart = {name: files for name, files in alike.items() if files[0] != files[1]}
    assert not apart, apart


def test_files_are_called_after_what_they_hold() -> None:
    stray = [name for name, path in FILES.items() if path.stem in NO_NOUNS]
    # A folder does not complete a file's name: readers search for a noun, and `from_config` is none.
    stray += [name for name, path in FILES.items() if re.match(r"(?:from|of|on|in|at|to|by|with|without)_", path.stem)]
    assert not stray, stray


def test_small_files_have_more_than_one_importer() -> None:
    """A file of a few lines with a single importer belongs into that importer, unless it is a seam."""
    stray, graph = [], imports()
    for name, path in FILES.items():
        if path.stem.startswith("__") or SOURCES[name].count("\n") > SMALL or name in SEAMS:
            continue
        others = importers_of(name, graph) - {name}
        if len(others) == 1:
            stray.append(f"{name}: {SOURCES[name].count(chr(10))} lines, imported by {others.pop()} alone")
    assert not stray, stray
    assert set(SEAMS) <= set(FILES), set(SEAMS) - set(FILES)


def test_context_objects_have_one_name() -> None:
    """A parameter or attribute that holds a `StepContext` is `ctx`."""
    stray = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.arg)
                and node.annotation
                and ast.unparse(node.annotation).strip("\"'") == "StepContext"
            ):
                stray += [] if node.arg in ("ctx", "_ctx") else [f"{name}:{node.lineno}: {node.arg}"]
    assert "class StepContext" in "".join(SOURCES.values()) and not stray, stray


def test_public_names_are_those_of_the_readme() -> None:
    """Every name that the README imports is there."""
    import l2l_core
    import workbench

    readme = Path(ROOT / "README.md").read_text(encoding="utf-8")
    for package in (l2l_core, workbench):
        lines = re.findall(rf"^from {package.__name__} import (.+)$", readme, re.MULTILINE)
        names = [name.strip() for line in lines for name in line.split(",")]
        assert names or package is workbench
        assert not [name for name in names if not hasattr(package, name)]
