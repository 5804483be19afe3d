"""The paper's experiment at its own shape: BERT-Large by relay against training in core on a device of the same size.

    python benchmarks/paper.py                         a quarter of an hour on two cores
    python benchmarks/paper.py --device cuda --rounds 5
    python benchmarks/paper.py --layers 4 --width 256 --batch 8 --budget-gb 0.35 --large-batch 16   a try

BERT-Large (24 x 1,024, 335 million weights, masked language model), sequences of 128, batch 32, AdamW, dropout 0.1. In
core the batch is accumulated over the largest micro-batches that the budget allows, with all activations kept and with
recompute; the relay takes micro-batches of the same size: once with no more memory than it needs, once with a share of
what training in core takes, in which it keeps graphs instead of recomputing. Reported are peak device bytes and samples
per second, and the relay at a larger batch.

L2L (arXiv 2002.05645) reports 45 % less memory and 40 % more throughput on a V100 of 16 GB, and of less than 8 GB at
batch 32.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _common import report, show
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from l2l_core import Relay, RelayConfig
from workbench.lessons.plain_training import StorageMeter

Batch = dict[str, torch.Tensor]
make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def make_model(args: argparse.Namespace) -> nn.Module:
    """Make an untrained BERT of the given size."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        intermediate_size=4 * args.width,
    )
    return BertForMaskedLM(config).train()


def make_batch(rows: int, length: int) -> Batch:
    """Random words; 15 % of them are to be found."""
    words = torch.randint(1000, 30_000, (rows, length))
    hidden = torch.rand(rows, length) < 0.15
    return {"input_ids": words.masked_fill(hidden, 103), "labels": words.masked_fill(~hidden, -100)}


class InCore:
    """Plain training with gradient accumulation, on the whole model at once."""

    def __init__(self, args: argparse.Namespace, precision: str) -> None:
        self.device = torch.device("cuda" if args.device == "cuda" else "cpu")
        self.model = make_model(args).to(self.device)
        self.optimizer = make_optimizer(self.model.parameters())
        self._bf16 = precision == "bf16"

    def step(self, batch: Batch, rows: int, recompute: bool) -> None:
        """Train on a batch, so many rows at a time."""
        (self.model.gradient_checkpointing_enable if recompute else self.model.gradient_checkpointing_disable)()
        parts = [
            {name: value.to(self.device) for name, value in zip(batch, part, strict=True)}
            for part in split(batch, rows)
        ]
        for part in parts:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
                loss = self.model(**part).loss / len(parts)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, batch: Batch, rows: int, recompute: bool) -> int:
        """Most bytes of a step on two micro-batches: every storage from the operation that makes it to its end."""
        few = {name: value[: 2 * rows] for name, value in batch.items()}
        state = [v for held in self.optimizer.state.values() for v in held.values() if isinstance(v, torch.Tensor)]
        meter = StorageMeter([*self.model.parameters(), *self.model.buffers(), *state])
        with meter:
            self.step(few, rows, recompute)
        return meter.peak


def split(batch: Batch, rows: int) -> list[tuple[torch.Tensor, ...]]:
    """Cut a batch into micro-batches of so many rows."""
    return list(zip(*(value.split(rows) for value in batch.values()), strict=True))


def largest_rows(in_core: InCore, batch: Batch, budget_bytes: float) -> int:
    """Rows of the largest micro-batch (1, 2, 4, ...) with which a step in core fits; two are tried, the rest is a line."""
    in_core.step({name: value[:1] for name, value in batch.items()}, 1, recompute=False)  # makes the optimizer's state
    one, two = (in_core.peak_bytes(batch, rows, recompute=False) for rows in (1, 2))
    if one > budget_bytes:
        raise SystemExit(f"in core a single row needs {one / 1e9:.2f} GB: give a larger --budget-gb")
    rows = 1
    while 2 * rows <= len(batch["labels"]) and one + (2 * rows - 1) * (two - one) <= budget_bytes:
        rows *= 2
    return rows


def ahead_of(args: argparse.Namespace) -> int:
    """Return how many layers are loaded ahead."""
    return int(args.device == "cuda") if args.ahead is None else args.ahead


def measure(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """All sides in one precision, in turn."""
    batch = make_batch(args.batch, args.length)
    in_core = InCore(args, precision)
    rows = largest_rows(in_core, batch, args.budget_gb * 1e9)
    peaks = {
        name: in_core.peak_bytes(batch, rows, name == "in core, recompute")
        for name in ("in core", "in core, recompute")
    }
    config = RelayConfig(micro_batches=args.batch // rows, ahead=ahead_of(args), stash=args.stash, precision=precision)  # type: ignore[arg-type]
    device = "cuda" if args.device == "cuda" else "cpu"
    with Relay(make_model(args), make_optimizer, device, config=config) as relay:
        keeping = relay.config = replace(config, resident=args.resident)
        room = max(0.0, args.share * peaks["in core"] - relay.step(batch).peak_device_bytes)
        settings = {"relay": config, "relay, keeps graphs": replace(keeping, keep=f"{room / 1e6:.0f} MB")}

        kept: dict[str, int] = {}

        def by_relay(name: str) -> float:
            relay.config = settings[name]
            relay.step(batch)  # metered, as any first step with other settings
            result = relay.step(batch)
            peaks[name], kept[name] = result.peak_device_bytes, result.trace.settings["keep"]
            return result.seconds

        def in_core_s(recompute: bool) -> float:
            began_s = time.perf_counter()
            in_core.step(batch, rows, recompute)
            return time.perf_counter() - began_s

        sides: dict[str, Callable[[], float]] = {
            "in core": partial(in_core_s, False),
            "in core, recompute": partial(in_core_s, True),
            **{name: partial(by_relay, name) for name in settings},
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, run in sides.items():
                seconds[name].append(run())
        speed = {name: args.batch / statistics.median(values) for name, values in seconds.items()}
        if args.large_batch:
            name, large = f"relay, batch {args.large_batch}", make_batch(args.large_batch, args.length)
            relay.config = replace(config, micro_batches=args.large_batch // rows)
            result = relay.step(large)
            peaks[name], speed[name] = result.peak_device_bytes, args.large_batch / result.seconds
    return {"rows": rows, "peak_bytes": peaks, "samples_per_s": speed, "seconds": seconds, "graphs_kept": kept}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--large-batch", type=int, default=256, help="of one more step by relay, which is metered; 0 for none"
    )
    parser.add_argument("--budget-gb", type=float, default=8.0, help="of the device, for micro-batches in core")
    parser.add_argument(
        "--share", type=float, default=0.55, help="of the memory in core, for the relay that keeps graphs"
    )
    parser.add_argument(
        "--resident", type=int, default=10, help="layers whose weights stay, for the relay that keeps graphs of so many"
    )
    parser.add_argument(
        "--ahead",
        type=int,
        help="layers loaded ahead; default 1 on a GPU, and 0 on a CPU, where copies and updates take the cores of compute",
    )
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--stash", default="device", choices=["device", "host"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()

    results = {}
    for precision in args.precisions:
        results[precision] = found = measure(args, precision)
        gc.collect()  # both models of this precision go before those of the next one come
        peaks, speed = found["peak_bytes"], found["samples_per_s"]
        print(f"{precision}, micro-batches of {found['rows']} rows; graphs kept: {found['graphs_kept']}")
        others = ("in core", "in core, recompute")
        header = (
            "side",
            "peak GB",
            "samples/s",
            *(f"memory / {o}" for o in others),
            *(f"throughput / {o}" for o in others),
        )
        show(
            header,
            [
                (
                    s,
                    peaks[s] / 1e9,
                    speed[s],
                    *(peaks[s] / peaks[o] for o in others),
                    *(speed[s] / speed[o] for o in others),
                )
                for s in speed
            ],
        )
    report("paper", {"settings": vars(args), "results": results})


if __name__ == "__main__":
    main()
