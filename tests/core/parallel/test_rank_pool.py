"""Ranks end cleanly, and a rank that dies or stops raises everywhere in bounded time."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from crew_ranks import fall_silent, sum_of_ones

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
def test_torchrun_trains_and_ends() -> None:
    program = Path(__file__).parents[2] / "support" / "pipeline_example.py"
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*launcher, str(program)], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "loss" in ended.stdout and "rank 0 sent" in ended.stdout, ended.stdout
