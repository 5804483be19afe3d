"""Every script in `examples/` is short, runs as it stands, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

from patience import HANG_S

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MOST_LINES = 40


def run(name: str) -> str:
    """Run an example in a separate process, as a user would, and return its output."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(EXAMPLES / name)]
    ended = subprocess.run(
        command, env=os.environ | offline, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_every_example_is_short_and_listed() -> None:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    long = [name for name, text in scripts.items() if len(text.splitlines()) > MOST_LINES]
    assert len(scripts) == 5 and not long, long
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(scripts)


def test_fine_tuning_lowers_the_held_out_loss() -> None:
    before, after = numbers(run("fine_tune.py"))[:2]
    assert after < before


def test_the_own_loop_learns_and_resumes_to_the_bit() -> None:
    losses, equal = run("own_loop.py").splitlines()
    at_first, half_way, at_the_end = numbers(losses)
    assert at_first > half_way > at_the_end
    assert equal.endswith("True")


def test_depth_grows_and_an_identity_layer_leaves_the_loss() -> None:
    printed = run("grow_depth.py")
    assert re.findall(r"(\d+) layers", printed) == ["2", "4", "8", "9", "8", "8"]
    assert printed.count("equal loss: True") == 2
    first, *_, last = numbers(printed)
    assert last < first


def test_two_workers_hold_half_each_and_equal_one() -> None:
    printed = run("two_workers.py")
    assert {f"worker {rank} of 2 holds 0.50 of the optimizer state" for rank in range(2)} <= {*printed.splitlines()}
    before, after = numbers(printed.splitlines()[-1])
    assert after < before and printed.endswith("equal to one worker: True\n")


def test_training_from_files_takes_less_memory_and_goes_on() -> None:
    whole, *steps = run("disk.py").splitlines()
    figures = [numbers(step) for step in steps]
    assert [step.partition(":")[0] for step in steps] == [f"step {number}" for number in range(8)]
    assert figures[-1][0] < figures[0][0]
    assert all(held < numbers(whole)[0] / 2 for _, held in figures)
