"""Adapters on a frozen base in float32, bfloat16, int8 and NF4: bytes on host and link, seconds behind a link, loss.

    python benchmarks/adapters.py          (10 to 20 minutes)
    python benchmarks/adapters.py --width 256 --steps 30 --seeds 1

LoRA of peft on GPT-2 blocks; int8 and NF4 (nested statistics) are layers of bitsandbytes, bfloat16 is cast when it is used.
Bytes: of a layer on the host without its adapters, per frozen parameter; and what a step loads and pushes, which must be
the formula: every layer twice, but once those two that are still in a slot, the shell once, and back nothing but adapters.
Seconds: a recorded step, the fastest of several, is replayed on a virtual clock behind a link on which the loads of the
float32 base take 0.4 and 2 times its step without a link. Loss: a small model is trained on text in float32, its base is
converted and frozen, and adapters are trained by relay; the same weights and windows per seed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import bitsandbytes
import peft
import torch
import torch.nn.functional as F
from _common import make_batch, make_gpt2, report, show
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from l2l_core import EmulatedDevice, Profile, Relay, RelayConfig, simulate
from workbench.lessons.corpus import Corpus, load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer, make_schedule, single_thread
from workbench.lessons.demo_values import Settings

RANK, LINKS = 8, (0.4, 2.0)


class BFloat16Linear(nn.Linear):
    """A linear layer in bfloat16 that computes in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Cast and multiply."""
        return F.linear(input, self.weight.to(input.dtype), self.bias)


def float32(weight: Tensor, bias: Tensor) -> nn.Module:
    """Return a linear layer with these weights."""
    return filled(nn.Linear(weight.shape[1], weight.shape[0]), nn.Parameter(weight), bias)


def bfloat16(weight: Tensor, bias: Tensor) -> nn.Module:
    """Return a linear layer with weights in bfloat16."""
    return filled(BFloat16Linear(weight.shape[1], weight.shape[0]), nn.Parameter(weight.bfloat16()), bias)


def int8(weight: Tensor, bias: Tensor) -> nn.Module:
    """Return a linear layer of 8-bit integers with a scale per row."""
    layer = bitsandbytes.nn.Linear8bitLt(*weight.shape[::-1], has_fp16_weights=False)
    return filled(layer, bitsandbytes.nn.Int8Params(weight, requires_grad=False), bias).to("cpu")  # converts them


def nf4(weight: Tensor, bias: Tensor) -> nn.Module:
    """Return a linear layer of 4-bit codes with nested statistics (QLoRA, arXiv 2305.14314)."""
    layer = bitsandbytes.nn.Linear4bit(*weight.shape[::-1], quant_type="nf4")
    codes = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    return filled(layer, codes, bias).to("cpu")


def filled(layer: nn.Linear, weight: nn.Parameter, bias: Tensor) -> nn.Module:
    """Give a layer its weights."""
    layer.weight, layer.bias = weight, nn.Parameter(bias.clone())
    return layer


BASES: dict[str, Callable[[Tensor, Tensor], nn.Module]] = {
    "float32": float32,
    "bfloat16": bfloat16,
    "int8": int8,
    "NF4": nf4,
}


def adapted(model: nn.Module, base: str, seed: int = 0) -> nn.Module:
    """Convert the blocks' matrices, freeze all, and attach adapters to the attention."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):  # GPT-2's linear layer, transposed
            model.set_submodule(name, BASES[base](module.weight.data.t().contiguous(), module.bias.data))
    model.requires_grad_(False)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["c_attn", "c_proj", "c_fc"])
    return peft.get_peft_model(model, config).train()  # type: ignore[arg-type]


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return AdamW over the adapters."""
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=rate)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="of the layers whose bytes and time are measured")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of the runs on text, before and with adapters")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text-layers", type=int, default=4)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # bitsandbytes warns in every forward that 8-bit layers compute in float16
    with single_thread():
        measured = {base: measure(base, args) for base in BASES}
        show_bytes(measured)
        seconds = behind_links(measured)
        losses = quality(args)
    kept = {base: {name: value for name, value in each.items() if name != "profile"} for base, each in measured.items()}
    report("adapters", {"arguments": vars(args), "measured": kept, "seconds": seconds, "quality": losses})


# -- bytes -------------------------------------------------------------------------------------------------------------


def measure(base: str, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a step, and a profile of the fastest."""
    plain = make_gpt2(args.layers, args.width, 32, dropout=0.0)
    frozen = sum(param.numel() for param in plain.transformer.h[0].parameters())
    model, config = adapted(plain, base), RelayConfig(micro_batches=2, stash="host")
    with Relay(model, adamw(model, 1e-4), EmulatedDevice(), config=config) as relay:
        results = [relay.step(make_batch(8, 32)) for _ in range(args.rounds + 2)][2:]
        layer, shell = relay.stack[0], relay.shell
        adapters = sum(aligned(p.nbytes) for p in layer.params if p.requires_grad)
        loaded = aligned(shell.nbytes) + (2 * args.layers - 2) * layer.nbytes
        pushed = args.layers * adapters
        last = results[-1]
        if (last.bytes_loaded, last.bytes_pushed) != (loaded, pushed):
            found = f"loaded {last.bytes_loaded:,} and pushed {last.bytes_pushed:,} bytes"
            raise SystemExit(f"{base}: {found}, and by formula {loaded:,} and {pushed:,}")
        best = min(results, key=lambda result: result.trace.span_s)
        return {
            "host_per_frozen": (layer.nbytes - adapters) / frozen,
            "loaded": loaded,
            "pushed": pushed,
            "slot": layer.nbytes,
            "step_s": best.trace.span_s,
            "profile": Profile.of(best.trace),
        }


def aligned(nbytes: int) -> int:
    """Return bytes in a slot, where each parameter begins at a multiple of 64."""
    return -(-nbytes // 64) * 64


def show_bytes(measured: dict[str, dict[str, Any]]) -> None:
    """Print the bytes of every base; the step's are equal to the formula."""
    full = measured["float32"]["loaded"]
    rows = [
        (
            base,
            f"{each['host_per_frozen']:.3f}",
            f"{each['slot'] / 1e6:.2f} MB",
            f"{each['loaded'] / 1e6:.1f} MB",
            f"{full / each['loaded']:.2f}",
            f"{each['pushed'] / 1e6:.2f} MB",
        )
        for base, each in measured.items()
    ]
    show(("base", "host bytes per frozen parameter", "slot", "loaded in a step", "fewer by", "pushed"), rows)


# -- seconds -----------------------------------------------------------------------------------------------------------


def behind_links(measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of a step behind links, on a virtual clock."""
    full = measured["float32"]
    config = RelayConfig(micro_batches=2, stash="host")
    seconds: dict[str, dict[str, float]] = {}
    for base, each in measured.items():
        seconds[base] = {"no link": each["step_s"]}
        for share in LINKS:
            rate = full["loaded"] / (share * full["step_s"])
            figures = {"h2d_bytes_per_s": rate, "d2h_bytes_per_s": rate}
            seconds[base][f"link of {share:g}"] = simulate(each["profile"], config, figures).span_s
    show(
        ("base", *seconds["float32"]), [(base, *(f"{s:.3f} s" for s in row.values())) for base, row in seconds.items()]
    )
    return seconds


# -- quality -----------------------------------------------------------------------------------------------------------


def quality(args: argparse.Namespace) -> dict[str, list[float]]:
    """Held-out losses of every base, by seed."""
    corpus, held_out = load_corpus(), {base: list[float]() for base in ("no adapters, float32", *BASES)}
    for seed in range(args.seeds):
        settings = Settings(layers=args.text_layers, rows=8, micro_batches=2, steps=args.steps, seed=seed)
        trained = train_base(corpus, settings)
        held_out["no adapters, float32"].append(judge(trained, corpus, settings))
        weights = trained.state_dict()
        for base in BASES:
            model = make_model(settings)
            model.load_state_dict(weights)
            held_out[base].append(train_adapters(adapted(model, base, seed), corpus, settings))
            print(f"seed {seed}, {base}: {held_out[base][-1]:.4f}", flush=True)
    full = held_out["float32"]
    rows = []
    for base, losses in held_out.items():
        gaps = [loss - other for loss, other in zip(losses, full, strict=True)]
        rows.append(
            (
                base,
                f"{statistics.fmean(losses):.4f}",
                f"{statistics.fmean(gaps):+.4f} ({min(gaps):+.4f} to {max(gaps):+.4f})",
            )
        )
    show(("base", "held-out loss, mean of seeds", "gap to float32, same seed"), rows)
    return held_out


def train_base(corpus: Corpus, settings: Settings) -> nn.Module:
    """Train all weights on text, in core."""
    model = make_model(settings)
    optimizer = make_optimizer(model, settings)
    schedule, windows = make_schedule(optimizer, settings), torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        model(**draw_batch(corpus.train, settings, windows)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def train_adapters(model: nn.Module, corpus: Corpus, settings: Settings) -> float:
    """Train adapters by relay on other windows; return the loss on held-out text."""
    windows = torch.Generator().manual_seed(10**5 + settings.seed)
    config = RelayConfig(micro_batches=settings.micro_batches)
    with Relay(model, adamw(model, settings.learning_rate), EmulatedDevice(), config=config) as relay:
        for _ in range(settings.steps):
            relay.step(draw_batch(corpus.train, settings, windows))
    return judge(model, corpus, settings)


@torch.no_grad()
def judge(model: Any, corpus: Corpus, settings: Settings) -> float:
    """Return the loss on held-out text."""
    judged = torch.Generator().manual_seed(10**6)
    draw = partial(draw_batch, corpus.held_out, replace(settings, rows=64), judged)
    return statistics.fmean(float(model(**draw()).loss) for _ in range(4))


if __name__ == "__main__":
    main()
