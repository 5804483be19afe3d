"""Cost of a link for a step when compute takes every core, and of a foreign process beside it.

    python benchmarks/crowded.py
    python benchmarks/crowded.py --rounds 7 --width 256
    python benchmarks/crowded.py --alone --layers 24 --width 256    (without a foreign process, default OpenMP)

A GPT-2 of 6 layers, fused AdamW, emulated device; compute on all cores. The link is set so that each direction's copies
take 0.4 of a step. Every round makes one step on each side, in turn: without limits and behind the link, alone and beside
a process that keeps one core busy. All that for several ways in which OpenMP's threads wait for one another, each in a
separate process, since that is settled when PyTorch is loaded: "default", "passive" (OMP_WAIT_POLICY), spinning for some
while (GOMP_SPINCOUNT, of GNU's OpenMP, which the wheels for Linux bring), and "one core less" (compute leaves one).

The bar of the project: behind the link / without at most 1.05, alone and in company.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from _common import alternate, make_batch, make_gpt2, medians, ratio, report, show

from l2l_core import EmulatedDevice, Relay, RelayConfig

SHARE = 0.4  # of a step, that copies of one direction take
CORES = os.cpu_count() or 1
WAYS: dict[str, tuple[dict[str, str], int]] = {  # environment, cores less for compute
    "default": ({}, 0),
    "passive": ({"OMP_WAIT_POLICY": "passive"}, 0),
    "a short while": ({"GOMP_SPINCOUNT": "5000"}, 0),
    "a longer while": ({"GOMP_SPINCOUNT": "50000"}, 0),
    "one core less": ({}, 1),
}
COMPANY = {"alone": "", "crowded": ", crowded"}  # what sides are called


@contextmanager
def company() -> Iterator[None]:
    """Keep one core busy in the block, from another process."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every side, in this process."""
    torch.set_num_threads(max(1, CORES - WAYS[args.way][1]))
    batch, device = make_batch(args.rows * args.micro_batches, args.length), EmulatedDevice()
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    config = RelayConfig(micro_batches=args.micro_batches, stash=args.stash)
    with Relay(make_gpt2(args.layers, args.width, args.length), optimizer, device, config=config) as relay:
        for _ in range(3):  # the first one is metered
            step = relay.step(batch)
        nbytes = {lane: sum(e.nbytes for e in step.trace.lanes[lane]) for lane in ("h2d", "d2h")}
        free_s = min(relay.step(batch).seconds for _ in range(2))
        link = {f"{lane}_bytes_per_s": nbytes[lane] / (SHARE * free_s) for lane in nbytes}

        def step_on(figures: dict[str, float]) -> None:
            device.throttle(**figures)
            relay.step(batch)

        sides: dict[str, Callable[[], Any]] = {"free": partial(step_on, {}), "link": partial(step_on, link)}
        alone = alternate(sides, args.rounds)
        if args.alone:
            return alone
        with company():
            crowded = alternate(sides, args.rounds)
        return alone | {f"{name}, crowded": seconds for name, seconds in crowded.items()}


def main() -> None:
    """Measure every way in a separate process, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stash", default="device", choices=["device", "host"])
    parser.add_argument("--alone", action="store_true", help="without a foreign process, and with default OpenMP")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # how the processes of this program call it
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    rows, results = [], {}
    for way, (environment, _) in list(WAYS.items())[: 1 if args.alone else None]:
        done = subprocess.run(
            [sys.executable, __file__, "--way", way, *sys.argv[1:]],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = json.loads(done.stdout.splitlines()[-1])
        spreads = {
            name: ratio(seconds, f"link{where}", f"free{where}")
            for name, where in COMPANY.items()
            if f"link{where}" in seconds
        }
        results[way], each = {"seconds": seconds, **spreads}, medians(seconds)
        told = [f"{r['median']:.2f} ({r['min']:.2f}-{r['max']:.2f})" for r in spreads.values()]
        heads = ["OpenMP waits", *(f"{side} s" for side in each), *(f"link / free, {name}" for name in spreads)]
        rows.append([way, *each.values(), *told])
    report("crowded", {"settings": vars(args), "results": results})
    show(heads, rows)


if __name__ == "__main__":
    main()
