"""torchrun starts workers again after one was lost, as many or fewer; they go on from the last save, to the bit."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from l2l_core.workers import WorkerLostError
from l2l_core.workers.rendezvous import round_store

EXAMPLE = Path(__file__).parents[2] / "support" / "elastic_example.py"
_FLOAT = r"(-?0x[\d.a-f]+p[+-]\d+)"  # what two workers say may stand in one line
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--max-restarts", "3"]


def start(at: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, *options, str(EXAMPLE), str(at)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_of(out: str) -> list[tuple[int, int, str]]:
    """How many workers there were, the step, and its loss, as worker 0 said them."""
    return [(int(n), int(k), loss) for n, k, loss in re.findall(rf"worker 0 of (\d): step (\d+) {_FLOAT}", out)]


def weights_of(out: str) -> set[str]:
    return set(re.findall(f"weights {_FLOAT}", out))


def alone(at: Path) -> tuple[list[str], set[str]]:
    """Losses of a run that nobody disturbs, in one process, and a figure of its weights."""
    at.mkdir()
    program = start(at, "--standalone", "--nproc-per-node", "1")
    out, err = program.communicate(timeout=200)
    assert program.returncode == 0, err[-3000:]
    return [loss for _, _, loss in steps_of(out)], weights_of(out)


@pytest.mark.slow
def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "kill").write_text("worker 1 5")
    program = start(tmp_path, "--standalone", "--nproc-per-node", "2")
    out, err = program.communicate(timeout=200)
    assert program.returncode == 0, err[-3000:]
    losses, weights = alone(tmp_path / "alone")
    seen = steps_of(out)
    assert [(n, k) for n, k, _ in seen] == [(2, k) for k in (*range(5), *range(3, 12))]  # saved at 3, killed at 5
    assert [loss for _, k, loss in seen] == [losses[k] for _, k, _ in seen] and weights_of(out) == weights


@pytest.mark.slow
def test_fewer_go_on_where_a_whole_node_is_gone(tmp_path: Path) -> None:
    (tmp_path / "kill").write_text("agent 1 5")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "here"]
    options += ["--rdzv-endpoint", f"localhost:{port}", "--monitor-interval", "0.5"]
    options += ["--rdzv-conf", "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3"]
    first = start(tmp_path, *options)
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:  # it is the one that holds what the nodes meet at
        try:
            socket.create_connection(("localhost", port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    second = start(tmp_path, *options)
    out, err = first.communicate(timeout=300)
    assert first.returncode == 0, err[-3000:]
    second.communicate(timeout=30)
    assert second.returncode == -9
    losses, weights = alone(tmp_path / "alone")
    seen = steps_of(out)
    assert [(n, k) for n, k, _ in seen] == [(2, k) for k in range(5)] + [(1, k) for k in range(3, 12)]
    assert [loss for _, k, loss in seen] == [losses[k] for _, k, _ in seen] and weights_of(out) == weights


def test_workers_keep_to_those_of_their_own_round() -> None:
    """The agent's store is the same after a restart, with what the workers before have left in it."""
    store = dist.HashStore()
    for _ in range(3):
        found: dict[int, dist.Store] = {}

        def come(rank: int, found: dict[int, dist.Store] = found) -> None:
            time.sleep(0.2 * rank)
            found[rank] = round_store(store, rank, 2, timeout_s=30.0)

        threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not found[0].check(["left"]), "this is a store of a round before"
        found[0].set("left", "here")
        assert found[1].get("left") == b"here", "they are in different rounds"
    with pytest.raises(WorkerLostError, match="waited 0.3 s for the other 2"):
        round_store(store, 0, 3, timeout_s=0.3)
