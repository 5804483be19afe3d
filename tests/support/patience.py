"""How long a test waits for what must come, and which it leaves to the long run (-m slow).

A guard against hanging for ever, far above what the slowest machine needs, and never a measure: no test may say that
something is slow. pytest's own limit (pyproject.toml) is far more, so that it is the test that says what it waited for.
"""

import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest

HANG_S = 300.0


def rarely(*values: Any) -> Any:
    """Values of a parameter that only the long run tries: others in the same list go the same ways."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sampled(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Every third value of a parameter; the others only in the long run."""
    return [value if at % every == 0 else rarely(value) for at, value in enumerate(values)]


def with_extra(values: Iterable[Any], extra: str, *libraries: str) -> list[Any]:
    """Values of a parameter that skip where the libraries of an extra are not installed."""
    is_missing = any(find_spec(library) is None for library in libraries)
    skip = pytest.mark.skipif(is_missing, reason=f"the extra {extra} is not installed")
    return [pytest.param(value, marks=skip) for value in values]


def wait_until(condition: Callable[[], Any], timeout_s: float = HANG_S) -> None:
    """Look again and again; fail when it takes too long."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"still not so after {timeout_s} s"
        time.sleep(0.005)
