"""Under launchers a relay finds the others by itself, and the processes end in peace."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from l2l_core import Relay

SUPPORT = Path(__file__).parents[2] / "support"
EXAMPLE = SUPPORT / "torchrun_example.py"


HERE = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def check(said: str, err: str) -> None:
    workers = sorted(re.findall(r"worker (\d) of 2: (.*)", said))
    assert [rank for rank, _ in workers] == ["0", "1"], said
    assert (
        workers[0][1] == workers[1][1] and workers[0][1].count(",") >= 4
    )  # losses of the whole batch, and the weights
    assert "destroy_process_group" not in err, err[-3000:]  # what PyTorch warns of where nobody does


def test_two_processes_train_and_end() -> None:
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*launcher, str(EXAMPLE)], env=os.environ | HERE, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    check(ended.stdout, ended.stderr)


def start_two(program: Path) -> list[subprocess.Popen[str]]:
    """With what Open MPI and `accelerate launch --mpirun_hostfile` tell a process, without them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=os.environ | HERE | meet | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_a_relay_closes_while_a_lost_worker_keeps_its_connections() -> None:
    first, stopped = start_two(SUPPORT / "stopped_worker_example.py")
    try:
        said, err = first.communicate(timeout=100)
    finally:
        for each in (first, stopped):
            each.kill()
            each.communicate()
    assert first.returncode == 0 and "closed after" in said, err[-3000:]


@pytest.mark.slow
def test_two_processes_of_mpirun_train_and_end() -> None:
    started = start_two(EXAMPLE)
    said, err = map("".join, zip(*(each.communicate(timeout=100) for each in started), strict=True))
    assert [each.returncode for each in started] == [0, 0], err[-3000:]
    check(said, err)


@pytest.mark.parametrize("names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("RANK", "WORLD_SIZE")])
def test_nobody_trains_alone_who_was_started_with_others(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(names, "12", strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR.* process 1 of 2"):
        Relay(nn.Sequential(nn.Linear(2, 2)), layers=["0"], workers="auto")
