"""`relay.fit` against an exhaustive grid of settings: does it stay within the budget, and how near is it to the best?

    python benchmarks/fit.py
    python benchmarks/fit.py --models gpt2-64 --budgets 3 --rounds 3

For each model every setting of the grid makes real steps on a device without a budget: its peak and its least time are
noted. Then, for budgets between the least and the most that any of them needs, `fit` chooses on a device of just that
budget. Its choice, the best of the grid that fit and the runners-up make steps in turn; reported are the ratio of their
least times, and whether any step of the choice exceeded the budget (that would be an error, which ends the benchmark).

The grid: micro-batches 1, 2, 4, 8; 0, 1, 2 layers ahead; stash on the device and on the host; 0, a third, two thirds and all
of the graphs kept, with just the slots for that or with all weights on the device; and depth first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product

import torch
from _common import make_batch, make_gpt2, report, show, spread, threads
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig

ROWS, LENGTH = 8, 64
LINKS = {"fast": {}, "slow": {"h2d_bytes_per_s": 3e7, "d2h_bytes_per_s": 3e7}}
MODELS: dict[str, tuple[int, int, str]] = {  # layers, width, link
    "gpt2-64": (6, 64, "fast"),
    "gpt2-64 behind a slow link": (6, 64, "slow"),
    "gpt2-256": (4, 256, "fast"),
    "deep": (12, 32, "fast"),
}
make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
RUNNERS_UP = 2


def make(name: str) -> nn.Module:
    """A model of the list."""
    layers, width, _ = MODELS[name]
    return make_gpt2(layers, width, LENGTH, 0.0)


@contextmanager
def relay_of(name: str, config: RelayConfig, budget: int | None = None) -> Iterator[Relay]:
    """A relay on a device of so many bytes."""
    device = EmulatedDevice(budget, **LINKS[MODELS[name][2]])
    with Relay(make(name), make_optimizer, device, config=config) as relay:
        yield relay


def grid(layers: int) -> list[RelayConfig]:
    """All settings that are compared."""
    found = {}
    kept = sorted({0, round(layers / 3), round(2 * layers / 3), layers})
    for count, ahead, stash, keep in product((1, 2, 4, 8), (0, 1, 2), ("device", "host"), kept):
        for resident in {max(0, keep - ahead - 1), max(0, layers - ahead - 1)}:
            config = RelayConfig(micro_batches=count, ahead=ahead, stash=stash, keep=keep, resident=resident)  # type: ignore[arg-type]
            found[config] = None
    for count, ahead in product((1, 2, 4, 8), (0, 1, 2)):
        stays = {"keep": layers, "resident": max(0, layers - ahead - 1)}
        found[RelayConfig(micro_batches=count, ahead=ahead, schedule="depth_first", **stays)] = None  # type: ignore[arg-type]
    return list(found)


def timed(step: Callable[[], object]) -> float:
    """Seconds of a step."""
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def measure(name: str, batch: dict[str, torch.Tensor], steps: int) -> dict[RelayConfig, tuple[int, float]]:
    """Peak and least seconds of every setting of the grid."""
    found = {}
    for config in grid(MODELS[name][0]):
        with relay_of(name, config) as relay:
            peak = relay.step(batch).peak_device_bytes  # metered
            seconds = []
            for _ in range(steps):
                began_s = time.perf_counter()
                peak = max(peak, relay.step(batch).peak_device_bytes)
                seconds.append(time.perf_counter() - began_s)
        found[config] = peak, min(seconds)
    return found


def compare(
    name: str, batch: dict[str, torch.Tensor], known: dict[RelayConfig, tuple[int, float]], budget: int, rounds: int
) -> tuple[RelayConfig, RelayConfig, float, float]:
    """Return the choice of fit, the best that fits, how long the one takes over the other, and seconds of the search."""
    with relay_of(name, RelayConfig(), budget) as relay:
        found = relay.fit(batch)
    fitting = sorted((config for config, (peak, _) in known.items() if peak <= budget), key=lambda c: known[c][1])
    sides = dict.fromkeys([found.config, *fitting[: 1 + RUNNERS_UP]])
    with ExitStack() as stack:
        steps = {}
        for config in sides:
            relay = stack.enter_context(relay_of(name, config, budget))
            relay.step(batch)  # metered; over the budget it raises, for the choice as for the others
            steps[config] = partial(relay.step, batch)
        least = dict.fromkeys(sides, float("inf"))
        for _ in range(rounds):
            for config, step in steps.items():
                least[config] = min(least[config], timed(step))
    best = min(fitting[: 1 + RUNNERS_UP], key=least.__getitem__)
    return found.config, best, least[found.config] / least[best], found.seconds


def words(config: RelayConfig) -> str:
    """Settings in short."""
    if config.schedule == "depth_first":
        return f"{config.micro_batches} x, ahead {config.ahead}, depth first"
    return f"{config.micro_batches} x, ahead {config.ahead}, {config.stash}, {config.resident} stay, {config.keep} kept"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--budgets", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of each setting of the grid, after a metered one")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    rows, results = [], []
    with threads(1):
        for name in args.models:
            batch = make_batch(ROWS, LENGTH)
            known = measure(name, batch, args.steps)
            peaks = [peak for peak, _ in known.values()]
            least, most = min(peaks), max(peaks)
            for at in range(args.budgets):
                budget = round(1.03 * least * (1.05 * most / least) ** (at / (args.budgets - 1)))
                chosen, best, ratio, seconds = compare(name, batch, known, budget, args.rounds)
                rows.append((name, f"{budget / 1e6:.3g} MB", words(chosen), words(best), ratio, seconds))
                results.append(
                    {"model": name, "budget": budget, "ratio": ratio, "chosen": str(chosen), "best": str(best)}
                )
                print(*rows[-1], sep=" | ", flush=True)
    show(("model", "budget", "fit chose", "best of the grid", "fit / best", "search s"), rows)
    found = spread(row[4] for row in rows)
    near = sum(row[4] <= 1.05 for row in rows)
    print(
        f"{len(rows)} pairs: fit / best {found['median']:.3f} ({found['min']:.3f} to {found['max']:.3f}), {near} within 5 %"
    )
    report("fit", {"settings": vars(args), "results": results, "ratio": found, "within_5_percent": near})


if __name__ == "__main__":
    main()
