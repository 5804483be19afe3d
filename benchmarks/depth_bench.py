"""Recipes of growing, dropping and skipping layers against shallow models at equal compute, with intervals over seeds.

    python benchmarks/depth_bench.py rates regime recipes        (all parts, about an hour on one core; resumable)
    python benchmarks/depth_bench.py regime --seeds 0 1 2 3 4    (more seeds of one part)
    python benchmarks/depth_bench.py --report                    (the tables of what has been run)
    python benchmarks/depth_bench.py rates regime recipes --quick    (a minute: a test that it works, without a result)
    python benchmarks/depth_bench.py regime recipes --device cuda --width 768 --heads 12 --context 1024 --rows 32 --depth 12 \\
        --steps 100000                                           (the size of arXiv 2511.04981; not run)

A GPT over bytes on the text of Python's standard library. Every run has the same rate: a warm-up, a constant rate, and a linear
decay over the last tenth (`WarmupStableDecay`). Runs of one depth and seed share one run at constant rate; each end is a
branch of it that decays. All parts are studies (`workbench.Study`), which continue where they stopped.

    rates    learning rates, one seed of its own, a third of the steps: the best one of each depth is used by the other parts
    regime   1, 2, 4, ... layers up to `--depth`, at a quarter, half and all of the compute of `--steps` deep steps. Is there a
             budget at which more layers beat fewer at equal compute?
    recipes  every recipe of `l2l_core.edits.RECIPES` for `--steps` steps, at the deep model's rate

A recipe is compared with training from scratch at equal tokens, and with shallow models at equal compute: their losses at the
three budgets, interpolated over the logarithm of compute. The gap is that between one layer and scratch at equal tokens. Held-out
loss in nats per byte, of 16 batches, after the last step. Compute is that of plain training: the matrix products of forward and
backward of the layers that run, attention's and the shell's included, without the relay's recompute.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import report, show, threads
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from l2l_core import RECIPES, Depth, Relay, RelayConfig, Schedule, WarmupStableDecay
from workbench import Study, Variant
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer
from workbench.lessons.demo_values import Settings
from workbench.study.recorded_study import RecordedStudy
from workbench.study.study_table import paired_interval

PARTS = ("rates", "regime", "recipes")
RATES = (3e-3, 6e-3, 1.2e-2, 2.4e-2)
RATE_SEED = 1000  # of the sweep; no other part uses it
HELD_OUT_SEED = 1_000_000
SHARES = (0.25, 0.5, 1.0)  # of the compute, at which depths are compared
Ends = dict[str, dict[int, tuple[float, float]]]  # by variant and seed: FLOP and loss at the end


class DepthBench:
    """The studies of one size of model."""

    def __init__(self, settings: Settings, depth: int, steps: int, device: str, held_out: int) -> None:
        self.settings, self.depth, self.steps, self.device = settings, depth, steps, device
        self.depths = [2**i for i in range(depth.bit_length()) if 2**i < depth] + [depth]
        size = f"{settings.width}x{depth}-{settings.context}x{settings.rows}-{steps}"
        self.folder = Path("out", "benchmarks", "depth_bench", size)
        self.corpus = load_corpus()
        judged = torch.Generator().manual_seed(HELD_OUT_SEED)
        self.held_out = [draw_batch(self.corpus.held_out, settings, judged) for _ in range(held_out)]
        self.flops = {layers: self._count_flops(layers) for layers in self.depths}

    # -- studies -------------------------------------------------------------------------------------------------------

    def rates(self, seeds: Sequence[int]) -> Study:
        steps = max(10, self.steps // 3)
        variants = {
            f"{layers} layers, {lr:g}": Variant(self._deep(layers, steps), {"lr": lr}, steps=steps)
            for layers in self.depths
            for lr in RATES
        }
        return self._study("rates", variants, [RATE_SEED])

    def regime(self, seeds: Sequence[int]) -> Study:
        best = self.best_rates()
        variants = {
            name: Variant(self._deep(layers, steps), {"lr": best[layers]}, steps=steps)
            for layers in self.depths
            for name, steps in self.ends_of(layers).items()
        }
        return self._study("regime", variants, seeds)

    def recipes(self, seeds: Sequence[int]) -> Study:
        lr = self.best_rates()[self.depth]
        rate = self._rate(self.steps)
        plans = {name: recipe.plan(0, self.steps, self.depth) for name, recipe in RECIPES.items() if name != "scratch"}
        return self._study("recipes", {name: Variant(plan + rate, {"lr": lr}) for name, plan in plans.items()}, seeds)

    def ends_of(self, layers: int) -> dict[str, int]:
        """Return the lengths of the runs of a depth: equal compute, and equal tokens."""
        full = self.flops[self.depth] / self.flops[layers] * self.steps
        ends = {f"{layers} layers, {share:g} of the compute": round(share * full) for share in SHARES}
        return ends if layers == self.depth else {**ends, f"{layers} layers, equal tokens": self.steps}

    def best_rates(self) -> dict[int, float]:
        """Return the learning rate of the sweep with the lowest loss, by depth."""
        ends = self.ends_in(Study.load(self.folder / "rates"))
        losses = {name: loss for name, by_seed in ends.items() for _, loss in by_seed.values()}
        return {layers: min(RATES, key=lambda lr: losses[f"{layers} layers, {lr:g}"]) for layers in self.depths}

    def _study(self, part: str, variants: dict[str, Variant], seeds: Sequence[int]) -> Study:
        return Study(
            self._make_relay,
            variants,
            seeds=list(seeds),
            steps=self.steps,
            batches=self._batches,
            held_out=self.held_out,
            folder=self.folder / part,
            evaluate_every=10**9,  # at the ends alone: before the decay losses of different runs say little
        )

    def _deep(self, layers: int, steps: int) -> Schedule:
        return Depth(layers, shrink="top", park=None) + self._rate(steps)

    def _rate(self, steps: int) -> Schedule:
        return WarmupStableDecay(steps, warmup=20 if self.steps >= 200 else 2, decay=steps // 10)

    def _make_relay(self, seed: int, lr: float) -> Relay:
        model = make_model(replace(self.settings, layers=self.depth, seed=seed))
        optimizer = make_optimizer(model, replace(self.settings, learning_rate=lr))
        return Relay(
            model, optimizer, device=self.device, config=RelayConfig(micro_batches=1, ahead=0, keep=self.depth)
        )

    def _batches(self, seed: int) -> Iterator[Any]:
        drawn = torch.Generator().manual_seed(seed)
        while True:
            yield draw_batch(self.corpus.train, self.settings, drawn)

    def _count_flops(self, layers: int) -> int:
        tokens = torch.zeros(self.settings.rows, self.settings.context, dtype=torch.long)
        # torch counts attention only where it is made of plain products
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            make_model(replace(self.settings, layers=layers))(input_ids=tokens, labels=tokens).loss.backward()
        return counter.get_total_flops()

    # -- results -------------------------------------------------------------------------------------------------------

    def show(self) -> dict[str, Any]:
        """Print the tables of the finished runs, and return them."""
        found: dict[str, Any] = {}
        if not (self.folder / "regime" / "study.json").exists():
            return found
        print(f"learning rates: {self.best_rates()}")
        regime = self.ends_in(Study.load(self.folder / "regime"))
        deep = regime[f"{self.depth} layers, 1 of the compute"]
        rows = []
        for share in SHARES:
            base = regime[f"{self.depth} layers, {share:g} of the compute"]
            for layers in self.depths:
                mine = regime[f"{layers} layers, {share:g} of the compute"]
                rows.append((f"{share:g}", layers, *_summary(mine), *_difference(mine, base)))
        header = ("compute", "layers", "n", "loss", f"minus {self.depth} layers", "95 % interval")
        show(header, rows)
        found["regime"] = [dict(zip(header, row, strict=True)) for row in rows]
        if (self.folder / "recipes" / "study.json").exists():
            recipes = self.ends_in(Study.load(self.folder / "recipes"))
            found["recipes"] = self._show_recipes({"scratch": deep, **recipes}, regime, deep)
        return found

    def _show_recipes(self, recipes: Ends, regime: Ends, deep: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
        shallow = regime["1 layers, equal tokens"]
        lines = [
            regime[f"{layers} layers, {share:g} of the compute"] for layers in self.depths[:-1] for share in SHARES
        ]
        header = [
            "recipe",
            "n",
            "loss",
            "compute",
            "minus scratch, equal tokens",
            "95 % interval",
            "share of the gap closed",
        ]
        for layers in self.depths[:-1]:
            header += [f"minus {layers} layer(s), equal compute", "95 % interval"]
        rows = []
        for name, mine in recipes.items():
            seeds = [seed for seed in mine if all(seed in each for each in (deep, shallow, *lines))]
            if not seeds:
                continue
            gap = paired_interval([shallow[s][1] for s in seeds], [deep[s][1] for s in seeds])
            closed = "no gap"  # none that an interval shows
            if gap is not None and gap[0] > 0:
                parts = [statistics.fmean(shallow[s][1] - each[s][1] for s in seeds) for each in (mine, deep)]
                closed = f"{parts[0] / parts[1]:.2f}"
            compute = statistics.fmean(mine[s][0] / deep[s][0] for s in seeds)
            row = [name, *_summary(mine), f"{compute:.2f}", *_difference(mine, deep), closed]
            for layers in self.depths[:-1]:
                row += _difference(mine, {s: (0.0, self._line(regime, layers, s, mine[s][0])) for s in seeds})
            rows.append(row)
        show(tuple(header), [tuple(row) for row in rows])
        return [{"header": header, "row": row} for row in rows]

    def ends_in(self, study: RecordedStudy) -> Ends:
        """Return compute and loss at the end of every finished run."""
        found: Ends = {name: {} for name in study.names}
        for (name, seed), rows in study.frame(seconds=False).groupby(["variant", "seed"]):
            if study.is_complete(name, seed):
                end = rows[rows.split == "held out"].iloc[-1]
                found[name][int(seed)] = (float(end.flop), float(end.loss))
        return found

    def _line(self, regime: Ends, layers: int, seed: int, flop: float) -> float:
        """Return the loss of a shallow model at an amount of compute, between its ends."""
        ends = sorted(regime[f"{layers} layers, {share:g} of the compute"][seed] for share in SHARES)
        return float(np.interp(np.log(flop), np.log([end for end, _ in ends]), [loss for _, loss in ends]))


def _summary(ends: dict[int, tuple[float, float]]) -> tuple[int, str]:
    losses = [loss for _, loss in ends.values()]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    return len(losses), f"{statistics.fmean(losses):.4f}{spread}" if losses else "–"


def _difference(mine: dict[int, tuple[float, float]], base: dict[int, tuple[float, float]]) -> tuple[str, str]:
    """Return the mean difference of losses, paired by seed, and its interval."""
    seeds = [seed for seed in mine if seed in base]
    if not seeds or mine is base:
        return "–", "–"
    values, others = [mine[s][1] for s in seeds], [base[s][1] for s in seeds]
    interval = paired_interval(values, others)
    text = "fewer than 3 seeds" if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"
    return f"{statistics.fmean(values) - statistics.fmean(others):+.4f}", text


def main() -> None:
    """Train what has not been trained yet, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="in this order; default all")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny model, three seeds, few steps")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000, help="of the deep model")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.quick:
        args.context, args.rows, args.depth, args.steps = 16, 4, 4, 20
    settings = Settings(layers=args.depth, width=args.width, heads=args.heads, context=args.context, rows=args.rows)
    with threads(1):
        bench = DepthBench(settings, args.depth, args.steps, args.device, 2 if args.quick else 16)
        for part in [] if args.report else args.parts or PARTS:
            getattr(bench, part)(args.seeds).run()
        tables = bench.show()
    report("depth_bench_quick" if args.quick else "depth_bench", {"arguments": vars(args), **tables})


if __name__ == "__main__":
    main()
