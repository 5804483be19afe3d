"""Processor seconds of `import torch` and `import l2l_core`, each in a fresh process.

Without other load they equal the time on the clock; other load hardly changes them.
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

MOST_S = 0.3  # seconds that the engine may add to torch
HEAVY = ("transformers", "datasets", "IPython", "ipywidgets", "plotly")  # packages that the engine must not import

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
        torch_s: seconds of `import torch`.
        engine_s: seconds of `import l2l_core`, torch included.
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
    """Measure both imports in turn, `rounds` times.

    A first round, which compiles modules and fills the disk cache, is not measured.

    Raises:
        RuntimeError: an import failed; the message has the last line of its traceback.
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
    """Yield an environment in which Python stores compiled modules, its default."""
    environment = dict(os.environ)
    if environment.pop("PYTHONDONTWRITEBYTECODE", None) is None:
        yield environment
        return
    with tempfile.TemporaryDirectory() as folder:
        environment.setdefault("PYTHONPYCACHEPREFIX", folder)
        yield environment
