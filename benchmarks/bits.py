"""Savings of fewer bits, and their cost in time and quality: of an optimizer's state, and of gradients on the wire.

    python benchmarks/bits.py          (10 to 20 minutes)
    python benchmarks/bits.py --steps 20 --seeds 2 --width 256
    python benchmarks/bits.py --wire   (5 to 10 minutes; gradients alone)

Bytes: host bytes per parameter after a step of AdamW on GPT-2 blocks, by the relay's ledger (masters and state), and by
the process: what it holds for itself alone beyond the same run with plain SGD, which has no state, plus 4 for the master.
Each kind has a separate process. Time: one update of a layer's parameters on one thread, all kinds in turn, over fused
AdamW in float32. Quality: the demo's model and text by relay, the same weights and windows per seed; a kind's gap to
float32 is the mean over seeds of differences with the same seed, and stands beside the spread of float32 over seeds.
`bf16 and weights` has masters of bfloat16 besides. `..., to nearest` is what is not done: second moments, or weights,
that are rounded to nearest. Gradients (`--wire`): runs with fused AdamW in float32, whose gradients are copied to the
host as set by `RelayConfig(compress=...)`: bytes are those that a step pushes. Without bitsandbytes the rows of 8 bits
are left out, with a note.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
from _common import alternate, make_batch, make_gpt2, ratio, report, show
from torch import nn
from torch.optim import AdamW, Optimizer

from l2l_core import Compress, EmulatedDevice, Relay, RelayConfig, in_bf16
from workbench.lessons.corpus import Corpus, load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_schedule, single_thread
from workbench.lessons.demo_values import Settings

Params = Iterable[nn.Parameter]
MASTER_BYTES = 4


class ToNearest(AdamW):
    """AdamW whose moments are rounded to the nearest bfloat16 after every step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and round."""
        loss = super().step(closure)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        return loss


class WeightsToNearest(in_bf16(AdamW)):  # type: ignore[misc]
    """AdamW with its state in bfloat16, whose weights are rounded to the nearest bfloat16 after every step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and round."""
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(param.bfloat16())
        return loss


def eight_bit(params: Params, **settings: Any) -> Optimizer:
    """AdamW of bitsandbytes."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **settings)


KINDS: dict[str, Callable[..., Optimizer]] = {
    "float32": partial(AdamW, fused=True),
    "bf16": partial(in_bf16(AdamW), fused=True),
    "bf16 and weights": partial(in_bf16(AdamW, weights=True), fused=True),
    "8-bit": eight_bit,
}
NOT_DONE = {"bf16, to nearest": ToNearest, "bf16 and weights, to nearest": WeightsToNearest}

WIRES = {"float32": None} | {
    f"{form}, {'feedback' if feedback else 'at random'}": Compress(form, feedback)  # type: ignore[arg-type]
    for form in ("bf16", "int8", "int4")
    for feedback in (True, False)
}


def in_its_type(model: nn.Module, make: Callable[..., Optimizer]) -> nn.Module:
    """Give the model the type of weights that an optimizer of this kind keeps."""
    return model.bfloat16() if getattr(getattr(make, "func", make), "rounds_weights", False) else model


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768, help="of the layers whose bytes and time are measured")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=150, help="of the runs on text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text-layers", type=int, default=6)
    parser.add_argument("--wire", action="store_true", help="measure gradients on the wire, and nothing else")
    parser.add_argument("--bytes-of", help="measure this kind's bytes in this process, print them and end")
    args = parser.parse_args()
    if args.bytes_of:
        print(json.dumps(measure_bytes(args.bytes_of, args.layers, args.width)))
        return
    if args.wire:
        with single_thread():
            pushed = {name: bytes_pushed(compress, args) for name, compress in WIRES.items()}
            make = KINDS["float32"]
            losses = quality({name: partial(train, make, compress=compress) for name, compress in WIRES.items()}, args)
        show(("gradients", "bytes pushed in a step"), [(name, f"{nbytes:,}") for name, nbytes in pushed.items()])
        report("bits_wire", {"arguments": vars(args), "pushed": pushed, "quality": losses})
        return
    kinds = dict(KINDS)
    if importlib.util.find_spec("bitsandbytes") is None:
        print('bitsandbytes is not installed: no rows of 8 bits. pip install -c constraints.txt -e ".[bits]"\n')
        del kinds["8-bit"]
    results: dict[str, Any] = {"arguments": vars(args)}
    with single_thread():
        results["bytes"] = bytes_per_parameter(kinds, args)
        results["time"] = times(kinds, args.width, args.rounds)
        runs = {kind: partial(train, make) for kind, make in (kinds | NOT_DONE).items()}
        results["quality"] = quality(runs, args)
    report("bits", results)


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_per_parameter(kinds: Iterable[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Ledger and process, each kind in a separate process."""
    measured = {}
    for kind in ("SGD", *kinds):
        command = [
            sys.executable,
            __file__,
            "--bytes-of",
            kind,
            "--layers",
            str(args.layers),
            "--width",
            str(args.width),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        measured[kind] = json.loads(done.stdout.splitlines()[-1])
    base = measured.pop("SGD")
    rows = {
        kind: {
            "ledger": found["ledger_bytes"] / found["params"],
            "process": MASTER_BYTES + (found["process_bytes"] - base["process_bytes"]) / found["params"],
        }
        for kind, found in measured.items()
    }
    print(f"{base['params']:,} parameters")
    show(
        ("state", "host bytes per parameter, ledger", "process"),
        [(k, f"{r['ledger']:.2f}", f"{r['process']:.2f}") for k, r in rows.items()],
    )
    return rows


def measure_bytes(kind: str, layers: int, width: int) -> dict[str, int]:
    """Bytes of masters and state after a step, and what a second step leaves in the process."""
    torch.set_num_threads(1)
    make = torch.optim.SGD if kind == "SGD" else KINDS[kind]
    if kind == "8-bit":
        importlib.import_module("bitsandbytes")  # its code is no state
    before = own_bytes()
    model = in_its_type(make_gpt2(layers, width, 32), make)
    params = sum(param.numel() for param in model.parameters())
    # Serial, so that as many buffers of gradients are there with every kind
    with Relay(model, partial(make, lr=1e-4), EmulatedDevice(), config=RelayConfig(ahead=0)) as relay:
        for _ in range(2):
            relay.step(make_batch(1, 32))
        held = relay.host.by_category()
        return {
            "params": params,
            "ledger_bytes": held["weights"] + held.get("optimizer", 0),
            "process_bytes": own_bytes() - before,
        }


def own_bytes() -> int:
    """Return the private bytes of the process after releasing free memory."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_full_info().uss


# -- time --------------------------------------------------------------------------------------------------------------


def times(kinds: dict[str, Callable[..., Optimizer]], width: int, rounds: int) -> dict[str, Any]:
    """Seconds of one update of a layer, and over float32."""
    layer = make_gpt2(1, width, 32).transformer.h[0]
    optimizers = {}
    for kind, make in kinds.items():
        params = list(in_its_type(copy.deepcopy(layer), make).parameters())
        for param in params:
            param.grad_dtype = torch.float32  # as in a relay
            param.grad = torch.full_like(param, 1e-3, dtype=torch.float32)
        optimizers[kind] = make(params, lr=1e-4)
    seconds = alternate({kind: each.step for kind, each in optimizers.items()}, rounds, warmup=2)
    ratios = {kind: ratio(seconds, kind, "float32") for kind in kinds}
    numel = sum(param.numel() for param in layer.parameters())
    print(f"one update of {numel:,} parameters, one thread")
    show(
        ("state", "ms", "over float32", "min", "max"),
        [(k, f"{1e3 * statistics.median(seconds[k]):.1f}", *(f"{x:.2f}" for x in ratios[k].values())) for k in kinds],
    )
    return {"params": numel, "seconds": seconds, "over_float32": ratios}


# -- quality -----------------------------------------------------------------------------------------------------------


Train = Callable[[Corpus, Settings], float]  # gives the held-out loss


def quality(kinds: dict[str, Train], args: argparse.Namespace) -> dict[str, list[float]]:
    """Held-out losses of every kind, by seed."""
    corpus = load_corpus()
    held_out: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in range(args.seeds):
        settings = Settings(layers=args.text_layers, rows=8, micro_batches=2, steps=args.steps, seed=seed)
        for kind, run in kinds.items():
            held_out[kind].append(run(corpus, settings))
            print(f"seed {seed}, {kind}: {held_out[kind][-1]:.4f}", flush=True)
    base = held_out["float32"]
    rows = []
    for kind, losses in held_out.items():
        gaps = [loss - other for loss, other in zip(losses, base, strict=True)]
        gap = "" if kind == "float32" else f"{statistics.fmean(gaps):+.4f} ({min(gaps):+.4f} to {max(gaps):+.4f})"
        rows.append((kind, f"{statistics.fmean(losses):.4f}", f"{statistics.stdev(losses):.4f}", gap))
    print()
    show(("state", "held-out loss, mean of seeds", "spread of seeds (sd)", "gap to float32, same seed"), rows)
    return held_out


def bytes_pushed(compress: Compress | None, args: argparse.Namespace) -> int:
    """Bytes of gradients that one step sends to the host."""
    settings = Settings(layers=args.text_layers, rows=8, micro_batches=2)
    config = RelayConfig(micro_batches=settings.micro_batches, compress=compress)
    with Relay(make_model(settings), device=EmulatedDevice(), config=config) as relay:
        windows = torch.Generator().manual_seed(0)
        return relay.step(draw_batch(load_corpus().train, settings, windows)).bytes_pushed


def train(
    make: Callable[..., Optimizer], corpus: Corpus, settings: Settings, compress: Compress | None = None
) -> float:
    """Train by relay; the loss on held-out text."""
    windows = torch.Generator().manual_seed(settings.seed)
    model = in_its_type(make_model(settings), make)
    optimizer = make(
        model.parameters(), lr=settings.learning_rate
    )  # second moments of a thousand steps: beta2 is 0.999
    config = RelayConfig(micro_batches=settings.micro_batches, compress=compress)
    with Relay(model, optimizer, EmulatedDevice(), config=config) as relay:
        schedule = make_schedule(relay.optimizer, settings)
        for _ in range(settings.steps):
            relay.step(draw_batch(corpus.train, settings, windows))
            schedule.step()
        judged, settings = torch.Generator().manual_seed(10**6), replace(settings, rows=64)
        return statistics.fmean(relay.evaluate(draw_batch(corpus.held_out, settings, judged)) for _ in range(4))


if __name__ == "__main__":
    main()
