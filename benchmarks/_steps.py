"""Benchmarks run one after another as commands, with a time limit each, resumed where the last run ended.

A step runs in a folder of its own under `out`, so that what it reports there is its record. Its outcome is kept as JSON beside
it. A step that ended well on the same machine with the same versions is not run again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _common import hardware, load

import l2l_core

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transformers", "numpy", "greenlet", "safetensors")


@dataclass(frozen=True)
class Step:
    """A command of Python's, relative to the repository.

    Attributes:
        name: names the folder of its results.
        command: arguments of the interpreter.
        limit_s: seconds after which it is ended, with its children.
        settings: environment variables that it gets besides.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    settings: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        before = [f"{name}={value}" for name, value in self.settings.items()]
        return " ".join([*before, "python", *self.command])


@dataclass(frozen=True)
class Outcome:
    """A step that ended.

    Attributes:
        ended: "well", "with status 2" or "after the limit of 60 s".
        load: processes that wanted to run, at its begin and at its end.
        record: what it reported; None if it did not.
        tail: the last lines that it printed.
    """

    command: str
    machine: dict[str, str]
    ended: str
    seconds: float
    load: tuple[float, float]
    record: dict[str, Any] | None
    tail: list[str]


def machine() -> dict[str, str]:
    """Hardware and versions: figures of different ones are not compared."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return {
        "hardware": hardware(),
        "versions": f"l2l_core {l2l_core.__version__}, Python {platform.python_version()}, {versions}",
    }


def run_steps(steps: Iterable[Step], out: Path, *, again: bool = False) -> dict[str, Outcome]:
    """Run what did not end well yet; `again` runs all."""
    outcomes = {}
    here = machine()
    for step in steps:
        kept = None if again else read_outcome(step, out)
        if kept is not None and kept.ended == "well" and kept.machine == here:
            print(f"{step.name}: kept from before")
        else:
            print(f"{step.name}: {step} (at most {step.limit_s:.0f} s)", flush=True)
            kept = _run(step, out, here)
            print(f"{step.name}: ended {kept.ended} in {kept.seconds:.0f} s", flush=True)
        outcomes[step.name] = kept
    return outcomes


def read_outcome(step: Step, out: Path) -> Outcome | None:
    """Return the outcome of the same command in an earlier run; None without one."""
    path = out / step.name / "outcome.json"
    if not path.is_file():
        return None
    found = Outcome(**json.loads(path.read_text(encoding="utf-8")))
    return found if found.command == str(step) else None


def _run(step: Step, out: Path, here: dict[str, str]) -> Outcome:
    folder = out / step.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **step.settings}
    arguments = [str(ROOT / word) if (ROOT / word).is_file() else word for word in step.command]
    began_s, before = time.monotonic(), load()
    with (folder / "printed.txt").open("w") as printed:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(step.limit_s)
            ended = "well" if status == 0 else f"with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"after the limit of {step.limit_s:.0f} s"
        finally:
            if child.poll() is None:  # the limit, or an interrupt
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    records = sorted((folder / "out" / "benchmarks").glob("*.json"))
    outcome = Outcome(
        command=str(step),
        machine=here,
        ended=ended,
        seconds=time.monotonic() - began_s,
        load=(before, load()),
        record=json.loads(records[0].read_text(encoding="utf-8")) if records else None,
        tail=(folder / "printed.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-15:],
    )
    (folder / "outcome.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")
    return outcome
