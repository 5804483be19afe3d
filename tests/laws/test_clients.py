"""A sample of the programs of benchmarks/clients.py, with libraries that the tests need anyway, and a check of its comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # a test of the benchmark
SAMPLE = {
    "torch: Adafactor": "equal",
    "torch: swa_utils.AveragedModel, made before the relay, and SWALR": "equal",
    "transformers: Adafactor with relative steps": "equal",
    "transformers: DataCollatorWithPadding, rows of unequal length": "equal",
    "datasets: IterableDataset in a DataLoader with two workers": "equal",
    "torch: LBFGS, whose step takes a closure": "refused",
    "torch: DataParallel(model)": "refused",
}

# A relay that trains at another rate, and one that trains nothing
COMPARISON = """
import sys, pathlib, tempfile
sys.path.insert(0, "benchmarks")
import torch
from _clients import Case, Side, judge
from _clients_small import chain, vectors

def program(side: Side, rate: float) -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate if side.is_relay else 0.1)
    with side.training(model, optimizer, loss=torch.nn.CrossEntropyLoss()) as step:
        step(vectors(0))

for rate in (0.1, 0.10001, 0.0):
    with tempfile.TemporaryDirectory() as folder:
        print(judge(Case("", "torch", "", lambda side: program(side, rate)), pathlib.Path(folder)).kind)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    out = tmp_path_factory.mktemp("clients") / "outcomes.jsonl"
    command = [sys.executable, "benchmarks/clients.py", "--out", str(out), "--only", *SAMPLE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert out.exists(), done.stdout + done.stderr
    return {line["case"]: line for line in map(json.loads, out.read_text().splitlines())}


@pytest.mark.all_cases
@pytest.mark.parametrize("name", SAMPLE)
def test_a_program_trains_as_without_a_relay(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[name]["kind"] == SAMPLE[name], outcomes[name]
    assert bool(outcomes[name]["remedy"]) == (SAMPLE[name] == "refused"), outcomes[name]


def test_another_rate_and_no_training_are_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", COMPARISON], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.split("\n") == ["equal", "different", "nothing trained", ""], done.stdout + done.stderr
