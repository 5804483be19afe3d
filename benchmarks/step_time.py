"""Relay against in-core training with activation recompute: the same model, batch, optimizer and micro-batches.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --keep               (everything fits: no recompute)
    python benchmarks/step_time.py --precision bf16     (in core: autocast; also both sides in float32)
    python benchmarks/step_time.py --precision bf16 --dropout 0 --rounds 5

12 GPT-2 blocks 768 wide, 4 micro-batches of 4 x 128 tokens, fused AdamW. All sides run in turn in one process; the relay
with copies and updates beside compute (ahead=1), and with ahead=0, where the thread that computes makes them. With --keep
the relay runs depth first and all weights stay, which is what config="auto" chooses where everything fits; in core is
plain accumulation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from _common import alternate, make_batch, make_gpt2, medians, ratio, report, show

from l2l_core import EmulatedDevice, Relay, RelayConfig

RELAYS = {"relay": 1, "relay in turn": 0}  # layers ahead
make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def in_core(args: argparse.Namespace, batch: dict[str, torch.Tensor], precision: str) -> Callable[[], None]:
    """A step of plain training: gradient accumulation, with activation recompute unless everything is kept."""
    model = make_gpt2(args.layers, args.width, args.length, args.dropout)
    if not args.keep:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(model.parameters())

    def step() -> None:
        for part in batch["input_ids"].split(args.rows):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(input_ids=part, labels=part, use_cache=False).loss / args.micro_batches
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def settings(args: argparse.Namespace, precision: str, ahead: int) -> RelayConfig:
    """The relay's."""
    config = RelayConfig(micro_batches=args.micro_batches, stash=args.stash, precision=precision, ahead=ahead)
    stays = {"keep": args.layers, "resident": max(0, args.layers - ahead - 1), "schedule": "depth_first"}
    return replace(config, **stays) if args.keep else config  # type: ignore[arg-type]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--stash", default="device", choices=["device", "host"])
    parser.add_argument("--keep", action="store_true", help="all graphs and weights")
    args = parser.parse_args()

    batch = make_batch(args.rows * args.micro_batches, args.length)
    sides: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for precision in dict.fromkeys((args.precision, "fp32")):
            sides[f"in core {precision}"] = in_core(args, batch, precision)
            for name, ahead in RELAYS.items():
                model = make_gpt2(args.layers, args.width, args.length, args.dropout)
                relay = Relay(model, make_optimizer, EmulatedDevice(), config=settings(args, precision, ahead))
                stack.enter_context(relay).step(batch)  # metered
                sides[f"{name} {precision}"] = partial(relay.step, batch)
        seconds = alternate(sides, args.rounds)
    pairs = [(f"{name} {p}", f"in core {p}") for p in dict.fromkeys((args.precision, "fp32")) for name in RELAYS]
    if args.precision != "fp32":
        pairs += [(f"{side} {args.precision}", f"{side} fp32") for side in (*RELAYS, "in core")]
    ratios = {f"{mine} / {other}": ratio(seconds, mine, other) for mine, other in pairs}
    show(("side", "median s per step"), medians(seconds).items())
    show(("ratio", "median", "min", "max"), [(name, *spread.values()) for name, spread in ratios.items()])
    name = f"step_time_keep_{args.precision}" if args.keep else f"step_time_{args.precision}"
    report(name, {"settings": vars(args), "median_s": medians(seconds), "ratios": ratios})


if __name__ == "__main__":
    main()
