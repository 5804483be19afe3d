"""The wheel in an empty environment: the engine trains with its own dependencies alone, and gives the notebooks away.

Slow: installs torch anew, in the version of constraints.txt, from the index or the links that pip is configured with.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment in which the wheel was installed, and nothing but its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    for name in listed.stdout.split("\0"):  # a copy: setuptools takes up what earlier builds left in build/
        if name and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source"], folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "environment", with_pip=False)
    python = folder / "environment" / "bin" / "python"
    pip += ["--python", str(python)]
    installed = run([*pip, "install", "--no-compile", "-c", ROOT / "constraints.txt", wheel], folder)
    if "No matching distribution" in installed.stderr or "Could not fetch" in installed.stderr:
        pytest.skip(f"pip finds no dependencies here: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    return python


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
