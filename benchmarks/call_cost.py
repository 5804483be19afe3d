"""Overhead of the relay beside the arithmetic: per layer, per micro-batch, and per layer and micro-batch.

    python benchmarks/call_cost.py
    python benchmarks/call_cost.py --widths 64 --threads 1 --rounds 9
    python benchmarks/call_cost.py --widths 64 --depths 8 24 --micro-batches 2 4

GPT-2 blocks without dropout, 2 x 64 tokens per micro-batch, fused AdamW. A step of L layers and K micro-batches is taken to
last a + b L + c K + d L K; the four are fitted to the least time of every (L, K). Sides, in turn in one process:

    plain           gradient accumulation in core, everything kept
    reentrant       the same with every block in `torch.utils.checkpoint`, use_reentrant=True
    non-reentrant   ... use_reentrant=False
    floor           a relay written by hand for this one model: copies, recompute, updates by layer, and no engine at all
    relay device    this relay, stash on the device
    relay host      this relay, stash on the host
    ... in turn     the same with ahead=0: the thread that computes makes copies and updates, too
    relay kept      this relay with all weights and all graphs on the device: nothing is loaded twice, nothing recomputed
    relay in core   the same depth first, one micro-batch after another: what config="auto" chooses where everything fits

On a machine with other work, --clock thread counts what the thread that computes spends of the processor (one thread only).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product

import torch
from _common import alternate, make_batch, make_gpt2, report, show, threads
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig

ROWS, LENGTH = 2, 64
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}
PARTS = ("ms per step", "per layer", "per micro-batch", "per layer and micro-batch")

make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
make_model = partial(make_gpt2, length=LENGTH, dropout=0.0)
Step = Callable[[], object]
Batch = Mapping[str, torch.Tensor]


def in_core(layers: int, width: int, batch: Batch, recompute: bool | None) -> Step:
    """A step of plain training; with recompute, reentrant or not, unless that is None."""
    model = make_model(layers, width)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    optimizer = make_optimizer(model.parameters())

    def step() -> None:
        micro_batches = batch["input_ids"].split(ROWS)
        for part in micro_batches:
            loss = model(input_ids=part, labels=part, use_cache=False).loss / len(micro_batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step.model = model  # type: ignore[attr-defined]
    return step


class Floor:
    """A relay of this model alone: every layer's weights are copied to one of two slots, and nothing is general.

    Args:
        layers, width: of the model.
        batch: to train on.
    """

    def __init__(self, layers: int, width: int, batch: Batch) -> None:
        self.model, self._batch = make_model(layers, width), batch
        self._blocks = list(self.model.transformer.h)
        self._homes = [[param.data for param in block.parameters()] for block in self._blocks]
        self._slots = [[torch.empty_like(home) for home in self._homes[0]] for _ in range(2)]
        self._optimizers = [make_optimizer(block.parameters()) for block in self._blocks]
        inside = {id(param) for block in self._blocks for param in block.parameters()}
        self._shell = make_optimizer(param for param in self.model.parameters() if id(param) not in inside)

    def __call__(self) -> None:
        micro_batches = self._batch["input_ids"].split(ROWS)
        body, count = self.model.transformer, len(micro_batches)
        positions = torch.arange(LENGTH)
        entered = [body.wte(part) + body.wpe(positions) for part in micro_batches]
        now, stash = [x.detach() for x in entered], []
        with torch.no_grad():
            for at, block in enumerate(self._blocks):
                self._load(at)
                stash.append(now)
                now = [self._output(block(x)) for x in now]
        grads = []
        for x, part in zip(now, micro_batches, strict=True):
            x.requires_grad_()
            logits = self.model.lm_head(body.ln_f(x))
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten()) / count
            loss.backward()
            grads.append(x.grad)
        for at, block in reversed(list(enumerate(self._blocks))):
            self._load(at)
            for k, x in enumerate(stash.pop()):
                x.requires_grad_()
                torch.autograd.backward(self._output(block(x)), grads[k])
                grads[k] = x.grad
            for param, home in zip(block.parameters(), self._homes[at], strict=True):
                param.data = home
            self._optimizers[at].step()
            self._optimizers[at].zero_grad()
        for x, grad in zip(entered, grads, strict=True):
            x.backward(grad)
        self._shell.step()
        self._shell.zero_grad()

    def _load(self, at: int) -> None:
        slot = self._slots[at % 2]
        for target, home, param in zip(slot, self._homes[at], self._blocks[at].parameters(), strict=True):
            target.copy_(home)
            param.data = target

    @staticmethod
    def _output(given: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        return given[0] if isinstance(given, tuple) else given

    def go_home(self) -> None:
        """Let the model have its own weights again."""
        for block, homes in zip(self._blocks, self._homes, strict=True):
            for param, home in zip(block.parameters(), homes, strict=True):
                param.data = home


def check_floor(width: int) -> None:
    """Refuse to measure a floor that does not train what plain training does."""
    batch = make_batch(2 * ROWS, LENGTH)
    plain, floor = in_core(2, width, batch, None), Floor(2, width, batch)
    plain(), floor(), floor.go_home()
    for one, other in zip(plain.model.parameters(), floor.model.parameters(), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def make_sides(layers: int, width: int, micro_batches: int, stack: ExitStack) -> dict[str, Step]:
    """Every side on a separate model, the relay after its metered step."""
    batch = make_batch(ROWS * micro_batches, LENGTH)
    sides: dict[str, Step] = {
        "plain": in_core(layers, width, batch, None),
        "reentrant": in_core(layers, width, batch, True),
        "non-reentrant": in_core(layers, width, batch, False),
        "floor": Floor(layers, width, batch),
    }
    kept = {"keep": layers, "resident": max(0, layers - 2)}
    ways = {"device": {}, "host": {"stash": "host"}, "kept": kept, "in core": {**kept, "schedule": "depth_first"}}
    ways |= {f"{name}, in turn": {**ways[name], "ahead": 0} for name in ("device", "host", "in core")}
    ways["in core, in turn"]["resident"] = layers - 1
    for name, options in ways.items():
        config = RelayConfig(micro_batches=micro_batches, **{"stash": "device", **options})  # type: ignore[arg-type]
        relay = stack.enter_context(Relay(make_model(layers, width), make_optimizer, EmulatedDevice(), config=config))
        relay.step(batch)
        sides[f"relay {name}"] = partial(relay.step, batch)
    return sides


def measure(
    width: int, depths: Sequence[int], counts: Sequence[int], rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, list[float]]]:
    """Least milliseconds of a step by side, for each (L, K) as "LxK"; all sides of one (L, K) in turn."""
    check_floor(width)
    least: dict[str, dict[str, list[float]]] = {}
    for layers, micro_batches in product(depths, counts):
        with ExitStack() as stack:
            seconds = alternate(make_sides(layers, width, micro_batches, stack), rounds, clock=clock)
        for side, values in seconds.items():
            least.setdefault(side, {})[f"{layers}x{micro_batches}"] = [1e3 * value for value in values]
    return least


def fit(values: Mapping[str, Sequence[float]]) -> list[float]:
    """Milliseconds a, b, c, d of a + b L + c K + d L K, by least squares through the least of every (L, K)."""
    pairs = [tuple(map(float, at.split("x"))) for at in values]
    unknowns = torch.tensor([[1, layers, count, layers * count] for layers, count in pairs])
    return torch.linalg.lstsq(unknowns, torch.tensor([[min(each)] for each in values.values()])).solution[:, 0].tolist()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 768])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--depths", type=int, nargs=2, default=[3, 12])
    parser.add_argument("--micro-batches", type=int, nargs=2, default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    args = parser.parse_args()

    results = {}
    for width, count in product(args.widths, args.threads):
        with threads(count):
            milliseconds = measure(width, args.depths, args.micro_batches, args.rounds, CLOCKS[args.clock])
        fits = {side: fit(values) for side, values in milliseconds.items()}
        largest = f"{max(args.depths)}x{max(args.micro_batches)}"
        least = {side: min(values[largest]) for side, values in milliseconds.items()}
        print(f"width {width}, {count} thread(s): milliseconds, and the step {largest} over that of others")
        header = ("side", *PARTS[1:], f"step {largest}", "/ plain", "/ non-reentrant", "/ floor")
        others = ("plain", "non-reentrant", "floor")
        show(header, [(s, *fits[s][1:], least[s], *(least[s] / least[o] for o in others)) for s in fits])
        results[f"{width}, {count} threads"] = {"fits_ms": fits, "milliseconds": milliseconds}
    report("call_cost", {"settings": vars(args), "results": results})


if __name__ == "__main__":
    main()
