"""A release: what its two files hold, and that the wheel trains in an empty environment.

Slow: installs torch anew from the index or the links that pip is configured with, in the version of constraints.txt, and for
`test_sets_of_versions` in the least and the newest, which for some indexes are builds of several GB.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import l2l_core

for tool in ("build", "twine"):
    pytest.importorskip(tool, reason=f"{tool} is not installed: the extra release")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
NOT_OF_THE_ENGINE = ("transformers", "datasets", "IPython", "ipywidgets", "jupyterlab", "plotly")

# Prints the loss of a step, where the engine came from, and what else can be imported.
STEP = f"""
import importlib.util
import torch
import l2l_core
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)))
config = l2l_core.RelayConfig(micro_batches=2, stash="host")
with l2l_core.Relay(model, device="cpu", loss=lambda outputs, batch: outputs.square().mean(), config=config) as relay:
    assert relay.verify((torch.randn(4, 4),)).equal
    print(relay.step((torch.randn(4, 4),)).loss)
print(l2l_core.__file__)
print(*(name for name in {NOT_OF_THE_ENGINE} if importlib.util.find_spec(name)))
"""


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may name the repository
    return subprocess.run([*map(str, command)], cwd=folder, env=here, capture_output=True, text=True)


def committed(*folders: str) -> set[str]:
    """Files that are, or would be, committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    listed = run(command, ROOT)
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("release")
    for name in committed():  # a copy: setuptools takes up what earlier builds left in build/
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "source" / name)
    built = run([sys.executable, "-m", "build", "--no-isolation", folder / "source"], folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (sdist,), (wheel,) = ((folder / "source" / "dist").glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    return sdist, wheel


def install(python: Path, *what: str | Path) -> None:
    """Install into an environment without a pip of its own."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    installed = run([*pip, "install", "--no-compile", *what], python.parents[2])
    if "No matching distribution" in installed.stderr or "Could not fetch" in installed.stderr:
        pytest.skip(f"pip finds no dependencies here: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr


def empty_environment(folder: Path) -> Path:
    """Python of a new environment."""
    venv.create(folder / "environment", with_pip=False)
    return folder / "environment" / "bin" / "python"


@pytest.fixture(scope="module")
def python(release: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment in which the wheel was installed, and nothing but its dependencies."""
    python = empty_environment(tmp_path_factory.mktemp("wheel"))
    install(python, "-c", ROOT / "constraints.txt", release[1])
    return python


def test_twine_finds_nothing_to_correct(release: tuple[Path, Path], tmp_path: Path) -> None:
    checked = run([sys.executable, "-m", "twine", "check", "--strict", *release], tmp_path)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout + checked.stderr


def test_the_source_distribution_holds_what_the_wheel_is_made_of(release: tuple[Path, Path]) -> None:
    with tarfile.open(release[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {name for name in names if name.startswith("l2l_workbench.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    beside = {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "constraints.txt",
        "pyproject.toml",
        "MANIFEST.in",
    }
    assert names - made == committed("l2l_core", "workbench", "notebooks") | beside
    assert release[0].name == f"l2l_workbench-{l2l_core.__version__}.tar.gz"


def test_the_wheel_holds_both_packages_and_the_notebooks(release: tuple[Path, Path]) -> None:
    names = set(ZipFile(release[1]).namelist())
    data = f"l2l_workbench-{l2l_core.__version__}.data/data/share/l2l-workbench/"
    notebooks = {f"{data}{name}" for name in committed("notebooks")}
    about = {name for name in names if name.startswith(f"l2l_workbench-{l2l_core.__version__}.dist-info/")}
    assert names - about == committed("l2l_core", "workbench") | notebooks


def test_the_engine_trains_with_its_own_dependencies_alone(
    python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run([python, "-c", STEP], tmp_path)
    assert done.returncode == 0, done.stderr
    loss, where, others = done.stdout.split("\n")[:3]
    assert float(loss) > 0 and Path(where).is_relative_to(python.parents[1]) and not others
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    sizes = {path.name: size_of(path) for path in packages.iterdir()}
    largest = ", ".join(
        f"{name} {size / 1e6:.0f} MB" for name, size in sorted(sizes.items(), key=lambda each: -each[1])[:4]
    )
    with capsys.disabled():
        print(f"\nthe engine and its dependencies: {sum(sizes.values()) / 1e6:.0f} MB ({largest})")


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in [path, *path.rglob("*")] if each.is_file())


def test_the_doctor_is_content_and_says_how_to_install_the_notebook(python: Path, tmp_path: Path) -> None:
    done = run([python, "-m", "workbench", "doctor"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("note  notebook"))
    assert row.endswith('pip install "l2l-workbench[workbench]"')
    done = run([python, "-m", "workbench", "lab"], tmp_path)
    assert done.returncode == 1 and 'pip install "l2l-workbench[workbench]"' in done.stderr


def test_notebooks_are_copied_from_the_wheel(python: Path, tmp_path: Path) -> None:
    done = run([python, "-m", "workbench", "notebooks", "--to", "lesson"], tmp_path)
    assert done.returncode == 0, done.stderr
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert (tmp_path / "lesson" / path.name).read_bytes() == path.read_bytes()
    again = run([python, "-m", "workbench", "notebooks", "--to", "lesson"], tmp_path)
    assert again.returncode == 1 and "nothing was copied" in again.stderr


# Sets of versions: those of constraints.txt, the least that pyproject.toml allows, and whatever is newest today.
SETS = ["tested", "least", "newest"]


def constraints(versions: str, folder: Path) -> list[str | Path]:
    """Options of pip that choose a set of versions."""
    if versions == "newest":
        return []
    if versions == "tested":
        return ["-c", ROOT / "constraints.txt"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["workbench"]]
    least = [f"{line.name}=={bound.version}" for line in lines for bound in line.specifier if bound.operator == ">="]
    assert len(least) == len(lines), "every dependency has a lower bound"
    (folder / "least.txt").write_text("\n".join(least), encoding="utf-8")
    return ["-c", folder / "least.txt"]


@pytest.mark.all_cases
@pytest.mark.parametrize("versions", SETS)
def test_sets_of_versions(
    versions: str, release: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = empty_environment(tmp_path)
    chosen = constraints(versions, tmp_path)
    install(python, *chosen, release[1])
    trained = run([python, "-c", STEP], tmp_path)
    assert trained.returncode == 0, trained.stderr
    install(python, *chosen, f"{release[1]}[workbench]")
    demo = run([python, "-m", "workbench", "demo", "--quick"], tmp_path)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    shown = run(
        [
            python,
            "-c",
            f"import l2l_core, torch; print(l2l_core.__version__, {sys.version_info[:2]}, torch.__version__)",
        ],
        tmp_path,
    )
    assert shown.stdout.startswith(f"{l2l_core.__version__} ")
    with capsys.disabled():
        print(f"\n{versions}: {shown.stdout.strip()}")
