"""Relay against in-core training with activation recompute: the same model, batch, optimizer and micro-batches.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --precision bf16     (in core: autocast; also against the float32 relay)

12 GPT-2 blocks 768 wide, 4 micro-batches of 4 x 128 tokens, fused AdamW. All sides run in turn in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from _common import alternate, medians, ratio, report
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import EmulatedDevice, Relay, RelayConfig

ROWS, LENGTH, MICRO_BATCHES, VOCABULARY = 4, 128, 4, 256


def make_model(layers: int, width: int) -> GPT2LMHeadModel:
    """A GPT-2 with a byte vocabulary, so that the blocks are what is measured."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=width,
            n_layer=layers,
            n_head=width // 64,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).train()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--stash", default="device", choices=["device", "host"])
    args = parser.parse_args()

    tokens = torch.randint(VOCABULARY, (ROWS * MICRO_BATCHES, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    plain = make_model(args.layers, args.width)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = make_optimizer(plain.parameters())

    def in_core() -> None:
        for part in tokens.split(ROWS):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                loss = plain(input_ids=part, labels=part, use_cache=False).loss / MICRO_BATCHES
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with ExitStack() as stack:
        sides: dict[str, Callable[[], object]] = {"in core": in_core}
        for precision in dict.fromkeys((args.precision, "fp32")):
            config = RelayConfig(micro_batches=MICRO_BATCHES, stash=args.stash, precision=precision)
            model = make_model(args.layers, args.width)
            relay = stack.enter_context(Relay(model, make_optimizer, EmulatedDevice(), config=config))
            relay.step(batch)  # metered
            sides[f"relay {precision}"] = partial(relay.step, batch)
        seconds = alternate(sides, args.rounds)
    mine = f"relay {args.precision}"
    ratios = {f"{mine} / {other}": ratio(seconds, mine, other) for other in seconds if other != mine}
    report(f"step_time_{args.precision}", {"settings": vars(args), "median_s": medians(seconds), "ratios": ratios})


if __name__ == "__main__":
    main()
