"""A relay that trains from files all the time and is killed at random, again and again. Run in a process of its own."""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from on_shelf import ROWS, relay_on
from zoo import BY_NAME

KIND = BY_NAME["chain"]


def train(at: Path) -> None:
    """Go on from the last whole step, and say of each that is made what its loss was."""
    with (
        open(at / "log", "a", buffering=1) as log,
        relay_on(at / "shelf", KIND, resume=(at / "shelf" / "step.json").exists()) as relay,
    ):
        while True:
            loss = relay.step(KIND.make_batch(ROWS, relay.steps)).loss
            log.write(f"{relay.steps} {loss.hex()}\n")


def hammer(folder: str, kills: str) -> None:
    """Kill so many times; print how often a step was under way."""
    at, chance, torn = Path(folder), random.Random(int(kills)), 0
    for number in range(int(kills)):
        lines = _lines(at)
        if (pid := os.fork()) == 0:  # nothing has been computed in this process: there are no threads yet
            try:
                train(at)
            finally:
                traceback.print_exc()
                os._exit(1)
        until_s = time.monotonic() + 120
        while _lines(at) <= lines and os.waitpid(pid, os.WNOHANG) == (0, 0):
            assert time.monotonic() < until_s, f"kill {number}: no step was made"
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"kill {number}: it had ended before it was killed"
        halves = sorted((at / "shelf" / "records").iterdir(), key=lambda path: path.stat().st_mtime)
        torn += halves[-1].stat().st_mtime > (at / "shelf" / "step.json").stat().st_mtime
    print(torn)


def _lines(at: Path) -> int:
    return (at / "log").read_bytes().count(b"\n") if (at / "log").exists() else 0


if __name__ == "__main__":
    hammer(*sys.argv[1:])
