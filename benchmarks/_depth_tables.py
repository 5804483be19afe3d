"""Tables of `depth_bench.py`: losses of depths, recipes, rates and loops, with differences paired by seed and their intervals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from _common import show

from workbench.study.study_table import paired_interval

Runs = dict[int, tuple[float, float]]  # by seed: FLOP and loss at the end
Ends = dict[str, Runs]  # by variant
Table = list[dict[str, Any]]


class Lines:
    """Losses of shallow models over compute: what a recipe has to beat at equal compute.

    Args:
        ends: by the name of a shallow model, its runs at several budgets.
    """

    def __init__(self, ends: Mapping[str, Sequence[Runs]]) -> None:
        self.ends = ends

    def columns(self, mine: Runs) -> list[str]:
        """Return the differences of runs to every line, and the intervals, as texts."""
        found = []
        for ends in self.ends.values():
            base = {seed: (flop, _loss_at(ends, seed, flop)) for seed, (flop, _) in mine.items()}
            found.append(difference(mine, {seed: end for seed, end in base.items() if end[1] is not None}))
        return found

    def header(self) -> list[str]:
        """Return the titles of the columns."""
        return [f"minus {name}, equal compute" for name in self.ends]


def show_regime(regime: Ends, names: Sequence[str], shares: Sequence[float]) -> Table:
    """Print the losses of all depths at equal compute, with the difference to the depth before."""
    rows = []
    for share in shares:
        runs = [regime[f"{name}, {share:g} of the compute"] for name in names]
        for i, (name, mine) in enumerate(zip(names, runs, strict=True)):
            less = difference(mine, runs[i - 1]) if i else "–"
            more = difference(mine, runs[-1]) if i < len(runs) - 1 else "–"
            rows.append((f"{share:g}", name, *summary(mine), less, more))
    return _table(("compute", "model", "n", "loss", "minus half the layers", f"minus {names[-1]}"), rows)


def show_recipes(recipes: Ends, scratch: Runs, lines: Lines, gap: Runs | None = None) -> Table:
    """Print recipes beside training from scratch at equal tokens, and beside shallow models at equal compute.

    Args:
        recipes: the finished runs, the first ones those from scratch.
        scratch: runs from scratch with as many tokens.
        lines: shallow models.
        gap: runs of one layer with as many tokens; with them the share of the gap that a recipe closes is a column.
    """
    header = ["recipe", "n", "loss", "compute", "minus scratch, equal tokens", *lines.header()]
    rows = []
    for name, mine in recipes.items():
        seeds = [seed for seed in mine if seed in scratch]
        if not seeds:
            continue
        compute = statistics.fmean(mine[s][0] / scratch[s][0] for s in seeds)
        row = [name, *summary(mine), f"{compute:.2f}", difference(mine, scratch), *lines.columns(mine)]
        rows.append([*row, _closed(mine, scratch, gap, seeds)] if gap is not None else row)
    return _table([*header, "share of the gap closed"] if gap is not None else header, rows)


def show_rates(sweeps: Mapping[str, Ends], rates: Sequence[float]) -> Table:
    """Print the losses of sweeps of the learning rate: a row for each model, with the best rate."""
    rows = []
    for sweep, ends in sweeps.items():
        for name in dict.fromkeys(variant.rsplit(", ", 1)[0] for variant in ends):
            losses = [statistics.fmean(loss for _, loss in ends[f"{name}, {lr:g}"].values()) for lr in rates]
            rows.append((sweep, name, *(f"{loss:.4f}" for loss in losses), f"{rates[int(np.argmin(losses))]:g}"))
    return _table(("sweep", "model", *(f"{lr:g}" for lr in rates), "best"), rows)


def summary(runs: Runs) -> tuple[int, str]:
    """Return the number of runs, and mean and standard deviation of their losses as text."""
    losses = [loss for _, loss in runs.values()]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    return len(losses), f"{statistics.fmean(losses):.4f}{spread}" if losses else "–"


def difference(mine: Runs, base: Runs) -> str:
    """Return the mean difference of losses, paired by seed, and its 95 % interval, as text."""
    seeds = [seed for seed in mine if seed in base]
    if not seeds or mine is base:
        return "–"
    values, others = [mine[s][1] for s in seeds], [base[s][1] for s in seeds]
    interval = paired_interval(values, others)
    text = "fewer than 3 seeds" if interval is None else f"[{interval[0]:+.4f}, {interval[1]:+.4f}]"
    return f"{statistics.fmean(values) - statistics.fmean(others):+.4f} {text}"


def _loss_at(ends: Sequence[Runs], seed: int, flop: float) -> float | None:
    """Return the loss of a seed at an amount of compute, between its ends; None outside of them."""
    if not all(seed in each for each in ends):
        return None
    flops, losses = zip(*sorted(each[seed] for each in ends), strict=True)
    # The last step of an end passes its share of the compute by less than itself.
    if not flops[0] <= flop * 1.01 or not flop <= flops[-1] * 1.01:
        return None
    return float(np.interp(np.log(flop), np.log(flops), losses))


def _closed(mine: Runs, scratch: Runs, gap: Runs, seeds: Iterable[int]) -> str:
    seeds = [seed for seed in seeds if seed in gap]
    interval = paired_interval([gap[s][1] for s in seeds], [scratch[s][1] for s in seeds])
    if interval is None:
        return "fewer than 3 seeds"
    if interval[0] <= 0:
        return "no gap"  # none that an interval shows
    closed, whole = (statistics.fmean(gap[s][1] - each[s][1] for s in seeds) for each in (mine, scratch))
    return f"{closed / whole:.2f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    show(header, rows)
    return [dict(zip(header, row, strict=True)) for row in rows]
