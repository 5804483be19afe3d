"""The repository agrees with itself: dependencies and pins, commands, the direction of imports, what files may hold."""

import ast
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import l2l_core
from workbench.commands.lab_launcher import lab_command, open_copies

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "l2l_core"

# Dependencies and pins -----------------------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def environment() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def requirements() -> list[Requirement]:
    """Every dependency of the project, those of its extras included."""
    lines = [*project()["dependencies"]]
    for extra in project()["optional-dependencies"].values():
        lines += extra
    every = [Requirement(line) for line in lines]
    return [each for each in every if each.name != project()["name"]]  # an extra may hold another one


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    """Version by canonical name; a line that is no exact pin fails here."""
    matches = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.!]*)", line) for line in constraint_lines()]
    loose = [line for line, match in zip(constraint_lines(), matches, strict=True) if match is None]
    assert not loose, f"constraints.txt: not of the form name==version: {loose}"
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def test_constraints_name_each_package_once() -> None:
    assert len(pins()) == len(constraint_lines())


@pytest.mark.all_cases
@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_dependency_has_a_pin_in_its_range(requirement: Requirement) -> None:
    pin = pins().get(canonicalize_name(requirement.name))
    assert pin is not None, f"add {requirement.name}==<tested version> to constraints.txt"
    assert requirement.specifier, f"{requirement.name} has no lower bound in pyproject.toml"
    assert requirement.specifier.contains(pin), f"{requirement} and {requirement.name}=={pin} disagree"


def test_torch_is_pinned_without_a_local_version() -> None:
    # with +cpu in it, the pin could be met only where that one wheel is offered
    assert pins()["torch"] == "2.13.0"


def test_ipykernel_stays_in_the_range_that_works_with_threads() -> None:
    (ipykernel,) = (each for each in requirements() if each.name == "ipykernel")
    assert ipykernel.specifier == SpecifierSet(">=7.1,<8")


def test_only_the_engine_is_installed_without_an_extra() -> None:
    names = {Requirement(line).name for line in project()["dependencies"]}
    assert names == {"torch", "greenlet", "safetensors", "numpy", "psutil", "tqdm", "packaging"}
    extras = project()["optional-dependencies"]
    assert "l2l-workbench[workbench]" in extras["test"], "make setup installs everything that demo, lab and tests need"
    assert {"transformers", "jupyterlab", "ipywidgets"} <= {Requirement(line).name for line in extras["workbench"]}
    head = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[0]
    assert {*head.partition("[")[2].partition("]")[0].split(",")} == {*extras}


def test_environment_file_points_at_the_other_two() -> None:
    (pip,) = (each["pip"] for each in environment()["dependencies"] if isinstance(each, dict))
    assert pip == ["-c constraints.txt", "-e .[test]"]
    assert "test" in project()["optional-dependencies"]
    assert environment()["name"] == project()["name"]
    assert environment()["channels"] == ["conda-forge"]


def test_environment_python_is_allowed_by_the_project() -> None:
    names = [each for each in environment()["dependencies"] if isinstance(each, str)]
    (python,) = (name for name in names if name.startswith("python="))
    assert SpecifierSet(project()["requires-python"]).contains(python.removeprefix("python="))
    assert set(names) == {python, "pip"}, "conda brings Python and pip only; the rest belongs in pyproject.toml"


# Commands ------------------------------------------------------------------------------------------------------------


# They set up what they need
TARGETS = "setup demo lab test test-fast bench bench-card gpu-day notebooks docs doctor".split()


def test_make_alone_lists_every_target() -> None:
    shown = subprocess.run(["make", "-s", "-C", ROOT], capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^  make ([\w-]+)", shown, flags=re.MULTILINE)
    assert targets == ["help", *TARGETS, "clean"]


def test_setup_runs_again_when_dependencies_change() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^\.venv/\.stamp: pyproject\.toml constraints\.txt$", makefile, flags=re.MULTILINE)
    for target in TARGETS:
        assert re.search(rf"^{target}: \.venv/\.stamp\b", makefile, flags=re.MULTILINE), target


def test_readme_starts_with_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40]
    for command in ("make demo", "make test"):
        assert any(line.startswith(command) for line in first_screen), f"README.md: {command} is not in 40 lines"


def test_ci_runs_the_tests_and_passes_their_status_on() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec make test"


def test_lab_listens_here_only_and_keeps_its_token() -> None:
    command = lab_command(ROOT, "notebooks", port=9999)
    assert command[0] == sys.executable
    assert "--ServerApp.ip=127.0.0.1" in command and "--ServerApp.port=9999" in command
    options = [word for word in command if word.startswith("--")]
    assert not any("token" in option or "password" in option or option == "--allow-root" for option in options)


def test_lab_opens_copies_that_keep_what_the_user_changes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run this from a clone"):
        open_copies(tmp_path)
    folder, copies = tmp_path / "notebooks", tmp_path / "out" / "notebooks"
    folder.mkdir()
    assert open_copies(tmp_path) == "out/notebooks"
    for name in ("00_start_here.ipynb", "01.ipynb"):
        (folder / name).write_text("[docs](../docs/LOG.md)", encoding="utf-8")
    assert open_copies(tmp_path) == "out/notebooks/00_start_here.ipynb"
    assert (copies / "01.ipynb").read_text(encoding="utf-8") == "[docs](../../docs/LOG.md)"
    (copies / "01.ipynb").write_text("mine", encoding="utf-8")
    for name in ("00_start_here.ipynb", "01.ipynb"):
        (folder / name).write_text("newer", encoding="utf-8")
    open_copies(tmp_path)
    assert [(copies / name).read_text(encoding="utf-8") for name in ("00_start_here.ipynb", "01.ipynb")] == [
        "newer",
        "mine",
    ]


# Imports of the engine -----------------------------------------------------------------------------------------------

ALLOWED_IN_CORE = {"psutil", "l2l_core", "torch", "greenlet", "safetensors", "numpy"} | sys.stdlib_module_names

# Modules of `integrations`, and the libraries that each of them imports
FRAMEWORKS = {
    **{f"l2l_core.integrations.{name}": {"lightning", "torchmetrics"} for name in ("lightning", "lightning_module")},
    "l2l_core.integrations.pretrained": {"peft", "transformers"},
    "l2l_core.integrations.trainer_arguments": {"transformers"},
    "l2l_core.integrations.transformers_trainer": {"accelerate", "transformers"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def core_files() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(CORE.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(node: ast.AST, *, typing: bool, late: bool = True) -> Iterator[ast.Import | ast.ImportFrom]:
    """`node` and what is below it; imports for annotations alone only when `typing`, those in functions only when `late`."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not late:
        return
    skip_body = is_type_checking(node) and not typing
    for child in node.orelse if skip_body else ast.iter_child_nodes(node):
        yield from import_nodes(child, typing=typing, late=late)


@cache
def imports_in(path: Path, *, typing: bool, late: bool = True) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """A file's `import_nodes`; several tests ask for them."""
    return tuple(import_nodes(ast.parse(path.read_text(encoding="utf-8")), typing=typing, late=late))


def imported(path: Path, modules: set[str], *, typing: bool = True, late: bool = True) -> set[str]:
    """Absolute names that a file imports; `from package import x` is `package.x` if that is a module."""
    package = module_name(path).split(".")[: None if path.name == "__init__.py" else -1]
    names = set()
    for node in imports_in(path, typing=typing, late=late):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            continue
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        names |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names}
    return names


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_core_imports_only_what_it_may() -> None:
    files = core_files()
    strays = {
        f"{name} imports {other}"
        for name, path in files.items()
        for other in imported(path, set(files))
        if other.partition(".")[0] not in ALLOWED_IN_CORE | FRAMEWORKS.get(name, set())
    }
    assert not strays, sorted(strays)


# Which room may import which, imports for annotations included. Rooms come in the order in which they build on one another.
# All may import `_torch`, the private names of PyTorch (tests/test_torch_names.py).
MAY_IMPORT = {
    "l2l_core": {
        "_torch": "",
        "schedule_rules": "",
        "rounding": "",
        "optim": "rounding",
        "plan": "",
        "trace": "plan",
        "config": "plan trace",
        "pipelines": "trace",
        "analysis": "trace schedule_rules",
        "model": "",
        "batches": "model",
        "devices": "trace",
        "surgery": "model",
        "surgery.identity": "surgery model",
        "eps.blocks": "devices model",
        "eps.optimizers": "eps.blocks model",
        "eps": "eps.optimizers eps.blocks devices model rounding trace config schedule_rules",
        "step.graph": "eps.blocks model",
        "step.traffic": "step.graph eps eps.blocks devices model plan trace schedule_rules",
        "step.guards": "step.traffic step.graph eps.blocks devices model",
        "step.micro_batch": "step.guards step.traffic step.graph eps.blocks model plan",
        "step": "step.micro_batch step.guards step.traffic step.graph eps eps.optimizers eps.blocks devices batches "
        "model plan trace config schedule_rules",
        "edits": "eps eps.optimizers eps.blocks surgery.identity surgery devices batches model trace config",
        "saves": "edits eps eps.optimizers eps.blocks surgery devices model config",
        "workers": "eps eps.blocks devices batches trace config",
        "shelf": "workers saves eps eps.optimizers eps.blocks surgery devices model trace config",
        "simulator": "shelf workers eps.blocks devices plan trace config schedule_rules",
        "forecast": "simulator shelf step step.traffic eps eps.optimizers eps.blocks devices batches analysis "
        "trace config schedule_rules",
        "inside": "step.micro_batch eps.blocks batches model",
        "runner": "workers step eps eps.blocks devices batches model plan trace config",
        "trial_forwards": "runner step eps.blocks devices batches model",
        "layer_evidence": "trial_forwards runner edits step eps.blocks surgery.identity surgery model",
        "edit_check": "layer_evidence edits eps.blocks surgery",
        "step_check": "step devices config trace",
        "relay": "edit_check layer_evidence step_check trial_forwards runner shelf workers saves edits step eps eps.optimizers "
        "eps.blocks devices batches model plan trace config",
        "integrations": "relay shelf step devices batches trace config",
        "parallel": "strategies pipelines workers step.traffic devices batches model trace config",
        "strategies": "relay pipelines simulator step step.traffic step.graph eps eps.optimizers eps.blocks devices "
        "batches model trace schedule_rules config",
    },
    "workbench": {
        "readings": "",
        "session": "readings",
        "pictures": "readings session",
        "runs": "pictures readings session",
        "what_if": "pictures readings session",
        "commands": "extras runs study fit",
        "lessons": "panels pictures runs session",
        "fit": "lessons pictures",
        "pages": "",
        "ranks": "session",
        "plans": "readings session",
        "panels": "plans ranks what_if runs pictures readings session",
        "study": "panels pictures session",
        "app": "panels pictures session",
        "lab_bench": "plans panels session",
        "fit_bench": "fit panels pictures",
        "parallel_bench": "panels pictures",
        "rank_bench": "ranks panels session",
        "replay_bench": "panels pictures runs",
        "extras": "",
        "__main__": "commands extras lessons runs",
    },
}
LAZY = {"workbench", "l2l_core"}  # names of theirs are imported when they are asked for

# The engine is every room but these, which plan, compare, analyse or look; it trains without them.
OUTSIDE = {"analysis", "forecast", "inside", "integrations", "optim", "parallel", "pipelines", "strategies"}
# Files of the facade: what they import when one of their verbs is called, and for the annotations of that verb.
WHEN_CALLED = {
    "l2l_core.trace.trace": "analysis",
    "l2l_core.runner": "forecast simulator",
    "l2l_core.relay": "analysis forecast inside integrations simulator",
}


def imports_of(name: str, path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file needs; of a file of the facade those that come with its own import."""
    at_once = name in WHEN_CALLED
    return imported(path, modules, typing=not at_once, late=not at_once) & modules


def files_of(package: str) -> dict[str, Path]:
    return {module_name(path): path for path in sorted((ROOT / package).rglob("*.py"))}


def room_of(name: str, files: dict[str, Path]) -> str:
    """The room that a module is in, or the module if it is in none; a room's own `__init__` is in it."""
    path = files[name]
    inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return (inside if "." in inside else name).partition(".")[2]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_rooms_import_only_those_below(package: str) -> None:
    files = files_of(package)
    table = {room: {*others.split()} for room, others in MAY_IMPORT[package].items()}
    assert find_cycle(table) is None
    graph = {name: imports_of(name, path, {*files}) for name, path in files.items() if name != package}
    found: dict[str, set[str]] = {room: set() for room in table}
    for name, others in graph.items():
        found[room_of(name, files)] |= {room_of(other, files) for other in others} - {"", "_torch"}
    strays = {room: others - table[room] - {room} for room, others in found.items()}
    assert not any(strays.values()), {room: others for room, others in strays.items() if others}
    needless = {room: others - found[room] for room, others in table.items()}
    assert not any(needless.values()), {room: others for room, others in needless.items() if others}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_files_import_one_another_in_no_circle(package: str) -> None:
    files = files_of(package)
    graph = {name: imports_of(name, path, {*files}) for name, path in files.items() if name not in LAZY}
    doors = {name for name, path in files.items() if path.name == "__init__.py"}
    through = {
        name: {other for other in others if other not in doors or other not in parents(name)}
        for name, others in graph.items()
    }
    assert find_cycle(through) is None


def test_the_engine_imports_nothing_that_plans_compares_or_looks() -> None:
    files = files_of("l2l_core")
    engine = {name: path for name, path in files.items() if room_of(name, files) not in OUTSIDE | {""}}
    rooms = {
        name: {room_of(other, files) for other in imports_of(name, path, {*files})} for name, path in engine.items()
    }
    strays = {name: others & OUTSIDE for name, others in rooms.items() if others & OUTSIDE}
    assert len(engine) > 150 and not strays, strays
    for name, table in WHEN_CALLED.items():
        every = {room_of(other, files) for other in imported(files[name], {*files}) & {*files}}
        assert every - rooms[name] == {*table.split()}, name


# A step of a small model; prints the modules that it took.
STEP = """
import sys
import torch
from l2l_core import Relay, RelayConfig
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)))
loss = lambda outputs, batch: outputs.square().mean()
with Relay(model, device="cpu", loss=loss, config=RelayConfig(micro_batches=2, stash="host")) as relay:
    assert relay.step((torch.randn(4, 4),)).trace.events
print(*sys.modules)
"""
HEAVY = {"transformers", "datasets", "IPython", "ipywidgets", "plotly", "jinja2", "rich", "workbench"}


def test_a_step_takes_the_engine_alone() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], cwd=ROOT, capture_output=True, text=True, check=True)
    taken = {*done.stdout.split()}
    beyond = {f"l2l_core.{room}" for room in (OUTSIDE | {"simulator"})}
    assert "l2l_core.step.loop" in taken and not taken & (beyond | HEAVY), taken & (beyond | HEAVY)


def parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def test_others_come_through_the_doors() -> None:
    """What a room's files hold is imported by its own files alone; others import it from the room."""
    files = files_of("l2l_core")
    rooms = {name for name, path in files.items() if path.name == "__init__.py" and name != "l2l_core"}
    strays = []
    for name, path in {**files, **files_of("workbench")}.items():
        mine = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in imports_in(path, typing=True):
            other = node.module if isinstance(node, ast.ImportFrom) else None
            if other in {*files} - rooms and other.rpartition(".")[0] in rooms - {mine}:
                strays.append(f"{name} imports {other} past {other.rpartition('.')[0]}")
    assert len(rooms) > 12 and not strays, sorted(strays)


def test_every_room_says_what_it_is() -> None:
    for package, rooms in MAY_IMPORT.items():
        for room in rooms:
            door = ROOT / package / room.replace(".", "/") / "__init__.py"
            if door.exists() and room != "pages":
                charter = ast.get_docstring(ast.parse(door.read_text(encoding="utf-8"))) or ""
                assert "Begin reading at" in charter and ("May import" in charter or "Imports nothing" in charter), door


WIDGETS = {"ipywidgets", "IPython", "anywidget", "workbench.app"}


def test_headless_rooms_know_no_widgets_and_pictures_are_pure() -> None:
    files = files_of("workbench")
    graph = {name: imported(path, {*files}, typing=False) for name, path in files.items()}
    headless = [name for name in graph if name.split(".")[1:2] and name.split(".")[1] in HEADLESS]
    strays = {f"{name} imports {other}" for name in headless for other in graph[name] if other in WIDGETS}
    assert len(headless) > 60 and not strays, sorted(strays)
    impure = {"threading", "time", "random", "datetime", "torch"}
    drawing = {name: graph[name] & impure for name in graph if name.startswith("workbench.pictures.")}
    assert len(drawing) > 20 and not any(drawing.values()), drawing


HEADLESS = {"readings", "session", "plans", "pictures", "runs", "what_if", "commands", "fit"}


def test_only_the_eps_touches_masters() -> None:
    """Where weights are is a matter of the EPS: others ask a block, or a place."""
    others = [path for path in core_files().values() if "eps" not in path.relative_to(CORE).parts]
    touching = [str(path) for path in others if re.search(r"block\.master\b", path.read_text(encoding="utf-8"))]
    assert len(others) > 100 and not touching, touching


def test_reference_is_written_with_torch_alone() -> None:
    # the oracle must not share code with what it judges
    path = CORE / "model" / "reference.py"
    packages = {name.partition(".")[0] for name in imported(path, set(core_files()))}
    assert packages - sys.stdlib_module_names <= {"torch"}


def test_the_import_reader_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "pkg").mkdir()
    path = tmp_path / "pkg" / "a.py"
    path.write_text(
        "import os.path\n"
        "from . import b\n"
        "from .c import x\n"
        "from pkg import d, thing\n"
        "def late():\n    import e\n"
        "if TYPE_CHECKING:\n    from .f import T\nelse:\n    from .g import T\n"
    )
    modules = {"pkg", *(f"pkg.{letter}" for letter in "abcdfg")}
    runtime = {"os.path", "pkg.b", "pkg.c", "pkg.d", "pkg", "e", "pkg.g"}
    assert imported(path, modules, typing=False) == runtime
    assert imported(path, modules) == runtime | {"pkg.f"}
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


# What files may hold -------------------------------------------------------------------------------------------------

# Spelled with brackets, so that this file does not hold what it looks for.
MACHINE_PATH = r"(?<![\w.~/-])/(?:work|root|tmp|home)\b(?!-)"
REGISTRY = r"pypi[.]org|python[h]osted|npmjs[.]org|yarnpkg[.]com|anaconda[.]org|download[.]pytorch|deb[.]debian"


def committed_files() -> list[Path]:
    """Files that are, or would be, committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in files if path.is_file()]


def read_text(path: Path) -> str:
    """The text of a file; empty for a binary one."""
    data = path.read_bytes()
    return "" if b"\0" in data else data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine path", "registry host"])
def test_no_committed_file_names_a_machine_or_a_registry(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in committed_files()
        for number, line in enumerate(read_text(path).splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert not found, "\n".join(found)


FILE_NAME = r"`([\w*/.-]+\.(?:py|ipynb|md))`"
DOTTED_NAME = r"`((?:l2l_core|workbench)(?:\.\w+)+)[`(]"


def is_there(name: str) -> bool:
    """Whether a dotted name of a module, or of something in one, can be had."""
    module, _, rest = name.partition(".")
    found = importlib.import_module(module)
    for part in rest.split("."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module := f"{module}.{part}")
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_texts_name_only_what_there_is() -> None:
    paths = committed_files()
    ends = {f"/{path.relative_to(ROOT)}" for path in paths}
    found = []
    for path in paths:
        if path.suffix not in (".py", ".md"):
            continue
        text = read_text(path)
        files = {name for name in re.findall(FILE_NAME, text) if not any(fnmatch(end, f"*/{name}") for end in ends)}
        names = {name for name in re.findall(DOTTED_NAME, text) if not is_there(name)}
        found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(files | names)]
    assert not found, "\n".join(found)


def test_the_patterns_find_what_they_are_for() -> None:
    assert re.findall(FILE_NAME, "see `" + "a/b.py`, `" + "c.md`") == ["a/b.py", "c.md"]
    assert re.findall(DOTTED_NAME, "`" + "l2l_core.a.B` and `" + "workbench.edit(x)`") == [
        "l2l_core.a.B",
        "workbench.edit",
    ]
    assert is_there("l2l_core.step.loop") and is_there("l2l_core.Relay.step") and not is_there("l2l_core.loop")
    assert re.search(MACHINE_PATH, "saved in /" + "tmp/run3")
    assert re.search(MACHINE_PATH, 'open("/' + 'root/x")')
    assert not re.search(MACHINE_PATH, "https://example.org/" + "work/x, frame" + "work/tmp")
    assert re.search(REGISTRY, "https://" + "py" + "pi.org/simple")
    assert not re.search(REGISTRY, "offline_py" + "pixel")


LINK = re.compile(r"\]\(([^)\s#]*)(?:#[^)\s]*)?\)")


def documents() -> list[Path]:
    return [
        path for path in committed_files() if path.suffix in (".md", ".ipynb") and path.parent != ROOT / "docs" / "site"
    ]


def links_of(path: Path) -> list[str]:
    """Relative links of a document; those of a notebook's Markdown cells."""
    text = read_text(path)
    if path.suffix == ".ipynb":
        text = "\n".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
    return [
        name
        for name in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL))
        if name and "://" not in name
    ]


def test_links_of_documents_lead_to_files() -> None:
    links = [(path, name) for path in documents() for name in links_of(path)]
    dead = [f"{path.relative_to(ROOT)}: {name}" for path, name in links if not (path.parent / name).exists()]
    assert len(links) > 60 and not dead, dead


# Files that services read --------------------------------------------------------------------------------------------


def parsed(name: str) -> dict[str, Any]:
    """A YAML file of the repository, which holds a mapping."""
    content = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    assert isinstance(content, dict), name
    return content


def test_the_workflow_runs_ci_on_every_python_that_the_project_allows() -> None:
    job = parsed(".github/workflows/ci.yml")["jobs"]["tests"]
    pythons = job["strategy"]["matrix"]["python"]
    allowed = SpecifierSet(project()["requires-python"])
    assert pythons == [f"3.{minor}" for minor in range(8, 30) if allowed.contains(f"3.{minor}")]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    release = parsed(".github/workflows/ci.yml")["jobs"]["versions"]
    assert release["strategy"]["matrix"] == {"python": pythons, "versions": ["tested", "least", "newest"]}
    command = 'make test ARGS="-m slow tests/test_wheel.py -k ${{ matrix.versions }}"'
    tools = 'make setup && .venv/bin/python -m pip install -c constraints.txt -e ".[release]"'
    assert [step["run"] for step in release["steps"] if "run" in step] == [tools, command]
    assert release["env"] == job["env"]
    # .ci/run ends in `make test`, and the Makefile takes PYTHON from the environment.
    assert job["env"] == {"PYTHON": "python${{ matrix.python }}"}
    environ = {
        **os.environ,
        "PYTHON": "python3.12",
        "MAKEFLAGS": "",
    }  # without what a `make` around the tests was given
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert "PYTHON=python3.12 " in shown.stdout


def test_a_workflow_builds_the_site() -> None:
    job = parsed(".github/workflows/docs.yml")["jobs"]["docs"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make docs"]


def test_hooks_are_local_and_check_with_the_pinned_ruff() -> None:
    (repo,) = parsed(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repo["hooks"]}
    for name in ("ruff-format", "ruff-check"):
        assert hooks[name]["additional_dependencies"] == [f"ruff=={pins()['ruff']}"], "as in constraints.txt"


def test_the_form_for_bugs_asks_for_a_program_and_the_doctor() -> None:
    forms = {name: parsed(f".github/ISSUE_TEMPLATE/{name}.yml") for name in ("bug", "feature")}
    for form in forms.values():
        assert form["name"] and form["description"] and form["body"]
    fields = {field["id"]: field for field in forms["bug"]["body"] if "id" in field}
    assert "`python -m workbench doctor`" in fields["doctor"]["attributes"]["label"]
    assert fields["program"]["validations"]["required"] and fields["doctor"]["validations"]["required"]


def test_the_version_is_written_in_one_place_and_repeated_in_two() -> None:
    assert project()["dynamic"] == ["version"] and "version" not in project()
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert setuptools["dynamic"]["version"] == {"attr": "l2l_core.__version__"}
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[:2] == ["Unreleased", l2l_core.__version__]


def test_the_citation_names_the_project_and_the_paper() -> None:
    citation = parsed("CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["authors"]
    assert (citation["version"], citation["license"]) == (l2l_core.__version__, project()["license"])
    (paper,) = citation["references"]
    assert paper["authors"][0]["family-names"] == "Pudipeddi" and paper["year"] == 2020
    assert paper["identifiers"] == [{"type": "other", "value": "arXiv:2002.05645"}]
