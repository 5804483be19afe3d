"""Under torchrun a relay finds the others by itself, and the processes end in peace."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "support" / "torchrun_example.py"


def test_two_processes_train_and_end() -> None:
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launcher, str(EXAMPLE)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = sorted(re.findall(r"worker (\d) of 2: (.*)", ended.stdout))
    assert [rank for rank, _ in said] == ["0", "1"], ended.stdout
    assert said[0][1] == said[1][1] and said[0][1].count(",") >= 4, (
        said
    )  # losses of the whole batch, and the same weights
    assert "destroy_process_group" not in ended.stderr, ended.stderr[-3000:]  # what PyTorch warns of where nobody does
