"""Cost of an answer of the what-if sliders: simulated step, picture, words and table, from one measured step.

    python benchmarks/what_if.py

A GPT-2 of 24 layers trains three steps behind an emulated link; the sliders start from the last one. Seconds of the
clock, since a user waits for them. An answer should take less than 50 ms.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _common import make_batch, make_gpt2, report, show, spread

from l2l_core import EmulatedDevice, Relay, RelayConfig, Trace
from workbench.panels.what_if_view import differences_html
from workbench.what_if import (
    MeasuredStep,
    Question,
    compare_with_step,
    comparison_table,
    draw_what_if,
    pictured_steps,
)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)

    base = MeasuredStep.of(make_step(args.layers, args.width))
    asked = Question.of(base)
    questions = {
        "nothing changed": asked,
        "ahead 2": replace(asked, ahead=2),
        "8 micro-batches": replace(asked, micro_batches=8),
        "a link ten times slower": replace(asked, h2d_bytes_per_s=1e7, d2h_bytes_per_s=1e7),
        "1,000 layers": replace(asked, depth=1000),
        "1,000 layers, 32 micro-batches, stash on the device": replace(
            asked, depth=1000, micro_batches=32, stash="device"
        ),
    }

    rows: list[dict[str, Any]] = []
    for name, question in questions.items():
        seconds = []
        for _ in range(args.rounds):
            began_s = time.perf_counter()
            found = compare_with_step(base, question)
            drawn = draw_what_if(*pictured_steps(found))
            differences_html(found)
            comparison_table(found).to_html()
            seconds.append(time.perf_counter() - began_s)
        figures = spread(1e3 * one for one in seconds)
        rows.append({"question": name, **figures, "kB": len(drawn) / 1e3})
    show(["question", "median, ms", "min", "max", "kB"], [list(row.values()) for row in rows])
    report("what_if", {"arguments": vars(args), "answers": rows})


def make_step(layers: int, width: int) -> Trace:
    """The trace of a step that is not metered."""
    device = EmulatedDevice(h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8)
    config = RelayConfig(micro_batches=4, stash="host")
    model = make_gpt2(layers, width, 64)
    with Relay(model, partial(torch.optim.AdamW, lr=1e-4, fused=True), device, config=config) as relay:
        return [relay.step(make_batch(16, 64)).trace for _ in range(3)][-1]


if __name__ == "__main__":
    main()
