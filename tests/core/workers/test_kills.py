"""However often workers are killed, and however many go on: what was saved is what one would have that nobody killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crew_kills import CASE, KIND, MICRO_BATCHES, ROWS
from oracle import InCore, adamw

from l2l_core import saves

PROGRAM = Path(__file__).parents[2] / "support" / "crew_kills.py"


@pytest.mark.slow
def test_twenty_random_kills(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), "20"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    saved = max(int(step) for what, step, _ in log if what == "saved")
    assert saves.load_save(tmp_path / "save").steps >= saved
    model = KIND.make_model()
    in_core = InCore(KIND, model, adamw(model), CASE.settings)
    in_core.config = type(CASE.settings)(micro_batches=MICRO_BATCHES, seed=0)
    steps = max(int(step) for _, step, _ in log)
    losses = [in_core.step(KIND.make_batch(ROWS, step)).hex() for step in range(steps)]
    assert len(log) > 20
    assert not [line for line in log if losses[int(line[1]) - 1] != line[2]], "a run has another loss"
    hit, longest_s = done.stdout.split()
    assert int(hit) > 0 and float(longest_s) < 30, done.stdout
