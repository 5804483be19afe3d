"""Processor time of the first step of a relay, in multiples of a later one, and where it goes.

    OMP_NUM_THREADS=1 python benchmarks/first_step.py

The first step of a kind measures losses of a few rows, trains in core for the comparison, and meters the device's memory. Sides
that leave one of them out take turns with the whole one, each with a new relay; a plain loop's step is for scale.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _common import cut, make_batch, make_gpt2, report, show, threads

from l2l_core import Relay, RelayConfig

SIDES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without training in core": {"verify": "never"},
    "without losses of a few rows, too": {"verify": "never", "loss_over": "micro-batch"},
}
LENGTH = 32


def relay_seconds(layers: int, width: int, verify: Any = "first", loss_over: Any = None) -> tuple[float, float]:
    """Processor time of the first step, and the least of four later ones."""
    config = RelayConfig(micro_batches=2, seed=0, verify=verify)
    batch, optimizer = make_batch(4, LENGTH), partial(torch.optim.AdamW, lr=1e-4, fused=True)
    with Relay(make_gpt2(layers, width, LENGTH), optimizer, config=config, loss_over=loss_over) as relay:
        first, *later = (_seconds(lambda: relay.step(batch)) for _ in range(5))
    return first, min(later)


def plain_seconds(layers: int, width: int) -> float:
    """Processor time of a step of the same micro-batches in core, the least of five."""
    model, parts = make_gpt2(layers, width, LENGTH), cut(make_batch(4, LENGTH), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for part in parts:
            (model(**part).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return min(_seconds(step) for _ in range(5))


def _seconds(step: Callable[[], object]) -> float:
    began_s = time.process_time()
    step()
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    args = parser.parse_args()
    rows = []
    for width in args.widths:
        plain = min(plain_seconds(args.layers, width) for _ in range(args.rounds))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
        for _ in range(args.rounds + 1):
            for name, settings in SIDES.items():
                found[name].append(relay_seconds(args.layers, width, **settings))
        for name, pairs in found.items():
            first = statistics.median(first for first, _ in pairs[1:])  # the first round imports and compiles
            later = min(later for _, later in pairs)
            rows.append(
                {
                    "width": width,
                    "first step": name,
                    "ms": 1e3 * first,
                    "later steps": first / later,
                    "plain steps": first / plain,
                }
            )
    report("first_step", {"settings": vars(args), "rows": rows})
    show(list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    with threads(1):
        main()
