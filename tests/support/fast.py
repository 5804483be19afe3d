"""What runs how often, by rules about files and names, so that it stays fair, without a list, as tests come and go.

`rare_cases` are those that only the long run (-m slow) tries; `further_cases` what `--draw` runs of them; `sample` is what
`--fast` runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
FOLDERS = ("browser", "notebooks")
ONE_OF = 6  # functions, of each file
FEW = 2  # cases, which are two ways to go; more are a sweep


def is_left_out(file: Path) -> bool:
    """Tell whether a test file starts browsers, kernels or other processes: each takes as long as a hundred tests."""
    return file.parent.name in FOLDERS or _starts_processes(file)


def _starts_processes(file: Path) -> bool:
    """Whether it imports `subprocess`, itself or by way of what tests share, which may import each other."""
    seen, left = set[Path](), [file]
    while left:
        seen.add(file := left.pop())
        names = _imported(file)
        if "subprocess" in names:
            return True
        left += [each for name in names if (each := SUPPORT / f"{name}.py").exists() and each not in seen]
    return False


@cache
def _imported(file: Path) -> set[str]:
    return set(re.findall(r"^\s*(?:import|from) (\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE))


def rare_cases(names: Iterable[str], slow: Collection[str] = (), draw: int = 0) -> set[str]:
    """Return the node ids of all but one case of every sweep. Functions with the same parameters draw others.

    The one is none of the `slow`, as long as there are others. Another `draw` takes another one.
    """
    sweeps = _sweeps(names)
    return {name for cases in sweeps for name in cases} - {_drawn_case(cases, slow, draw) for cases in sweeps}


def further_cases(names: Iterable[str], slow: Collection[str], draw: int) -> set[str]:
    """Return the node ids of the cases of a later draw, of sweeps that have so many cases that are not `slow`."""
    return {
        _drawn_case(cases, slow, draw) for cases in _sweeps(names) if sum(name not in slow for name in cases) > draw
    }


def _sweeps(names: Iterable[str]) -> list[list[str]]:
    functions: dict[str, list[str]] = defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    return [cases for cases in functions.values() if len(cases) > FEW]


def _drawn_case(cases: Sequence[str], slow: Collection[str], draw: int) -> str:
    return sorted(cases, key=lambda name: (name in slow, _draw(name)))[draw % len(cases)]


def changing_names(names: Iterable[str]) -> list[str]:
    """Return node ids with an address in memory: every process would draw another case, and pytest-xdist would stop."""
    return [name for name in names if re.search(r" at 0x[0-9a-f]+>", name)]


def sample(names: Iterable[str]) -> set[str]:
    """Return the node ids to run: of every file about a sixth of its functions and at least one, of each function one case.

    Whether a function is drawn depends on its name alone, so those that come later do not change it.
    """
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        files[name.partition("::")[0]][name.partition("[")[0]].append(name)
    taken = set()
    for functions in files.values():
        drawn = [function for function in functions if _draw(function) % ONE_OF == 0]
        for function in drawn or [min(functions, key=_draw)]:
            taken.add(min(functions[function], key=_draw))
    return taken


def _draw(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
