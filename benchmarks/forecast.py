"""Forecast before, check after: bytes and seconds of steps that have not run, against the steps.

    python benchmarks/forecast.py
    python benchmarks/forecast.py --pairs 15

16 configurations on the emulated device: GPT-2, BERT and Llama, 1 to 6 micro-batches, no link limit and two slow links, the
stash on the device and on the host, float32 and bfloat16, 0 to 2 layers ahead. Every configuration has two relays over equal
models. One only forecasts, so each time before any step: a rehearsal. The other makes steps, and after each forecasts the
next one from what it recorded. They take turns, so that drift of the machine meets both alike; seconds are compared pair by
pair, forecast over the next step, and the median of the pairs counts. `own` replays each step's own costs: what
is left there is the schedule's error alone, without the drift. Bytes are compared with every step; the worst counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _common import make_batch, make_gpt2, report, show, spread
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from l2l_core import EmulatedDevice, Forecast, Profile, Relay, RelayConfig, simulate

LENGTH = 64
KEYS = ("device", "host", "before", "after", "own")
SLOW, SLOWER = 4e8, 1e8  # bytes per second
Make = Callable[[argparse.Namespace], nn.Module]


def make_bert(args: argparse.Namespace) -> nn.Module:
    """A BERT with masked-word head, byte vocabulary."""
    torch.manual_seed(0)
    sizes = {"hidden_size": args.width, "num_hidden_layers": args.layers, "intermediate_size": 4 * args.width}
    config = BertConfig(vocab_size=256, num_attention_heads=args.width // 64, max_position_embeddings=LENGTH, **sizes)
    return BertForMaskedLM(config).train()


def make_llama(args: argparse.Namespace) -> nn.Module:
    """A Llama with grouped keys, byte vocabulary."""
    torch.manual_seed(0)
    heads = args.width // 64
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        intermediate_size=3 * args.width,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).train()


MODELS: dict[str, Make] = {
    "gpt2": lambda args: make_gpt2(args.layers, args.width, LENGTH),
    "bert": make_bert,
    "llama": make_llama,
}
CASES = (  # model, micro-batches, stash, precision, ahead, bytes per second of the link
    ("gpt2", 1, "device", "fp32", 1, None),
    ("gpt2", 4, "device", "fp32", 1, SLOW),
    ("gpt2", 4, "device", "fp32", 0, SLOW),
    ("gpt2", 6, "host", "fp32", 1, SLOW),
    ("gpt2", 4, "host", "fp32", 2, SLOWER),
    ("gpt2", 2, "host", "bf16", 1, SLOWER),
    ("gpt2", 3, "device", "bf16", 2, SLOW),
    ("bert", 2, "device", "fp32", 1, SLOW),
    ("bert", 4, "host", "fp32", 1, None),
    ("bert", 6, "device", "bf16", 1, SLOWER),
    ("bert", 4, "host", "fp32", 0, SLOW),
    ("llama", 4, "device", "fp32", 1, SLOWER),
    ("llama", 2, "host", "fp32", 1, SLOW),
    ("llama", 5, "host", "bf16", 1, SLOW),
    ("llama", 4, "device", "fp32", 2, None),
    ("llama", 1, "host", "fp32", 1, SLOWER),
)


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    config: RelayConfig
    link: float | None

    @staticmethod
    def of(model: str, micro_batches: int, stash: Any, precision: Any, ahead: int, link: float | None) -> Case:
        """From a row of `CASES`."""
        config = RelayConfig(micro_batches=micro_batches, stash=stash, precision=precision, ahead=ahead)
        return Case(model, config, link)

    @property
    def name(self) -> str:
        """For the table."""
        c = self.config
        link = f"{self.link / 1e6:.0f} MB/s" if self.link else "none"
        return f"{self.model} K={c.micro_batches} {c.stash} {c.precision} ahead={c.ahead} {link}"


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Forecast and measure in turn."""
    batch = make_batch(args.rows * case.config.micro_batches, LENGTH)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)

    def relay() -> Relay:
        device = EmulatedDevice(h2d_bytes_per_s=case.link, d2h_bytes_per_s=case.link)
        return Relay(MODELS[case.model](args), optimizer, device, config=case.config)

    pairs: dict[str, list[float]] = {"before": [], "after": [], "own": []}
    checks, steps = [], []
    with relay() as idle, relay() as busy:
        first = idle.forecast(batch)
        for _ in range(2):  # metered, then warm
            busy.step(batch)
        for _ in range(args.pairs):
            before, after = idle.forecast(batch), busy.forecast(batch)
            step = busy.step(batch)
            own_s = simulate(Profile.of(step.trace), case.config, busy.device).span_s
            pairs["before"].append(before.seconds / step.seconds)
            pairs["after"].append(after.seconds / step.seconds)
            pairs["own"].append(own_s / step.trace.span_s)
            checks.append(first.check(step))
            steps.append(step.seconds)
    return {
        "name": case.name,
        "measured_s": spread(steps),
        "device": max((check.peak_device.error for check in checks), key=abs),
        "device_by_category": max(abs(row.error) for check in checks for row in check.device),
        "host": max((check.peak_host.error for check in checks), key=abs),
        **{name: statistics.median(ratios) - 1 for name, ratios in pairs.items()},
        "pairs": pairs,
        "bases": [before.basis, after.basis],
        "forecast": plain(first),
    }


def plain(forecast: Forecast) -> dict[str, Any]:
    """A forecast as JSON."""
    return {
        "seconds": forecast.seconds,
        "device_bytes": dict(forecast.device_bytes),
        "host_bytes": dict(forecast.host_bytes),
        "bound": str(forecast.bound),
        "hiding_micro_batches": forecast.hiding_micro_batches,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--pairs", type=int, default=9, help="of forecast and step")
    parser.add_argument("--threads", type=int, default=max(1, torch.get_num_threads() - 1), help="of compute")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rows = []
    for case in CASES:
        rows.append(run(Case.of(*case), args))
        print(f"{rows[-1]['name']}: {', '.join(f'{key} {rows[-1][key]:+.1%}' for key in KEYS)}", flush=True)
    report("forecast", {"settings": vars(args), "rows": rows})
    show(
        ["configuration", "step, s", "device bytes", "host bytes", "before any step", "after a step", "own"],
        [
            [row["name"], row["measured_s"]["median"], *(f"{row[key]:+.2%}" for key in ("device", "host"))]
            + [f"{row[key]:+.1%}" for key in ("before", "after", "own")]
            for row in rows
        ],
    )
    for key in KEYS:
        worst = max(rows, key=lambda row: abs(row[key]))
        middle = statistics.median(abs(row[key]) for row in rows)
        print(f"{key}: median {middle:.2%}, worst {abs(worst[key]):.2%} ({worst['name']})")


if __name__ == "__main__":
    main()
