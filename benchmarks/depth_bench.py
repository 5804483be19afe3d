"""Recipes of growing, dropping, skipping and looping layers against shallow models at equal compute, with intervals over seeds.

    python benchmarks/depth_bench.py                             (all parts; hours on one core; resumable)
    python benchmarks/depth_bench.py regime --seeds 0 1 2 3 4    (more seeds of one part)
    python benchmarks/depth_bench.py --width 32 --depth 4 --steps 4000    (another size)
    python benchmarks/depth_bench.py --report                    (the tables of what has been run)
    python benchmarks/depth_bench.py --report --keep             (add what has been run to the records in the repository)
    python benchmarks/depth_bench.py --quick                     (two minutes: a test that it works, without a result)
    python benchmarks/depth_bench.py regime recipes --device cuda --width 768 --heads 12 --context 1024 --rows 32 --depth 12 \\
        --steps 100000                                           (the size of arXiv 2511.04981; not run)

A GPT over bytes on the text of Python's standard library. Every run has the same rate: a warm-up, a constant rate, and a linear
decay over the last tenth (`WarmupStableDecay`). Runs of one depth and seed share one run at constant rate; each end is a
branch of it that decays. All parts are studies (`workbench.Study`), which continue where they stopped. Seeds that are in the
repository, in `benchmarks/depth_records`, are not run again.

    rates    learning rates, one seed of its own, a third of the steps: the best one of each depth is used by the other parts
    regime   1, 2, 4, ... layers up to `--depth`, at 1/16 to all of the compute of `--steps` deep steps. Is there a budget at
             which more layers beat fewer at equal compute?
    recipes  every recipe of `l2l_core.edits.RECIPES` for a quarter, half and all of the steps, at the deep model's rate; growth
             by factors of four and eight; the rate warmed up again in the middle, with growth there and without
    mup      rates of one narrow layer and of all depths by `mup_scaling`, and late growth from one layer and none with them
    loops    a quarter of the layers, run four times: `LOOPED_RECIPES`, and the same layers run once and twice

A recipe is compared with training from scratch at equal tokens, and with shallow models at equal compute: their losses at the
ends of the regime, interpolated over the logarithm of compute. The gap is that between one layer and scratch at equal tokens.
Held-out loss in nats per byte, of 16 batches, after the last step. Compute is that of plain training: the matrix products of
forward and backward of the layers that run, attention's and the shell's included, without the relay's recompute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _common import report, threads
from _depth_tables import Ends, Lines, Table, show_rates, show_recipes, show_regime
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2LMHeadModel

from l2l_core import LOOPED_RECIPES, RECIPES, Depth, Relay, RelayConfig, Schedule, WarmupStableDecay, mup_scaling
from workbench import Study, Variant
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer
from workbench.lessons.demo_values import Settings

RATES = (3e-3, 6e-3, 1.2e-2, 2.4e-2)
RATE_SEED = 1000  # of the sweeps; no other part uses it
HELD_OUT_SEED = 1_000_000
SHARES = (0.25, 0.5, 1.0)  # of the compute, at which depths are compared; of the steps, for recipes
SHALLOW_SHARES = (
    0.0625,
    0.125,
    *SHARES,
)  # of shallow models: recipes with a quarter of the steps need less than that of compute
FACTORS = (4, 8)  # of growth, beside the two of the recipes
BASE = {"layers": 1, "width": 16, "heads": 2}  # of muP
BRANCH_ENDS = ("attn.c_proj", "mlp.c_proj")
LOOPS = 4


class LoopedGPT(nn.Module):
    """The blocks of a GPT, run `n_loops` times one after the other."""

    def __init__(self, gpt: GPT2LMHeadModel, loops: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.norm = gpt.transformer.wte, gpt.transformer.wpe, gpt.transformer.ln_f
        self.layers, self.head, self.n_loops = gpt.transformer.h, gpt.lm_head, loops

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits, (rows, context, 256)."""
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for _ in range(self.n_loops):
            for layer in self.layers:
                hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class DepthBench:
    """The studies of one size of model."""

    def __init__(self, settings: Settings, args: argparse.Namespace) -> None:
        depth, steps = args.depth, args.steps
        self.settings, self.depth, self.steps, self.device = settings, depth, steps, args.device
        self.shares, self.names = args.shares, args.recipes
        self.depths = [2**i for i in range(depth.bit_length()) if 2**i < depth] + [depth]
        self.looped = max(1, depth // LOOPS)  # layers of the looped model
        size = f"{settings.width}x{depth}-{settings.context}x{settings.rows}-{steps}"
        self.folder = Path("out", "benchmarks", "depth_bench", size)
        self.records = Path(__file__).with_name("depth_records") / f"{size}.json"
        self.kept: dict[str, Any] = json.loads(self.records.read_text()) if self.records.exists() else {}
        self.corpus = load_corpus()
        judged = torch.Generator().manual_seed(HELD_OUT_SEED)
        self.held_out = [draw_batch(self.corpus.held_out, settings, judged) for _ in range(2 if args.quick else 16)]
        self.flops = {layers: self._count_flops(self._make_model(layers=layers)) for layers in self.depths}

    # -- studies -------------------------------------------------------------------------------------------------------

    def rates(self, seeds: Sequence[int]) -> None:
        """Sweep the learning rates of all depths."""
        self._sweep("rates", {_name(layers): {"layers": layers} for layers in self.depths})

    def regime(self, seeds: Sequence[int]) -> None:
        """Train all depths with equal compute, and with equal tokens."""
        variants = {
            name: Variant(
                self._rate(steps), {"lr": self.best_rate("rates", _name(layers)), "layers": layers}, steps=steps
            )
            for layers in self.depths
            for name, steps in self.ends_of(layers).items()
        }
        self._run("regime", variants, seeds)

    def recipes(self, seeds: Sequence[int]) -> None:
        """Train by every recipe, at three budgets."""
        factors = {"lr": self.best_rate("rates", _name(self.depth)), "layers": self.depth}
        variants = {
            f"{name}, {share:g} of the steps": Variant(plan + self._rate(steps), factors, steps=steps)
            for share in self.shares
            for steps in [round(share * self.steps)]
            for name, plan in self._plans(steps).items()
        }
        restart = self._rate(self.steps, [self.steps // 2])
        for name in ("scratch", "doubling once") if 1 in self.shares else ():
            plan = RECIPES[name].plan(0, self.steps, self.depth)
            variants[f"{name}, warmed up again, 1 of the steps"] = Variant(plan + restart, factors)
        self._run("recipes", variants, seeds)

    def mup(self, seeds: Sequence[int]) -> None:
        """Sweep the rates of one narrow layer and of all depths by muP; train by the late recipes with the narrow one's."""
        sizes = {"base": BASE, **{_name(layers): {"layers": layers} for layers in self.depths}}
        self._sweep("mup_rates", {name: {**size, "mup": True} for name, size in sizes.items()})
        factors = {"lr": self.best_rate("mup_rates", "base"), "layers": self.depth, "mup": True}
        plans = {
            name: RECIPES[name].plan(0, self.steps, self.depth)
            for name in ("scratch", "one layer, late", "zero layers, late")
        }
        variants = {name: Variant(plan + self._rate(self.steps), factors) for name, plan in plans.items()}
        self._run("mup", variants, seeds)

    def loops(self, seeds: Sequence[int]) -> None:
        """Train a quarter of the layers that run four times, by the recipes for loops, and run once and twice."""
        counts = [1, 2, LOOPS]
        self._sweep("loop_rates", {f"{loops} loops": {"layers": self.looped, "loops": loops} for loops in counts})
        flops = {n: self._count_flops(self._make_model(layers=self.looped, loops=n)) for n in counts}
        variants: dict[str, Variant] = {}
        for loops in counts:
            factors = {"lr": self.best_rate("loop_rates", f"{loops} loops"), "layers": self.looped, "loops": loops}
            if loops == LOOPS:
                plans = {name: recipe.plan(0, self.steps, LOOPS) for name, recipe in LOOPED_RECIPES.items()}
                variants |= {name: Variant(plan + self._rate(self.steps), factors) for name, plan in plans.items()}
                continue
            ends = {
                f"{share:g} of the compute": round(share * self.steps * flops[LOOPS] / flops[loops]) for share in SHARES
            }
            for end, steps in {**ends, "equal tokens": self.steps}.items():
                variants[f"{loops} loops, {end}"] = Variant(self._rate(steps), factors, steps=steps)
        self._run("loops", variants, seeds)

    def ends_of(self, layers: int) -> dict[str, int]:
        """Return the lengths of the runs of a depth: equal compute, and equal tokens."""
        full = self.flops[self.depth] / self.flops[layers] * self.steps
        shares = SHARES if layers == self.depth else SHALLOW_SHARES
        ends = {f"{_name(layers)}, {share:g} of the compute": round(share * full) for share in shares}
        return ends if layers == self.depth else {**ends, f"{_name(layers)}, equal tokens": self.steps}

    def best_rate(self, sweep: str, name: str) -> float:
        """Return the learning rate of a sweep with the lowest loss."""
        ends = self.ends_in(sweep)
        return min(RATES, key=lambda lr: ends[f"{name}, {lr:g}"][RATE_SEED][1])

    def ends_in(self, part: str) -> Ends:
        """Return compute and loss at the end of every finished run of a part, here and in the repository's records."""
        kept = self.kept.get(part, {})
        found: Ends = {name: {int(seed): tuple(end) for seed, end in ends.items()} for name, ends in kept.items()}
        if not (self.folder / part / "study.json").exists():
            return found
        study = Study.load(self.folder / part)
        for (name, seed), rows in study.frame(seconds=False).groupby(["variant", "seed"]):
            if study.is_complete(name, seed):
                end = rows[rows.split == "held out"].iloc[-1]
                found.setdefault(name, {})[int(seed)] = (float(end.flop), float(end.loss))
        return {name: found.get(name, {}) for name in dict.fromkeys([*study.names, *found])}

    def keep(self) -> None:
        """Add the finished runs to the records in the repository."""
        parts = {part: self.ends_in(part) for part in (*PARTS, "mup_rates", "loop_rates") if self._has(part)}
        self.records.parent.mkdir(exist_ok=True)
        lines = {
            part: {name: dict(sorted(runs.items())) for name, runs in ends.items() if runs}
            for part, ends in parts.items()
        }
        self.records.write_text(json.dumps(lines, indent=1) + "\n")
        print(f"kept in {self.records}")

    def _plans(self, steps: int) -> dict[str, Schedule]:
        """Return the schedules of a budget; training from scratch is in the regime."""
        plans = {name: recipe.plan(0, steps, self.depth) for name, recipe in RECIPES.items() if name in self.names}
        for factor in FACTORS:
            if factor <= self.depth:
                depths = {0: self.depth // factor, steps // 2: self.depth}
                plans[f"growth by {factor}, once"] = Depth(depths, "top", "top")
        return plans

    def _sweep(self, part: str, models: dict[str, dict[str, Any]]) -> None:
        steps = max(10, self.steps // 3)
        variants = {
            f"{name}, {lr:g}": Variant(self._rate(steps), {**factors, "lr": lr}, steps=steps)
            for name, factors in models.items()
            for lr in RATES
        }
        self._run(part, variants, [RATE_SEED])

    def _run(self, part: str, variants: dict[str, Variant], seeds: Sequence[int]) -> None:
        kept = self.kept.get(part, {})
        left = [seed for seed in seeds if any(str(seed) not in kept.get(name, {}) for name in variants)]
        if not left:
            return
        if (self.folder / part / "study.json").exists():  # a study reports the seeds that it was last run with
            study = Study.load(self.folder / part)
            seeds_run = study.seeds_of(study.names[0])
            left = sorted({*left, *(s for s in seeds_run if all(study.is_complete(name, s) for name in study.names))})
        Study(
            self._make_relay,
            variants,
            seeds=left,
            steps=self.steps,
            batches=self._batches,
            held_out=self.held_out,
            folder=self.folder / part,
            evaluate_every=10**9,  # at the ends alone: before the decay losses of different runs say little
        ).run()

    def _rate(self, steps: int, restarts: Sequence[int] = ()) -> Schedule:
        warmup = 20 if self.steps >= 200 else 2
        return WarmupStableDecay(steps, warmup=min(warmup, steps // 2), decay=steps // 10, restarts=restarts)

    def _make_relay(self, seed: int, lr: float, layers: int, mup: bool = False, loops: int = 0, **size: int) -> Relay:
        model = self._make_model(seed, layers, loops, **size)
        if mup:
            scaling = mup_scaling(model, self._make_model(seed, **BASE), BRANCH_ENDS)
            scaling.rescale_weights()
            optimizer = torch.optim.AdamW(scaling.groups(lr, weight_decay=0.1), betas=(0.9, 0.95), fused=True)
        else:
            optimizer = make_optimizer(model, replace(self.settings, learning_rate=lr))
        # depth first keeps all activations, which is the fastest way for models that fit
        config = RelayConfig(micro_batches=1, schedule="depth_first", ahead=0, seed=seed)
        return Relay(model, optimizer, device=self.device, config=config)

    def _make_model(self, seed: int = 0, layers: int = 1, loops: int = 0, **size: int) -> nn.Module:
        gpt = make_model(replace(self.settings, layers=layers, seed=seed, tied=False, **size))
        return LoopedGPT(gpt, loops) if loops else gpt

    def _batches(self, seed: int) -> Iterator[Any]:
        drawn = torch.Generator().manual_seed(seed)
        while True:
            yield draw_batch(self.corpus.train, self.settings, drawn)

    def _count_flops(self, model: nn.Module) -> int:
        tokens = torch.zeros(self.settings.rows, self.settings.context, dtype=torch.long)
        # torch counts attention only where it is made of plain products
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, labels=tokens)["loss"].backward()
        return counter.get_total_flops()

    # -- results -------------------------------------------------------------------------------------------------------

    def show(self) -> dict[str, Table]:
        """Print the tables of the finished runs, and return them by title."""
        sweeps = [part for part in ("rates", "mup_rates", "loop_rates") if self._has(part)]
        tables = {"rates": show_rates({part: self.ends_in(part) for part in sweeps}, RATES)} if sweeps else {}
        if not self._has("regime"):
            return tables
        regime, names = self.ends_in("regime"), [_name(layers) for layers in self.depths]
        lines = Lines(
            {name: [regime[f"{name}, {share:g} of the compute"] for share in SHALLOW_SHARES] for name in names[:-1]}
        )
        tables["regime"] = show_regime(regime, names, SHARES)
        recipes = self.ends_in("recipes") if self._has("recipes") else {}
        for share in SHARES if recipes else ():
            scratch = regime[f"{names[-1]}, {share:g} of the compute"]
            end = f", {share:g} of the steps"
            mine = {name.removesuffix(end): runs for name, runs in recipes.items() if name.endswith(end)}
            gap = regime["1 layer, equal tokens"] if share == 1 else None
            tables[f"recipes{end}"] = show_recipes({"scratch": scratch, **mine}, scratch, lines, gap)
        if self._has("mup"):
            mup, usual = self.ends_in("mup"), regime[f"{names[-1]}, 1 of the compute"]
            tables["mup"] = show_recipes({**mup, "scratch, without muP": usual}, mup["scratch"], lines)
        if self._has("loops"):
            titles = {"1 loops": "run once", "2 loops": "run twice"}
            loops = self.ends_in("loops")
            once = {
                title: [loops[f"{name}, {share:g} of the compute"] for share in SHARES]
                for name, title in titles.items()
            }
            shown = {name: loops[name] for name in LOOPED_RECIPES}
            for name, title in titles.items():
                shown[f"{title}, equal tokens"] = loops[f"{name}, equal tokens"]
            tables["loops"] = show_recipes(shown, loops["fixed loops"], Lines(once))
        return tables

    def _has(self, part: str) -> bool:
        return part in self.kept or (self.folder / part / "study.json").exists()


def _name(layers: int) -> str:
    return "1 layer" if layers == 1 else f"{layers} layers"


PARTS = ("rates", "regime", "recipes", "mup", "loops")


def main() -> None:
    """Train what has not been trained yet, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="in this order; default all")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--keep", action="store_true", help="add the finished runs to the repository's records")
    parser.add_argument("--quick", action="store_true", help="a tiny model, three seeds, few steps")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--heads", type=int, default=0, help="default: heads of 8")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000, help="of the deep model")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the steps, budgets of the recipes")
    names = [name for name in RECIPES if name != "scratch"]
    parser.add_argument("--recipes", nargs="+", choices=names, default=names, help="those to run")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.quick:
        args.context, args.rows, args.depth, args.steps = 16, 4, 4, 80
    heads = args.heads or args.width // 8
    settings = Settings(layers=args.depth, width=args.width, heads=heads, context=args.context, rows=args.rows)
    with threads(1):
        bench = DepthBench(settings, args)
        for part in [] if args.report else args.parts or PARTS:
            getattr(bench, part)(args.seeds)
        tables = bench.show()
        if args.keep:
            bench.keep()
    report("depth_bench_quick" if args.quick else "depth_bench", {"arguments": vars(args), **tables})


if __name__ == "__main__":
    main()
