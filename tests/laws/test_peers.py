"""benchmarks/peers.py runs, its rows hold what they say, and the depth that it finds is the deepest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import HANG_S

from benchmarks._deepest import deepest

ROOT = Path(__file__).parents[2]


@given(st.data())
def test_the_deepest_within_a_budget_is_found_and_both_its_sides_are_tried(data: st.DataObject) -> None:
    rises = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=40))
    sizes = [sum(rises[: n + 1]) for n in range(len(rises))]  # of 1 layer, 2 layers, ...
    failing = data.draw(st.integers(1, 50))  # from so many layers on, trying fails
    most, first = len(rises), data.draw(st.integers(1, 60))
    budget = data.draw(st.integers(0, sizes[-1] + 1))
    tried = []

    def bytes_of(layers: int) -> float:
        tried.append(layers)
        return sizes[layers - 1] if layers < failing else float("inf")

    found = deepest(bytes_of, first, budget, most)
    fitting = [n for n in range(1, most + 1) if n < failing and sizes[n - 1] <= budget]
    assert found == len(fitting)
    assert len(set(tried)) == len(tried)
    assert {found, found + 1} & set(range(1, most + 1)) <= set(tried)


@pytest.mark.slow
def test_peers_are_compared(tmp_path: Path) -> None:
    """In core and the relay run everywhere; torchao's optimizer runs without a GPU nowhere, installed or not."""
    ways = ["in core", "in core, recompute", "torchao CPUOffloadOptimizer", "relay", "relay, keeps graphs"]
    size = "--layers 3 --width 64 --length 16 --keep 1 --rounds 1 --device-mb 3.5 --process-mb 1000 --most-layers 4".split()
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *size, "--ways", *ways]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "benchmarks" / "peers.json").read_text())
    found = told["ways"]
    reason = found["torchao CPUOffloadOptimizer"].pop("reason")
    assert "torchao" in reason and reason in done.stdout
    assert found["relay"]["losses"] == found["in core"]["losses"] == found["in core, recompute"]["losses"]
    assert found["relay"]["device"] < found["relay, keeps graphs"]["device"] < found["in core"]["device"]
    assert all(one["process"] > 0 for name, one in found.items() if name != "torchao CPUOffloadOptimizer")
    assert told["deepest"]["relay"]["device"] == 4 > told["deepest"]["in core"]["device"] > 0
    assert all(len(told["seconds"][name]) == 1 for name in ways if name != "torchao CPUOffloadOptimizer")
