"""Compiled layers and parts: the tests of `compiling.py`, in a process of their own.

Dynamo's guards are about the whole process. In one that has run thousands of other tests they have been seen to fail at every
call, without a reason that Dynamo could tell; then it gives up, and what is under test is not compiled at all.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S


@pytest.mark.timeout(3 * HANG_S)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_compiled_parts(which: str) -> None:
    done = run_tests("-m", which)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_compiled_function_is_refused_in_the_first_step_of_a_process() -> None:
    """The loss is measured before, which is refused for the same reason, and what that changes is restored."""
    done = run_tests("-k", "compiled_function_outside")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def run_tests(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    tests = Path(__file__).with_name("compiling.py")
    return subprocess.run([*command, str(tests)], capture_output=True, text=True, timeout=2 * HANG_S)
