"""Seconds that `import torch` and `import l2l_core` take, each in a fresh process.

Processor seconds: on a machine without other load they are the time on the clock, and other load hardly changes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

MOST_S = 0.3  # that the engine may add to torch
HEAVY = ("transformers", "datasets", "IPython", "ipywidgets", "plotly")  # packages that the engine does without

_TIMED = """
import sys, time
began_s = time.process_time()
import {name}
print(time.process_time() - began_s, *({heavy!r} & sys.modules.keys()))
"""


@dataclass(frozen=True)
class ImportTimes:
    """Medians of processor seconds over fresh processes.

    Attributes:
        torch_s: of `import torch`.
        engine_s: of `import l2l_core`, torch included.
        heavy: packages of `HEAVY` that `import l2l_core` imported.
    """

    torch_s: float
    engine_s: float
    heavy: tuple[str, ...]

    @property
    def added_s(self) -> float:
        """Seconds that the engine adds to torch."""
        return self.engine_s - self.torch_s

    def __str__(self) -> str:
        return f"torch {self.torch_s:.2f} s, l2l_core {self.engine_s:.2f} s"


def measure_imports(rounds: int = 1) -> ImportTimes:
    """Import both in turn, `rounds` times, after one round that is not measured.

    The first round compiles modules and fills the disk cache.

    Raises:
        RuntimeError: an import failed; has the last line of its traceback.
    """
    names = ("torch", "l2l_core")
    with _compiled_modules() as environment:
        measured = [[_time_import(name, environment) for name in names] for _ in range(1 + rounds)][1:]
    torch_s, engine_s = (median(seconds for seconds, _ in column) for column in zip(*measured, strict=True))
    return ImportTimes(torch_s, engine_s, tuple(sorted(measured[0][1][1])))


def _time_import(name: str, environment: dict[str, str]) -> tuple[float, list[str]]:
    code = _TIMED.format(name=name, heavy={*HEAVY})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"import {name} failed: {done.stderr.strip().splitlines()[-1]}")
    seconds, *heavy = done.stdout.split()
    return float(seconds), heavy


@contextmanager
def _compiled_modules() -> Iterator[dict[str, str]]:
    """Give an environment in which Python keeps compiled modules, as it does unless it is told not to."""
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", None) is None:
        yield environment
        return
    with tempfile.TemporaryDirectory() as folder:
        environment.setdefault("PYTHONPYCACHEPREFIX", folder)
        yield environment
