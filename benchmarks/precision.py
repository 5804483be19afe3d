"""Loss curves in float32 and bfloat16: the demo's model and text, the same batches for both, by relay.

    python benchmarks/precision.py          (3 to 5 minutes)
    python benchmarks/precision.py --steps 60 --layers 6

Both precisions take every step in turn, from the same weights. They agree if the loss on held-out text at the end and
the mean training loss of the last 20 steps are within 1 %. Reported too: the largest relative gap between the moving
averages of the training losses over 20 steps. How much of a gap chance alone makes is shown by a third run, in float32
with other random windows of the same text.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from _common import report, show

from l2l_core import EmulatedDevice, Relay, RelayConfig
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer, make_schedule, single_thread
from workbench.lessons.demo_values import Settings

WINDOW = 20  # steps of the moving average
AGREED = 0.01

RUNS = {"fp32": ("fp32", 0), "bf16": ("bf16", 0), "fp32, other windows": ("fp32", 2)}  # precision, seed of the batches


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=Settings.layers)
    parser.add_argument("--width", type=int, default=Settings.width)
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    args = parser.parse_args()
    settings = Settings(**vars(args))

    with single_thread():
        losses, held_out, seconds = train(settings)
    rows = {name: compare(losses["fp32"], losses[name], held_out["fp32"], held_out[name]) for name in RUNS}
    agree = max(abs(rows["bf16"]["held_out_gap"]), abs(rows["bf16"]["last_gap"])) <= AGREED
    show_curves(losses)
    show(
        ("run", "held-out loss", "gap", f"mean of last {WINDOW}", "gap", f"largest gap of {WINDOW}-step means", "s"),
        [
            (
                name,
                f"{held_out[name]:.4f}",
                f"{row['held_out_gap']:+.3%}",
                f"{statistics.fmean(losses[name][-WINDOW:]):.4f}",
                f"{row['last_gap']:+.3%}",
                f"{row['largest_gap']:.3%}",
                f"{seconds[name]:.3f}",
            )
            for name, row in rows.items()
        ],
    )
    print(f"float32 and bfloat16 {'agree' if agree else 'DIFFER by more than'} {'within ' * agree}{AGREED:.0%}\n")
    report(
        "precision",
        {"settings": vars(args), "agree": agree, "gaps": rows, "held_out": held_out, "step_s": seconds}
        | {"losses": losses},
    )


def train(settings: Settings) -> tuple[dict[str, list[float]], dict[str, float], dict[str, float]]:
    """Losses of all steps, the loss on held-out text at the end, median seconds of a step, by run."""
    corpus = load_corpus()
    judged = torch.Generator().manual_seed(settings.seed + 1)
    looks = [draw_batch(corpus.held_out, settings, judged) for _ in range(settings.judged_batches)]
    losses: dict[str, list[float]] = {name: [] for name in RUNS}
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    with ExitStack() as stack:
        relays, schedules, drawn = {}, {}, {}
        for name, (precision, seed) in RUNS.items():
            model = make_model(settings)
            config = RelayConfig(micro_batches=settings.micro_batches, precision=precision, seed=settings.seed)
            relays[name] = stack.enter_context(
                Relay(model, make_optimizer(model, settings), EmulatedDevice(), config=config)
            )
            schedules[name] = make_schedule(relays[name].optimizer, settings)
            drawn[name] = torch.Generator().manual_seed(settings.seed + seed)
        for _ in range(settings.steps):
            for name, relay in relays.items():
                result = relay.step(draw_batch(corpus.train, settings, drawn[name]))
                schedules[name].step()
                losses[name].append(result.loss)
                seconds[name].append(result.seconds)
        held_out = {name: statistics.fmean(map(relay.evaluate, looks)) for name, relay in relays.items()}
    return losses, held_out, {name: statistics.median(values) for name, values in seconds.items()}


def compare(base: Sequence[float], other: Sequence[float], base_end: float, other_end: float) -> dict[str, float]:
    """Relative gaps of `other` to `base`."""
    means = [moving_mean(losses) for losses in (base, other)]
    return {
        "held_out_gap": other_end / base_end - 1,
        "last_gap": means[1][-1] / means[0][-1] - 1,
        "largest_gap": max(abs(b / a - 1) for a, b in zip(*means, strict=True)),
    }


def moving_mean(losses: Sequence[float]) -> list[float]:
    """Means of `WINDOW` successive losses; of all of them if there are fewer."""
    window = min(WINDOW, len(losses))
    return [statistics.fmean(losses[i : i + window]) for i in range(len(losses) - window + 1)]


def show_curves(losses: dict[str, list[float]]) -> None:
    """Mean training loss of every 20 steps."""
    starts = range(0, len(next(iter(losses.values()))), WINDOW)
    rows: list[Any] = [
        (
            f"{start + 1} to {start + WINDOW}",
            *(f"{statistics.fmean(v[start : start + WINDOW]):.4f}" for v in losses.values()),
        )
        for start in starts
    ]
    show(("steps", *losses), rows)


if __name__ == "__main__":
    main()
