"""Workers that train and save all the time and are killed at random, again and again. Run in a process of its own.

Each time as many processes as chance wants load what the last ones have left and go on, each with its share of six
micro-batches; worker 0 holds the store, as where workers are started by hand. It is forked, so that they start at once.
"""

import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from crew_cases import Case, together
from oracle import adamw, micro_batches_of
from zoo import BY_NAME

from l2l_core import Relay, TornStep, WorkerLostError, Workers

KIND, MICRO_BATCHES, ROWS = BY_NAME["chain"], 6, 12
CASE = Case("chain")
SURVIVED = 7  # exit code of one that has lost another
WITHIN_S = 30.0


def relay_of(folder: Path, count: int) -> Relay:
    """Go on from the last save, or begin."""
    model = KIND.make_model()
    config = replace(CASE.settings, micro_batches=MICRO_BATCHES // count)
    options = {"loss": KIND.loss, "config": config, "workers": Workers(reduce="ordered", timeout_s=20.0)}
    if (folder / "latest.json").exists():
        return Relay.load(folder, model, adamw(model), **options)
    return Relay(model, adamw(model), **options)


def train(rank: int, count: int, at: Path) -> None:
    """Train and save until killed, or until another worker is."""
    torch.manual_seed(rank)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (at / "port.new").write_text(str(store.port))
        (at / "port.new").rename(at / "port")
    else:
        while not (at / "port").exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int((at / "port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    relay, own = relay_of(at / "save", count), MICRO_BATCHES // count
    with open(at / "log", "a", buffering=1) as log:
        while True:
            parts = micro_batches_of(KIND.make_batch(ROWS, relay.steps), MICRO_BATCHES)
            loss = relay.step(together(parts[own * rank : own * (rank + 1)])).loss
            if rank == 0:
                log.write(f"step {relay.steps} {loss.hex()}\n")
            relay.save(at / "save")
            if rank == 0:
                log.write(f"saved {relay.steps} {loss.hex()}\n")


def run(rank: int, count: int, at: Path) -> None:
    """Be a worker, and say what became of it."""
    try:
        train(rank, count, at)
    except (WorkerLostError, TornStep) as error:
        said = error if isinstance(error, WorkerLostError) else error.__cause__
        (at / f"said-{rank}").write_text(str(said))
        os._exit(SURVIVED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def hammer(folder: str, kills: str) -> None:
    """Kill so many times; print how often a save was hit, and the longest time in which the others heard of it."""
    at, chance = Path(folder), random.Random(int(kills))
    hit, longest_s = 0, 0.0
    for number in range(int(kills)):
        count, lines = chance.choice((2, 3)), _lines(at)
        (at / "port").unlink(missing_ok=True)
        pids: list[int] = []
        for rank in range(count):
            if (pid := os.fork()) == 0:  # nothing has been computed in this process: there are no threads yet
                run(rank, count, at)
            pids.append(pid)
        until_s = time.monotonic() + 60
        while _lines(at) <= lines and time.monotonic() < until_s:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        killed = chance.randrange(count)
        os.kill(pids[killed], signal.SIGKILL)
        began_s = time.monotonic()
        for rank, pid in enumerate(pids):
            status = _ended(pid, began_s)
            if rank == killed:
                assert os.WIFSIGNALED(status), f"kill {number}: worker {rank} had ended before it was killed"
                continue
            assert os.waitstatus_to_exitcode(status) == SURVIVED, f"kill {number}: worker {rank} has failed otherwise"
            said = (at / f"said-{rank}").read_text()
            assert f"worker {killed} of {count} is lost" in said, f"kill {number} of worker {killed}: {said}"
        longest_s = max(longest_s, time.monotonic() - began_s)
        hit += len([*(at / "save").glob("step-*")]) > 1
    print(f"{hit} {longest_s:.1f}")


def _ended(pid: int, began_s: float) -> int:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        assert time.monotonic() - began_s < WITHIN_S, "a worker has not ended in time"
        time.sleep(0.02)


def _lines(at: Path) -> int:
    return (at / "log").read_bytes().count(b"\n") if (at / "log").exists() else 0


if __name__ == "__main__":
    hammer(*sys.argv[1:])
