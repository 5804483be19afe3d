"""Ranks end cleanly, and a rank that dies or stops raises everywhere in bounded time."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from crew_ranks import fall_silent, sum_of_ones
from torch import nn

from l2l_core.parallel import RankError, RankPool


def test_a_pool_runs_and_a_killed_rank_raises_on_every_rank() -> None:
    with RankPool(2) as pool:
        assert pool.run(sum_of_ones) == [2.0, 2.0]
        processes = [psutil.Process(each.pid) for each in pool.processes]
        began_s = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1: its process ended with exit code -9") as caught:
            pool.run(fall_silent, 1, signal.SIGKILL)
        assert time.monotonic() - began_s < 30 and "RuntimeError" in caught.value.causes[0]
    assert not any(each.is_running() for each in processes)


def test_what_ranks_cannot_import_is_refused() -> None:
    pool = RankPool.__new__(RankPool)
    pool._pipes = []
    with pytest.raises(TypeError, match="Take the model's class and the loss from a module"):
        pool.run(sum_of_ones, lambda: 0)


@pytest.mark.slow
def test_a_stopped_rank_raises_within_the_timeout() -> None:
    with RankPool(2, timeout_s=5.0) as pool:
        pool.run(sum_of_ones)
        began_s = time.monotonic()
        with pytest.raises(RankError, match="no answer"):
            pool.run(fall_silent, 1, signal.SIGSTOP)
        assert time.monotonic() - began_s < 40


@pytest.mark.slow
def test_twenty_runs_leave_no_process() -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    for _ in range(20):
        with RankPool(2) as pool:
            assert pool.run(sum_of_ones) == [2.0, 2.0]
        assert [each.exitcode for each in pool.processes] == [0, 0]
    after = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert not [each for each in after if "resource_tracker" not in " ".join(each.cmdline())]


@pytest.mark.slow
def test_torchrun_trains_and_ends(tmp_path: Path) -> None:
    """Pipeline and ways, called by every rank; their results equal plain training here, to the bit."""
    program, path = Path(__file__).parents[2] / "support" / "pipeline_example.py", tmp_path / "results.pt"
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(program), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "loss" in ended.stdout and "rank 0 sent" in ended.stdout, ended.stdout
    found = torch.load(path, weights_only=False)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
    model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 2))
    rows, targets = torch.randn(8, 8), torch.randn(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        for x, y in zip(rows.chunk(4), targets.chunk(4), strict=True):
            ((model(x) - y).square().mean() / 4).backward()
        optimizer.step()
    assert all(torch.equal(found["state"][name], weight) for name, weight in model.named_parameters())
    zero = found["zero"]
    assert len(found["losses"]) == 3 and zero.difference < 1e-12 and zero.sent_bytes == zero.gloo_bytes
    assert [rank.trace.worker.rank for run in (zero.ranks, found["ranks"]) for rank in run] == [0, 1, 0, 1]
