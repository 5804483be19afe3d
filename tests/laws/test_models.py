"""A sample of what benchmarks/models.py does with every class of transformers: families that the zoo has no kind of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S

ROOT = Path(__file__).parents[2]
SAMPLE = [
    "BloomForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "Phi3ForCausalLM",  # other attention, states, mixtures
    "BigBirdForMaskedLM",  # replaces a submodule of its layers in its first forward
    "ElectraForMaskedLM", "FNetForMaskedLM", "PegasusForConditionalGeneration", "Speech2TextForConditionalGeneration",
    "BeitForImageClassification", "ResNetForImageClassification", "HubertForCTC", "MPNetForTokenClassification",
]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Train the classes whose tests run now."""
    out = tmp_path_factory.mktemp("models") / "outcomes.jsonl"
    ids = [item.name for item in request.session.items if item.path == Path(__file__)]
    chosen = [name for name in SAMPLE if any(f"[{name}]" in each for each in ids)]
    command = [sys.executable, "benchmarks/models.py", "--jobs", "1", "--out", str(out), "--only", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert out.exists(), done.stdout + done.stderr
    return {line["name"]: line for line in map(json.loads, out.read_text().splitlines())}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_trains_as_in_core(name: str, outcomes: dict[str, dict[str, object]]) -> None:
    assert outcomes[name]["outcome"] == "equal", outcomes[name]
    assert outcomes[name]["layers"] >= 2
