"""Losses against compute of runs with equal compute: stored, compared and shown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _common import show

SHOWN = (0.04, 0.12, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the compute, in the table


@dataclass
class Point:
    """Losses reached with a share of the compute."""

    compute: float
    step: int
    train_loss: float  # mean since the point before
    held_out: float


@dataclass
class Growth:
    """Held-out loss on both sides of an edit."""

    step: int
    depth: int  # afterwards
    before: float
    after: float


@dataclass
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    points: list[Point] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    seconds: float = 0.0

    def keep(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(path)

    @staticmethod
    def read(path: Path) -> Run:
        """Return the runs that `keep` has stored."""
        plain = json.loads(path.read_text())
        points, growths = [Point(**row) for row in plain["points"]], [Growth(**row) for row in plain["growths"]]
        return Run(**{**plain, "points": points, "growths": growths})


def reached_at(points: Sequence[Point], loss: float) -> float | None:
    """The compute from which on the held-out loss stays at or below `loss`; None if it ends above."""
    above = [i for i, point in enumerate(points) if point.held_out > loss]
    if not above:
        return points[0].compute
    if above[-1] == len(points) - 1:
        return None
    a, b = points[above[-1]], points[above[-1] + 1]
    return a.compute + (b.compute - a.compute) * (a.held_out - loss) / (a.held_out - b.held_out)


def loss_at(points: Sequence[Point], compute: float) -> float:
    """Held-out loss at the point nearest to a share of the compute."""
    return min(points, key=lambda point: abs(point.compute - compute)).held_out


def compare(done: Sequence[Run], names: Sequence[str], seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """By arm: last losses, differences to scratch, and compute saved, each by seed."""
    by_arm = {name: {run.seed: run for run in done if run.arm == name} for name in names}
    summary = {}
    for name, of_seed in by_arm.items():
        last = [of_seed[seed].points[-1].held_out for seed in seeds]
        target = [by_arm["scratch"][seed].points[-1].held_out for seed in seeds]
        at = [reached_at(of_seed[seed].points, loss) for seed, loss in zip(seeds, target, strict=True)]
        summary[name] = {
            "held_out": last,
            "difference": [mine - loss for mine, loss in zip(last, target, strict=True)],
            "saved": [None if share is None else 1 - share for share in at],
        }
    return summary


def show_all(done: Sequence[Run], summary: dict[str, dict[str, Any]]) -> None:
    """Tables of the final losses, the curves, and the growths."""
    rows = []
    for name, row in summary.items():
        last, less, saved = (
            [spell(value, form) for value in row[of]]
            for of, form in (("held_out", ".4f"), ("difference", "+.4f"), ("saved", ".1%"))
        )
        rows.append(
            (name, mean_and_sd(row["held_out"]), *map(", ".join, (last, less, saved)), mean_saved(row["saved"]))
        )
    show(("arm", "held-out loss", "by seed", "less scratch's", "compute saved, by seed", "mean (min to max)"), rows)
    mine = {name: [run for run in done if run.arm == name] for name in summary}
    show(
        ("mean held-out loss at", *(f"{share:.0%}" for share in SHOWN)),
        [
            (name, *(f"{statistics.fmean(loss_at(run.points, share) for run in of):.4f}" for share in SHOWN))
            for name, of in mine.items()
        ],
    )
    show(
        ("arm", "steps", "after step, to layers: mean held-out loss before, after"),
        [(name, of[0].points[-1].step, "; ".join(spell_growths(of))) for name, of in mine.items()],
    )


def spell(value: float | None, form: str) -> str:
    """A number, or that there is none."""
    return "not reached" if value is None else f"{value:{form}}"


def mean_and_sd(values: Sequence[float]) -> str:
    """Mean, and the standard deviation of more than one."""
    return f"{statistics.fmean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def mean_saved(values: Sequence[float | None]) -> str:
    """Mean and range if every seed has a value, else how many have none: a mean of the others would flatter."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"not reached in {len(values) - len(known)} of {len(values)}"
    return f"{statistics.fmean(known):.1%} ({min(known):.1%} to {max(known):.1%})"


def spell_growths(of: Sequence[Run]) -> Iterator[str]:
    """The growths of one arm, which come at the same steps with every seed."""
    for same in zip(*(run.growths for run in of), strict=True):
        before, after = (statistics.fmean(getattr(growth, side) for growth in same) for side in ("before", "after"))
        yield f"{same[0].step}, to {same[0].depth}: {before:.4f}, {after:.4f}"
