"""Checks of this machine and environment: `python -m workbench doctor`.

`gather_facts` inspects the machine, `diagnose` turns the facts into results, `format_rows` formats them. Version ranges are
read from pyproject.toml, tested versions from constraints.txt.
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
NOTEBOOK = {"ipykernel", "ipywidgets", "jupyterlab"}  # if all are missing, only the engine was installed
GIB = 2**30
BYTES_PER_PARAM = 16  # float32 weight, gradient and AdamW's two moments, all in host memory
LOW_RAM_BYTES = 4 * GIB
LOW_DISK_BYTES = 2 * GIB
WIDGET_MANAGER = Path("@jupyter-widgets", "jupyterlab-manager", "package.json")

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: subject, finding, status, and one line of advice."""

    check: str
    found: str
    status: Status
    advice: str


@dataclass(frozen=True)
class RequiredPackage:
    """A required distribution, with its version range and its tested version (None outside a clone)."""

    name: str
    specifier: SpecifierSet
    tested: Version | None = None


@dataclass(frozen=True)
class EnvironmentFacts:
    """Facts about the environment, as input of `diagnose`. Sizes in bytes; None means unknown."""

    python: str
    python_range: SpecifierSet
    wanted: tuple[RequiredPackage, ...]  # required by the engine
    extra: tuple[RequiredPackage, ...]  # also required by the notebook
    installed: Mapping[str, str | None]  # version by distribution; None: not installed
    widget_manager: Path | None
    kernel: str | None  # the Python of the kernel `python3`
    this_python: str
    torch_error: str | None  # message of the failed `import torch`
    cuda: str | None  # name of the device
    imports: ImportTimes | None  # None if an import fails
    ram_bytes: int | None
    free_ram_bytes: int | None
    cores: int
    free_disk_bytes: int


# Requirements -----------------------------------------------------------------------------------------------------


def read_project(root: Path) -> tuple[SpecifierSet, list[Requirement], list[Requirement]]:
    """Return the range of Python versions, the engine's dependencies, and those of the extra `workbench`.

    In a clone they are read from pyproject.toml, otherwise from the installed package.
    """
    pyproject = root / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        engine = [Requirement(line) for line in project["dependencies"]]
        extra = [Requirement(line) for line in project["optional-dependencies"]["workbench"]]
        return SpecifierSet(project["requires-python"]), engine, extra
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    engine = [each for each in requirements if each.marker is None]
    extra = [each for each in requirements if each.marker is not None and each.marker.evaluate({"extra": "workbench"})]
    return SpecifierSet(metadata["Requires-Python"]), engine, extra


def read_pins(constraints: Path) -> dict[str, Version]:
    """Return the tested versions by canonical name; empty without a constraints file."""
    if not constraints.is_file():
        return {}
    pins = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in pins}


# Inspection ----------------------------------------------------------------------------------------------------------


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_widget_manager() -> Path | None:
    """Return the path of the JupyterLab extension that draws ipywidgets, from Jupyter's extension folders."""
    try:
        from jupyter_core.paths import jupyter_path
    except ModuleNotFoundError:
        return None
    paths = (Path(folder) / WIDGET_MANAGER for folder in jupyter_path("labextensions"))
    return next((path for path in paths if path.is_file()), None)


def find_kernel() -> str | None:
    """Return the Python that Jupyter starts for the kernel `python3`; None if there is no such kernel."""
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
    """Return (message of the failed import of torch, name of the CUDA device), each None if there is none."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a broken installation
        return str(error), None
    return None, torch.cuda.get_device_name() if torch.cuda.is_available() else None


def probe_imports() -> ImportTimes | None:
    """Measure the imports of torch and of the engine; return None if one of them fails."""
    try:
        return measure_imports()
    except RuntimeError:
        return None


def probe_ram() -> tuple[int | None, int | None]:
    """Return (bytes of RAM, bytes available); both None without psutil."""
    try:
        import psutil
    except ModuleNotFoundError:
        return None, None
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def count_cores() -> int:
    """Return the number of cores this process may use; a container or taskset may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gather_facts(root: Path = ROOT) -> EnvironmentFacts:
    """Gather facts about this environment and machine, without a network."""
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
        imports=probe_imports() if torch_error is None else None,
        ram_bytes=ram_bytes,
        free_ram_bytes=free_ram_bytes,
        cores=count_cores(),
        free_disk_bytes=shutil.disk_usage(root).free,
    )


# Checks --------------------------------------------------------------------------------------------------------------


def check_python(version: str, wanted: SpecifierSet) -> CheckResult:
    """Check that the version of Python is in the required range."""
    if wanted.contains(version, prereleases=True):
        return CheckResult("Python", version, "ok", f"in {wanted}")
    return CheckResult("Python", version, "fail", f"needs {wanted}: rm -r .venv, then make setup PYTHON=python3.11")


def check_version(wanted: RequiredPackage, installed: str | None) -> CheckResult:
    """Check a distribution: missing or out of range fails, a version other than the tested one gets a note."""
    pinned = "" if wanted.tested is None else "-c constraints.txt "  # the file is in a clone
    remedy = f"pip install {pinned}'{wanted.name}{wanted.specifier}'"
    if installed is None:
        return CheckResult(wanted.name, "missing", "fail", f"run `make setup`, or: {remedy}" if pinned else remedy)
    if not wanted.specifier.contains(installed, prereleases=True):
        return CheckResult(wanted.name, installed, "fail", f"out of range: {remedy}")
    # the public part is compared, because torch 2.13.0 and 2.13.0+cpu are the same code
    if wanted.tested is not None and Version(installed).public != wanted.tested.public:
        return CheckResult(
            wanted.name, installed, "note", f"in range, but tested with {wanted.tested}; `make setup` installs that"
        )
    return CheckResult(wanted.name, installed, "ok", f"in {wanted.specifier or 'any version'}")


def judge_notebook(facts: EnvironmentFacts) -> list[CheckResult]:
    """Check the notebook's packages, kernel and widgets; return one row if only the engine was installed."""
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
    """Check that JupyterLab can draw the panels."""
    if manager is None:
        return CheckResult(
            "widget manager", "missing", "fail", "panels would show as text: pip install jupyterlab_widgets"
        )
    return CheckResult(
        "widget manager", "present", "ok", "JupyterLab draws the panels; reload open pages after an upgrade"
    )


def check_kernel(kernel: str | None, this_python: str) -> CheckResult:
    """Check the kernel: one that is registered for another environment hides that of this environment."""
    remedy = f"{this_python} -m ipykernel install --sys-prefix"
    if kernel is None:
        return CheckResult("kernel", "missing", "fail", f"notebooks could not start: {remedy}")
    if os.path.abspath(kernel) != os.path.abspath(this_python):
        return CheckResult(
            "kernel", kernel, "note", f"notebooks start another Python: jupyter kernelspec remove python3, or {remedy}"
        )
    return CheckResult("kernel", "python3", "ok", "notebooks start this Python")


def check_device(torch_error: str | None, cuda: str | None) -> CheckResult:
    """Check the device of relays: a CUDA device, or the emulated one."""
    if torch_error is not None:
        reason = torch_error.splitlines()[0] if torch_error else "no reason given"
        return CheckResult("device", "none", "fail", f"torch does not import ({reason}): rm -r .venv, then make setup")
    if cuda is None:
        return CheckResult(
            "device", "CPU", "note", "no CUDA: relays run on the emulated device, which computes on the CPU"
        )
    return CheckResult("device", cuda, "ok", "device='auto' uses it; device='cpu' still emulates")


def judge_imports(imports: ImportTimes) -> CheckResult:
    """Check the seconds of imports, and that the engine imports no packages of the notebook."""
    if imports.heavy:
        advice = f"l2l_core imported {' and '.join(imports.heavy)}, which it should not: please report it"
        return CheckResult("import", str(imports), "note", advice)
    if imports.added_s > MOST_S:
        added = f"l2l_core adds {imports.added_s:.2f} s of processor time to torch"
        advice = f"{added}, more than {MOST_S} s: expected on slow machines only"
        return CheckResult("import", str(imports), "note", advice)
    advice = f"l2l_core adds {imports.added_s:.2f} s of processor time, and imports neither transformers nor IPython"
    return CheckResult("import", str(imports), "ok", advice)


def check_ram(total_bytes: int | None, free_bytes: int | None) -> CheckResult:
    """Check the free memory, and calculate the number of parameters that fit."""
    if total_bytes is None or free_bytes is None:
        return CheckResult("RAM", "unknown", "note", "psutil, which measures it, is missing: run `make setup`")
    found = f"{free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free"
    room = f"room for {free_bytes / BYTES_PER_PARAM / 1e9:.2f} G parameters at {BYTES_PER_PARAM} bytes (float32, AdamW)"
    if free_bytes < LOW_RAM_BYTES:
        return CheckResult("RAM", found, "note", f"{room}: close other kernels, or choose a smaller model")
    return CheckResult("RAM", found, "ok", room)


def check_cores(cores: int) -> CheckResult:
    """Check that copies and updates can run beside compute."""
    if cores == 1:
        return CheckResult(
            "cores", "1", "note", "copies, updates and compute share it: measured overlap means little here"
        )
    return CheckResult("cores", str(cores), "ok", "copies and updates can run beside compute")


def check_disk(free_bytes: int) -> CheckResult:
    """Check the free space on the disk of the repository."""
    found = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes < LOW_DISK_BYTES:
        advice = f"a saved relay takes 12 bytes per parameter (AdamW): keep {LOW_DISK_BYTES // GIB} GiB free"
        return CheckResult("disk", found, "note", advice)
    return CheckResult("disk", found, "ok", "enough for saved relays and reports")


def diagnose(facts: EnvironmentFacts) -> list[CheckResult]:
    """Return the results of all checks; the same facts always give the same rows."""
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
    """Format the rows as a table of plain text, one line each."""
    cells = [(row.status, row.check, row.found, row.advice) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), line[3]]) for line in cells)


def main() -> int:
    """Print the rows; return 1 if a requirement is missing or out of range, else 0."""
    rows = diagnose(gather_facts())
    print(format_rows(rows))
    failed = [row.check for row in rows if row.status == "fail"]
    print(f"\n{sys.executable}: {'needs ' + ', '.join(failed) if failed else 'ready'}")
    return 1 if failed else 0
