"""Pseudo-to-Real at equal compute: a stack that shares one layer, delinked and trained on, against one that never shared.

    python benchmarks/delink.py              (three seeds; finished runs are kept)
    python benchmarks/delink.py --quick      (a test that it works, without a result)

A GPT over bytes on the text of Python's standard library, by relay; delinking is `relay.apply(Delink(...))` (M6-10T,
arXiv 2110.03888). Arms:

    scratch     every place has a separate layer all the way
    shared      one layer in all places all the way
    copy        shared for a quarter of the steps, then delinked; every place continues with the state of all
    scaled      the same, the state scaled by one over the number of places, which is what a place's gradient becomes
    fresh       the same, optimizer state anew
    late        as scaled, after half of the steps

A step costs the same multiplications in every arm, since a shared layer runs in every place: equal steps are equal compute.
Learning rate, batches and held-out text are those of the other arms of the seed; when to delink is not tuned. `host` is
masters and optimizer state by the ledger, `loads` the bytes of layers that a step loads, before and after delinking.
`saved` is 1 - c, where c is the share of scratch's compute from which on an arm's held-out loss stays at or below
scratch's last one.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _common import report, show, threads
from _curves import Growth, Point, Run, compare, show_all

from l2l_core import Delink, EmulatedDevice, Relay, RelayConfig
from workbench.lessons.corpus import Corpus, load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer, make_schedule
from workbench.lessons.demo_values import Batch, Settings

JUDGED_SEED = 1_000_000  # of the held-out windows, the same for all arms and seeds
LOOKS = 20  # at held-out text, at equal distances


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        shares: whether one layer stands in all places at first.
        until: share of the steps after which it is delinked; None: never.
        state: what becomes of the optimizer's state then; "scaled" by one over the number of places.
    """

    shares: bool = True
    until: float | None = None
    state: str = "copy"


ARMS = {
    "scratch": Arm(shares=False),  # what `_curves` compares with
    "shared": Arm(),
    "copy": Arm(until=1 / 4),
    "scaled": Arm(until=1 / 4, state="scaled"),
    "fresh": Arm(until=1 / 4, state="fresh"),
    "late": Arm(until=1 / 2, state="scaled"),
}


def main() -> None:
    """Train what has not been trained yet, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, few steps")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="scratch is always among them")
    parser.add_argument("--seeds", nargs="+", type=int, help="default 0 1 2; of weights and batches")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    settings = Settings(layers=args.layers, width=args.width, rows=16, micro_batches=1, steps=args.steps, warm_up=30)
    if args.quick:
        settings = replace(settings, layers=3, width=32, rows=4, steps=30, judged_batches=2, warm_up=5)
    seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    names = list(dict.fromkeys(["scratch", *args.arms]))
    with threads(1):
        done = list(runs(names, seeds, settings))
        held = {name: bytes_of(ARMS[name], settings) for name in names}
    summary = compare(done, names, seeds)
    show_all(done, summary)
    show(
        ("arm", "host, MB", "after delinking", "loads of a step, MB", "after delinking"),
        [(name, *(f"{row[at] / 1e6:.2f}" if at in row else "" for at in COLUMNS)) for name, row in held.items()],
    )
    results = {"settings": asdict(settings), "seeds": seeds, "summary": summary, "bytes": held}
    report("delink_quick" if args.quick else "delink", results | {"runs": [asdict(run) for run in done]})


# -- a run -------------------------------------------------------------------------------------------------------------


def runs(names: Sequence[str], seeds: Sequence[int], settings: Settings) -> Iterator[Run]:
    """Every seed, every arm; those that an earlier call has finished are read."""
    corpus = load_corpus()
    judged = torch.Generator().manual_seed(JUDGED_SEED)
    looks = [draw_batch(corpus.held_out, settings, judged) for _ in range(settings.judged_batches)]
    for seed in seeds:
        for name in names:
            mine = replace(settings, seed=seed)
            what = repr((ARMS[name], mine, LOOKS, corpus.files, len(corpus.train), torch.__version__))
            path = Path("out", "benchmarks", "delink", f"{name}-{seed}-{zlib.crc32(what.encode()):08x}.json")
            if not path.exists():
                train(name, mine, corpus, looks).keep(path)
            run = Run.read(path)
            print(f"{name}, seed {seed}: {run.points[-1].held_out:.4f}, {run.seconds:.0f} s", flush=True)
            yield run


def train(name: str, settings: Settings, corpus: Corpus, looks: Sequence[Batch]) -> Run:
    """Train one arm; evaluate held-out text at equal distances, and around the edit."""
    arm, run, began_s = ARMS[name], Run(name, settings.seed), time.perf_counter()
    drawn, losses = torch.Generator().manual_seed(settings.seed), []
    with relay_of(arm, settings) as relay:
        schedule = make_schedule(relay.optimizer, settings)
        for step in range(settings.steps):
            if arm.until is not None and step == round(arm.until * settings.steps):
                before = judge(relay, looks)
                relay.apply(delink(arm, settings))
                run.growths.append(Growth(step, len(relay.stack), before, judge(relay, looks)))
            losses.append(relay.step(draw_batch(corpus.train, settings, drawn)).loss)
            schedule.step()
            if (step + 1) * LOOKS // settings.steps > step * LOOKS // settings.steps:
                point = Point((step + 1) / settings.steps, step + 1, statistics.fmean(losses), judge(relay, looks))
                run.points.append(point)
                losses.clear()
    run.seconds = time.perf_counter() - began_s
    return run


def relay_of(arm: Arm, settings: Settings) -> Relay:
    """Make a relay over a model of that arm as it begins."""
    model = make_model(settings)
    stack = model.transformer.h
    for place in range(1, len(stack)) if arm.shares else ():
        stack[place] = stack[0]
    config = RelayConfig(micro_batches=settings.micro_batches, seed=settings.seed)
    layers = list(dict.fromkeys(stack))
    return Relay(model, make_optimizer(model, settings), EmulatedDevice(), layers, config=config)


def delink(arm: Arm, settings: Settings) -> Delink:
    """Make the edit of an arm."""
    return Delink(optimizer=1 / settings.layers if arm.state == "scaled" else arm.state)


def judge(relay: Relay, looks: Sequence[Batch]) -> float:
    """Loss on held-out text, nats per byte."""
    return statistics.fmean(map(relay.evaluate, looks))


# -- bytes -------------------------------------------------------------------------------------------------------------

COLUMNS = ("host", "host after", "loads", "loads after")


def bytes_of(arm: Arm, settings: Settings) -> dict[str, int]:
    """Return the bytes of the host, and those that a step loads, before and after delinking."""
    found: dict[str, Any] = {}
    batch = draw_batch(torch.arange(4096) % 256, settings, torch.Generator().manual_seed(0))
    with relay_of(arm, settings) as relay:
        for when in ("", " after") if arm.until is not None else ("",):
            if when:
                relay.apply(delink(arm, settings))
            for _ in range(2):  # the order of layers is learned in the first step
                result = relay.step(batch)
            held = relay.host.by_category()
            found["host" + when] = held["weights"] + held["optimizer"]
            loads = [e for e in result.trace.events if e.kind == "load" and e.layer != "shell"]
            found["loads" + when] = sum(e.nbytes for e in loads)
    return found


if __name__ == "__main__":
    main()
