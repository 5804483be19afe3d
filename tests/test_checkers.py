"""ruff and basedpyright find nothing, and few of their findings are silenced, each with a reason."""

import os
import re
import subprocess
import sys

import pytest
from prose import ROOT

MOST_SILENCED = 20
_SILENCED = re.compile(r"#\s*(?:type|pyright):\s*ignore(?P<rules>\[[\w\-, ]+\])?(?P<reason>.*)")


@pytest.mark.parametrize("arguments", [("ruff", "check", "."), ("ruff", "format", "--check", ".")])
def test_ruff_finds_nothing(arguments: tuple[str, ...]) -> None:
    run = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr


def test_basedpyright_finds_nothing() -> None:
    """With the settings of pyproject.toml: basic everywhere, strict where the algorithm and its records stand."""
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable]
    environment = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=64"}  # MB; collects young objects less often
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr


def test_few_findings_are_silenced_and_each_with_a_reason() -> None:
    silenced, bare = [], []
    for package in ("l2l_core", "workbench"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if found := _SILENCED.search(line):
                    silenced.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
                    if not found["rules"] or len(found["reason"].strip(" #-–")) < 8:
                        bare.append(silenced[-1])
    assert len(silenced) <= MOST_SILENCED, "\n".join(silenced)
    assert not bare, "\n".join(["a rule in brackets and a reason behind it are missing:", *bare])
    assert all((ROOT / package / "py.typed").is_file() for package in ("l2l_core", "workbench"))
