"""Seconds of an edit on a deep stack, by kind, against the mere allocation of a layer's bytes.

    python benchmarks/edits.py
    python benchmarks/edits.py --layers 12 --width 768

GPT-2 blocks; every edit is undone before the next. The first edit of a kind is listed separately: later ones reuse its
findings. Seconds of the processor rather than of the clock, so that other load on the machine matters less. A layer that
sits a step out leaves and returns; the step itself is not counted.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _common import make_batch, make_gpt2, report, show, spread

from l2l_core import (
    Drop,
    Duplicate,
    Edit,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Move,
    Relay,
    RelayConfig,
    Replace,
    Swap,
    Unfreeze,
)

make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def kinds(layers: int) -> dict[str, Callable[[Relay], Edit]]:
    """An edit of each kind, in the middle of the stack or at its ends; those of new layers make one."""
    middle = layers // 2
    return {
        "Insert identity": lambda relay: Insert(at=middle),
        "Insert identity, in front": lambda relay: Insert(at=0),
        "Insert identity, behind the last": lambda relay: Insert(at=layers),
        "Insert copy": lambda relay: Insert(at=middle, init="copy", optimizer="copy"),
        "Insert fresh": lambda relay: Insert(at=middle, init="fresh"),
        "Insert interpolate": lambda relay: Insert(at=middle, init="interpolate"),
        "Duplicate": lambda relay: Duplicate(middle),
        "Replace": lambda relay: Replace(middle, copy.deepcopy(relay.stack[middle].module)),
        "Drop": lambda relay: Drop(middle),
        "Swap": lambda relay: Swap(1, middle),
        "Move": lambda relay: Move(1, middle),
        "Interpolate": lambda relay: Interpolate(1, middle),
        "Freeze": lambda relay: Freeze(middle),
        "Unfreeze": lambda relay: Unfreeze(middle),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    torch.set_num_threads(1)
    model, batch = make_gpt2(args.layers, args.width, 8), make_batch(2, 8)
    results: dict[str, dict[str, Any]] = {}
    with Relay(model, make_optimizer, EmulatedDevice(), config=RelayConfig(micro_batches=2)) as relay:
        relay.step(batch)
        numel = 4 * relay.stack[0].slot_numel(torch.float32)  # weights, two moments, a gradient
        results["mere allocation of a layer"] = told(
            [seconds_of(partial(torch.zeros, numel)) for _ in range(args.rounds)]
        )
        for name, make in kinds(args.layers).items():
            done, undone = [], []
            for _ in range(args.rounds):
                edit = make(relay)
                done.append(seconds_of(lambda edit=edit: relay.apply(edit)))
                undone.append(seconds_of(relay.undo))
            results[name] = {**told(done), "undo_s": spread(undone)}
        for count in sorted({1, args.layers // 5}):
            out = range(0, count * 5, 5)
            results[f"{count} sit out, and return"] = told(
                [sitting_out_s(relay, out, batch) for _ in range(args.rounds)]
            )
    show(
        ("edit", "first, ms", "later, ms", "min", "max", "undo, ms"),
        [
            (
                name,
                1e3 * r["first_s"],
                *(1e3 * s for s in r["later_s"].values()),
                1e3 * r["undo_s"]["median"] if "undo_s" in r else "",
            )
            for name, r in results.items()
        ],
    )
    report("edits", {"settings": vars(args), "edits": results})


def told(seconds: list[float]) -> dict[str, Any]:
    """The first, and the rest."""
    return {"first_s": seconds[0], "later_s": spread(seconds[1:])}


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of the processor."""
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def sitting_out_s(relay: Relay, layers: range, batch: dict[str, torch.Tensor]) -> float:
    """Seconds for layers to leave and to return."""

    def call() -> None:
        with relay._skipping(layers, batch, force=False):
            pass

    return seconds_of(call)


if __name__ == "__main__":
    main()
