"""Growth in depth against training from scratch at equal compute: loss against compute, compute saved at equal loss.

    python benchmarks/dynamic_depth.py              (about an hour on one core; finished runs are kept)
    python benchmarks/dynamic_depth.py --quick      (half a minute: a test that it works, without a result)

A GPT over bytes, 12 layers at the end, on the text of Python's standard library; everything by relay, growth by
`relay.apply`. Arms:

    scratch     12 layers all the way
    top         3, 6, 12: the whole stack doubled on top of itself, optimizer state copied
    middle      3, 6, 12: the middle third of the stack repeated three times more, optimizer state copied
    identity    3, 6, 12: behind every layer one that is the identity at first, fresh optimizer state, a warm-up
    shallow     3 layers all the way: what the small model alone makes of the same compute

When to grow is not tuned. It is the schedule of Gong et al., ICML 2019 ("Efficient Training of BERT by Progressively
Stacking"), which has these depths: 3 layers for 50,000 of 400,000 steps, 6 for 70,000, 12 for the rest.

Compute is counted by torch (`FlopCounterMode`): the matrix products of forward and backward, attention and shell
included, recompute left out. All arms get the same, so grown arms make more steps. The learning rate is one function of
the compute spent, and batch number i is the same for all arms of a seed.

`saved` is 1 - c, where c is the share of scratch's compute from which on an arm's held-out loss stays at or below
scratch's last one, of the same seed, by linear interpolation. An arm reaches that loss while its learning rate is still
above its end, where scratch's was at it; that counts against growth.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from _common import report, show, threads
from _curves import Growth, Point, Run, compare, show_all
from _curves_picture import draw_curves
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.edits import Duplicate, Edit, Insert
from workbench.lessons.corpus import Corpus, load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer
from workbench.lessons.demo_values import FULL, Batch, Settings

FINAL = 12  # layers
WARMUP = 0.01  # of the compute; of scratch's steps for new layers that start afresh
JUDGED_SEED = 1_000_000  # of the held-out windows, the same for all arms and seeds
LOOKS = 25  # at held-out text, at equal distances of compute


@dataclass(frozen=True)
class Arm:
    """A way to get to the last step.

    Attributes:
        stages: depths, and the share of the steps at each.
        grow: the edits that double a stack of so many layers; also given the updates of a warm-up.
    """

    stages: tuple[tuple[int, float], ...]
    grow: Callable[[int, int], Sequence[Edit]] = lambda depth, warmup: ()


def stack_on_top(depth: int, warmup: int) -> list[Edit]:
    """ABC becomes ABCABC."""
    return [Duplicate(slice(0, depth), mode="top", optimizer="copy")]


def repeat_middle(depth: int, warmup: int) -> list[Edit]:
    """ABC becomes ABBBBC: three of the steps that MIDAS (https://arxiv.org/abs/2409.19044) makes one by one."""
    third = depth // 3
    return [Duplicate(slice(third, 2 * third), mode="middle", optimizer="copy")] * 3


def insert_identities(depth: int, warmup: int) -> list[Edit]:
    """ABC becomes AaBbCc, copies whose branches give 0 at first."""
    return [Insert(at, init="identity", optimizer="fresh", warmup=warmup) for at in range(1, 2 * depth, 2)]


GROWN = ((3, 50 / 400), (6, 70 / 400), (FINAL, 280 / 400))
ARMS = {
    "scratch": Arm(((FINAL, 1.0),)),
    "top": Arm(GROWN, stack_on_top),
    "middle": Arm(GROWN, repeat_middle),
    "identity": Arm(GROWN, insert_identities),
    "shallow": Arm(((3, 1.0),)),
}


# -- a run -------------------------------------------------------------------------------------------------------------


def count_flops(settings: Settings) -> int:
    """Of the matrix products of forward and backward of one batch."""
    tokens = torch.zeros(settings.rows, settings.context, dtype=torch.long)
    # torch counts attention only where it is made of plain products; the kernel chosen otherwise does the same ones
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        make_model(settings)(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops()


def plan(arm: Arm, flops: dict[int, int], steps: int) -> list[tuple[int, int]]:
    """Depths, and the steps at each, that cost what `steps` at full depth do, to half a step of the last depth."""
    budget = steps * flops[FINAL]
    total = budget / sum(share * flops[depth] for depth, share in arm.stages)
    stages = [(depth, round(share * total)) for depth, share in arm.stages[:-1]]
    last = arm.stages[-1][0]
    return [*stages, (last, round((budget - sum(n * flops[depth] for depth, n in stages)) / flops[last]))]


def learning_rate(settings: Settings, done: float, after: float) -> float:
    """Of a step that begins and ends at these shares of the compute: a linear warm-up, a half cosine to a tenth."""
    return settings.learning_rate * min(1.0, after / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * done))


def train(name: str, settings: Settings, corpus: Corpus, looks: Sequence[Batch], flops: dict[int, int]) -> Run:
    """Train one arm; evaluate held-out text at equal distances of compute, and around every growth."""
    arm, run, began_s = ARMS[name], Run(name, settings.seed), time.perf_counter()
    stages = plan(arm, flops, settings.steps)
    total = sum(steps * flops[depth] for depth, steps in stages)
    drawn = torch.Generator().manual_seed(settings.seed)
    model = make_model(replace(settings, layers=stages[0][0]))
    config = RelayConfig(micro_batches=settings.micro_batches, seed=settings.seed)
    spent, losses = 0, []
    with Relay(model, make_optimizer(model, settings), EmulatedDevice(), config=config) as relay:
        for before, (depth, steps) in zip([None, *stages], stages, strict=False):
            if before is not None:
                run.growths.append(grow(relay, arm.grow(before[0], round(WARMUP * settings.steps)), looks))
            assert len(relay.stack) == depth
            for _ in range(steps):
                rate = learning_rate(settings, spent / total, (spent + flops[depth]) / total)
                for group in relay.optimizer.param_groups:
                    group["lr"] = rate
                losses.append(relay.step(draw_batch(corpus.train, settings, drawn)).loss)
                looked, spent = spent * LOOKS // total, spent + flops[depth]
                if spent * LOOKS // total > looked:
                    held_out = judge(relay, looks)
                    run.points.append(Point(spent / total, relay.steps, statistics.fmean(losses), held_out))
                    losses.clear()
    run.seconds = time.perf_counter() - began_s
    return run


def grow(relay: Relay, edits: Sequence[Edit], looks: Sequence[Batch]) -> Growth:
    """Carry out the edits between two looks."""
    before = judge(relay, looks)
    relay.apply(*edits)
    return Growth(relay.steps, len(relay.stack), before, judge(relay, looks))


def judge(relay: Relay, looks: Sequence[Batch]) -> float:
    """Loss on held-out text, nats per byte."""
    return statistics.fmean(map(relay.evaluate, looks))


def runs(names: Sequence[str], seeds: Sequence[int], settings: Settings) -> Iterator[Run]:
    """Every seed, every arm; those that an earlier call has finished are read."""
    corpus = load_corpus()
    judged = torch.Generator().manual_seed(JUDGED_SEED)
    looks = [draw_batch(corpus.held_out, settings, judged) for _ in range(settings.judged_batches)]
    depths = {depth for name in names for depth, _ in ARMS[name].stages} | {FINAL}
    flops = {depth: count_flops(replace(settings, layers=depth)) for depth in sorted(depths)}
    show(("layers", "GFLOP per step"), [(depth, n / 1e9) for depth, n in flops.items()])
    for seed in seeds:
        for name in names:
            mine = replace(settings, seed=seed)
            path = stored(name, mine, corpus, flops)
            if not path.exists():
                train(name, mine, corpus, looks, flops).keep(path)
            run = Run.read(path)
            last = run.points[-1]
            print(f"{name}, seed {seed}: {last.held_out:.4f} after {last.step} steps, {run.seconds:.0f} s", flush=True)
            yield run


def stored(name: str, settings: Settings, corpus: Corpus, flops: dict[int, int]) -> Path:
    """Where a run is kept; another place if anything that it depends on is other."""
    what = repr(
        (settings, ARMS[name].stages, WARMUP, LOOKS, corpus.files, len(corpus.train), torch.__version__, flops[FINAL])
    )
    return Path("out", "benchmarks", "dynamic_depth", f"{name}-{settings.seed}-{zlib.crc32(what.encode()):08x}.json")


def main() -> None:
    """Train what has not been trained yet, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, few steps")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="scratch is always among them")
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="default 0 1 2; of the weights and of the order of batches"
    )
    parser.add_argument("--steps", type=int, help="of scratch; sets the compute of all arms")
    parser.add_argument("--learning-rate", type=float, help="the highest, for all arms")
    parser.add_argument("--name", help="of the report; default dynamic_depth")
    args = parser.parse_args()

    full = replace(FULL, layers=FINAL, width=64, heads=2, context=64, rows=16, micro_batches=1)
    full = replace(full, steps=1000, judged_batches=16)
    small = replace(full, width=32, context=32, rows=8, steps=60, judged_batches=2)
    given = {name: value for name in ("steps", "learning_rate") if (value := getattr(args, name)) is not None}
    settings = replace(small if args.quick else full, **given)
    seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    names = list(dict.fromkeys(["scratch", *args.arms]))

    with threads(1):
        done = list(runs(names, seeds, settings))
    summary = compare(done, names, seeds)
    show_all(done, summary)
    name = args.name or ("dynamic_depth_quick" if args.quick else "dynamic_depth")
    report(
        name, {"settings": asdict(settings), "seeds": seeds, "summary": summary, "runs": [asdict(run) for run in done]}
    )
    title = f"Growth to {FINAL} layers at equal compute, seeds {', '.join(map(str, seeds))}"
    Path("out", "benchmarks", f"{name}.svg").write_text(draw_curves(done, title), encoding="utf-8")


if __name__ == "__main__":
    main()
