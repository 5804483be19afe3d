"""What this machine and environment can do: `python -m workbench doctor`.

`gather` looks (the only part that touches the machine), `diagnose` judges what was seen, `format_rows` prints it.
The ranges are those of pyproject.toml and the tested versions those of constraints.txt; nothing is written twice.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from workbench.commands.import_time import MOST_S, ImportTimes, measure_imports
from workbench.extras import INSTALL

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "l2l-workbench"
NOTEBOOK = {"ipykernel", "ipywidgets", "jupyterlab"}  # without any of them only the engine was installed
GIB = 2**30
BYTES_PER_PARAM = 16  # float32 weight, gradient and AdamW's two moments, all in host memory
LOW_RAM_BYTES = 4 * GIB
LOW_DISK_BYTES = 2 * GIB
WIDGET_MANAGER = Path("@jupyter-widgets", "jupyterlab-manager", "package.json")

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """One check: what was looked at, what was found, how it stands, and one line of advice."""

    check: str
    found: str
    status: Status
    advice: str


@dataclass(frozen=True)
class RequiredPackage:
    """A required distribution: its range, and the version it was tested with (None outside a clone)."""

    name: str
    specifier: SpecifierSet
    tested: Version | None = None


@dataclass(frozen=True)
class EnvironmentFacts:
    """What `gather` saw. Sizes in bytes; None means that it could not be found out."""

    python: str
    python_range: SpecifierSet
    wanted: tuple[RequiredPackage, ...]  # by the engine
    extra: tuple[RequiredPackage, ...]  # by the notebook besides
    installed: Mapping[str, str | None]  # by the name in `wanted` or `extra`; None: not installed
    widget_manager: Path | None
    kernel: str | None  # the Python that a notebook of ours would start
    this_python: str
    torch_error: str | None  # why `import torch` failed, if it did
    cuda: str | None  # name of the device
    imports: ImportTimes | None  # None where an import fails
    ram_bytes: int | None
    free_ram_bytes: int | None
    cores: int
    free_disk_bytes: int


# What is wanted ------------------------------------------------------------------------------------------------------


def read_project(root: Path) -> tuple[SpecifierSet, list[Requirement], list[Requirement]]:
    """Read the range of Python versions, the engine's dependencies, and those of the extra `workbench`.

    They come from pyproject.toml in a clone, else from the installed package.
    """
    pyproject = root / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        lines = project["dependencies"], project["optional-dependencies"]["workbench"]
        return SpecifierSet(project["requires-python"]), *([Requirement(line) for line in each] for each in lines)
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    engine = [each for each in requirements if each.marker is None]
    extra = [each for each in requirements if each.marker is not None and each.marker.evaluate({"extra": "workbench"})]
    return SpecifierSet(metadata["Requires-Python"]), engine, extra


def read_pins(constraints: Path) -> dict[str, Version]:
    """Read the tested versions by canonical name; empty where there is no such file."""
    if not constraints.is_file():
        return {}
    pins = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in pins}


# Looking -------------------------------------------------------------------------------------------------------------


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_widget_manager() -> Path | None:
    """Find the JupyterLab extension that draws ipywidgets, wherever this Python's Jupyter looks for extensions."""
    try:
        from jupyter_core.paths import jupyter_path
    except ModuleNotFoundError:
        return None
    places = (Path(folder) / WIDGET_MANAGER for folder in jupyter_path("labextensions"))
    return next((place for place in places if place.is_file()), None)


def find_kernel() -> str | None:
    """Find the Python that Jupyter starts for the kernel `python3`; None if there is no such kernel."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ModuleNotFoundError:
        return None
    try:
        command = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except (NoSuchKernel, IndexError):
        return None
    return sys.executable if re.fullmatch(r"python(3(\.\d+)?)?", command) else command


def probe_torch() -> tuple[str | None, str | None]:
    """Return (why torch does not import, name of the CUDA device), each None if there is nothing to say."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a broken installation
        return str(error), None
    return None, torch.cuda.get_device_name() if torch.cuda.is_available() else None


def look_at_imports() -> ImportTimes | None:
    """Measure what the imports of torch and of the engine take; None where one of them fails."""
    try:
        return measure_imports()
    except RuntimeError:
        return None


def probe_ram() -> tuple[int | None, int | None]:
    """Return (bytes of RAM, bytes available); None for both without psutil."""
    try:
        import psutil
    except ModuleNotFoundError:
        return None, None
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def count_cores() -> int:
    """Count the cores this process may use, which in a container or under taskset are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gather_facts(root: Path = ROOT) -> EnvironmentFacts:
    """Look at this environment and machine. Needs no network."""
    python_range, *requirements = read_project(root)
    pins = read_pins(root / "constraints.txt")
    wanted, extra = (
        tuple(RequiredPackage(each.name, each.specifier, pins.get(canonicalize_name(each.name))) for each in of)
        for of in requirements
    )
    torch_error, cuda = probe_torch()
    ram_bytes, free_ram_bytes = probe_ram()
    return EnvironmentFacts(
        python=platform.python_version(),
        python_range=python_range,
        wanted=wanted,
        extra=extra,
        installed={each.name: installed_version(each.name) for each in (*wanted, *extra)},
        widget_manager=find_widget_manager(),
        kernel=find_kernel(),
        this_python=sys.executable,
        torch_error=torch_error,
        cuda=cuda,
        imports=look_at_imports() if torch_error is None else None,
        ram_bytes=ram_bytes,
        free_ram_bytes=free_ram_bytes,
        cores=count_cores(),
        free_disk_bytes=shutil.disk_usage(root).free,
    )


# Judging -------------------------------------------------------------------------------------------------------------


def check_python(version: str, wanted: SpecifierSet) -> CheckResult:
    """Judge the version of Python by the range that is wanted."""
    if wanted.contains(version, prereleases=True):
        return CheckResult("Python", version, "ok", f"in {wanted}")
    return CheckResult("Python", version, "fail", f"needs {wanted}: rm -r .venv, then make setup PYTHON=python3.11")


def check_version(wanted: RequiredPackage, installed: str | None) -> CheckResult:
    """Judge one distribution: missing or out of range fails; another version than the tested one gets a note."""
    pinned = "" if wanted.tested is None else "-c constraints.txt "  # there in a clone
    remedy = f"pip install {pinned}'{wanted.name}{wanted.specifier}'"
    if installed is None:
        return CheckResult(wanted.name, "missing", "fail", f"run `make setup`, or: {remedy}" if pinned else remedy)
    if not wanted.specifier.contains(installed, prereleases=True):
        return CheckResult(wanted.name, installed, "fail", f"out of range: {remedy}")
    # the public part, because torch 2.13.0 and 2.13.0+cpu are the same code
    if wanted.tested is not None and Version(installed).public != wanted.tested.public:
        return CheckResult(
            wanted.name, installed, "note", f"in range, but tested with {wanted.tested}; `make setup` has that"
        )
    return CheckResult(wanted.name, installed, "ok", f"in {wanted.specifier or 'any version'}")


def judge_notebook(facts: EnvironmentFacts) -> list[CheckResult]:
    """Judge the packages of the notebook, its kernel and its widgets; one row if only the engine was installed."""
    if all(facts.installed[wanted.name] is None for wanted in facts.extra if wanted.name in NOTEBOOK):
        return [
            CheckResult("notebook", "not installed", "note", f"the engine runs without it; to install it: {INSTALL}")
        ]
    return [
        *(check_version(wanted, facts.installed[wanted.name]) for wanted in facts.extra),
        check_kernel(facts.kernel, facts.this_python),
        check_widgets(facts.widget_manager),
    ]


def check_widgets(manager: Path | None) -> CheckResult:
    """Judge whether JupyterLab can draw the panels."""
    if manager is None:
        return CheckResult(
            "widget manager", "missing", "fail", "panels would show as text: pip install jupyterlab_widgets"
        )
    return CheckResult(
        "widget manager", "present", "ok", "JupyterLab draws the panels; reload open pages after an upgrade"
    )


def check_kernel(kernel: str | None, this_python: str) -> CheckResult:
    """Judge the kernel: one that was registered for another environment hides the one of this environment."""
    remedy = f"{this_python} -m ipykernel install --sys-prefix"
    if kernel is None:
        return CheckResult("kernel", "missing", "fail", f"notebooks could not start: {remedy}")
    if os.path.abspath(kernel) != os.path.abspath(this_python):
        return CheckResult(
            "kernel", kernel, "note", f"notebooks start another Python: jupyter kernelspec remove python3, or {remedy}"
        )
    return CheckResult("kernel", "python3", "ok", "notebooks start this Python")


def check_device(torch_error: str | None, cuda: str | None) -> CheckResult:
    """Judge where relays would run: on a CUDA device, or on the emulated one."""
    if torch_error is not None:
        reason = torch_error.splitlines()[0] if torch_error else "no reason given"
        return CheckResult("device", "none", "fail", f"torch does not import ({reason}): rm -r .venv, then make setup")
    if cuda is None:
        return CheckResult(
            "device", "CPU", "note", "no CUDA: relays run on the emulated device, which computes for real"
        )
    return CheckResult("device", cuda, "ok", "device='auto' uses it; device='cpu' still emulates")


def judge_imports(imports: ImportTimes) -> CheckResult:
    """Judge the seconds of imports, and whether the engine imports packages of the notebook."""
    if imports.heavy:
        advice = f"l2l_core imported {' and '.join(imports.heavy)}, which it should not: please report it"
        return CheckResult("import", str(imports), "note", advice)
    if imports.added_s > MOST_S:
        advice = f"l2l_core adds {imports.added_s:.2f} s of processor time to torch, more than {MOST_S} s: on a slow machine only"
        return CheckResult("import", str(imports), "note", advice)
    advice = f"l2l_core adds {imports.added_s:.2f} s of processor time, and imports neither transformers nor IPython"
    return CheckResult("import", str(imports), "ok", advice)


def check_ram(total_bytes: int | None, free_bytes: int | None) -> CheckResult:
    """Judge the free memory, and say how many parameters it has room for."""
    if total_bytes is None or free_bytes is None:
        return CheckResult("RAM", "unknown", "note", "psutil, which would tell, is missing: run `make setup`")
    found = f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free"
    room = f"room for {free_bytes / BYTES_PER_PARAM / 1e9:.2f} G parameters at {BYTES_PER_PARAM} bytes (float32, AdamW)"
    if free_bytes < LOW_RAM_BYTES:
        return CheckResult("RAM", found, "note", f"{room}: close other kernels, or choose a smaller model")
    return CheckResult("RAM", found, "ok", room)


def check_cores(cores: int) -> CheckResult:
    """Judge whether copies and updates can run beside compute."""
    if cores == 1:
        return CheckResult(
            "cores", "1", "note", "copies, updates and compute share it: measured overlap means little here"
        )
    return CheckResult("cores", str(cores), "ok", "copies and updates can run beside compute")


def check_disk(free_bytes: int) -> CheckResult:
    """Judge the room on the disk that the repository is on."""
    found = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes < LOW_DISK_BYTES:
        advice = f"a saved relay takes 12 bytes per parameter (AdamW): keep {LOW_DISK_BYTES // GIB} GiB free"
        return CheckResult("disk", found, "note", advice)
    return CheckResult("disk", found, "ok", "enough for saved relays and reports")


def diagnose(facts: EnvironmentFacts) -> list[CheckResult]:
    """Judge what was seen: the same facts always give the same rows, each with one line of advice."""
    return [
        check_python(facts.python, facts.python_range),
        *(check_version(wanted, facts.installed[wanted.name]) for wanted in facts.wanted),
        *judge_notebook(facts),
        check_device(facts.torch_error, facts.cuda),
        *([judge_imports(facts.imports)] if facts.imports is not None else []),
        check_ram(facts.ram_bytes, facts.free_ram_bytes),
        check_cores(facts.cores),
        check_disk(facts.free_disk_bytes),
    ]


# Printing ------------------------------------------------------------------------------------------------------------


def format_rows(rows: Iterable[CheckResult]) -> str:
    """Write the rows as a table of plain text, one line each."""
    cells = [(row.status, row.check, row.found, row.advice) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[3]]) for line in cells)


def main() -> int:
    """Print the rows; return 1 if something required is missing or out of range, else 0."""
    rows = diagnose(gather_facts())
    print(format_rows(rows))
    failed = [row.check for row in rows if row.status == "fail"]
    print(f"\n{sys.executable}: {'needs ' + ', '.join(failed) if failed else 'ready'}")
    return 1 if failed else 0
