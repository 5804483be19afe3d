"""Comparison of the variants of a study over seeds: paired differences at equal compute, as Markdown, LaTeX and HTML.

Compute is counted by `FlopCounter`. A variant and the baseline are compared for every seed at the lower of their total
compute, where losses are interpolated linearly between two measurements. The interval is that of the paired t-test. The run with
more compute is then compared before its end; notes state if its learning rate falls after that, and if measurements are coarse.
Tokens, steps or seconds can take the place of compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.study.study_records import CIRCUMSTANCES, StudyRecords, require

if TYPE_CHECKING:
    import pandas

LEVEL, MIN_SEEDS = 0.95, 3
Curve = tuple[Sequence[float], Sequence[float]]  # FLOP, or another axis, and losses
AXIS_WORDS = {"flop": "compute", "tokens": "tokens", "step": "steps", "seconds": "seconds"}
COARSE = 0.1  # distance of two measurements, as a share of the place of a comparison between them
_REST = 0.02  # share of a run's steps after which its learning rate has all but reached the end of its schedule


@dataclass(frozen=True)
class TableRow:
    """One variant.

    Attributes:
        variant: its name.
        n: finished runs, each with a different seed.
        steps, flop: mean over the runs at their ends.
        mean, spread: of the last losses; the spread is the standard deviation over seeds, None for one seed.
        difference: mean over seeds of the loss minus the baseline's at equal compute, or on another axis of the table; None for
            the baseline.
        pairs: number of seeds in the difference.
        low, high: 95 % interval of the difference; None with fewer than three seeds.
        reached: number of seeds whose run reaches the baseline's last loss of that seed.
        saved: share of the baseline's compute, or of another axis, that is not needed to reach that loss, mean over seeds; None
            unless all reach it.
        diverged: number of runs that ended since a loss or gradient was not finite; they are in no other figure of the row.
    """

    variant: str
    n: int
    steps: float | None = None
    flop: float | None = None
    mean: float | None = None
    spread: float | None = None
    difference: float | None = None
    pairs: int = 0
    low: float | None = None
    high: float | None = None
    reached: int = 0
    saved: float | None = None
    diverged: int = 0


@dataclass(frozen=True, repr=False)
class StudyTable:
    """Rows of a study's comparison, and notes that belong below them; `by` is the axis on which runs are compared."""

    rows: tuple[TableRow, ...]
    notes: tuple[str, ...]
    baseline: str
    by: str = "flop"

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a frame."""
        return require("pandas").DataFrame([vars(row) for row in self.rows])

    def to_markdown(self) -> str:
        """Return a Markdown table with its notes."""
        header, *rows = self.text_cells()
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
        table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        return "\n\n".join([table, *self.notes]) + "\n"

    def to_latex(self) -> str:
        r"""Return a `tabular` with the rules of booktabs; notes are comments. Needs ``\usepackage{booktabs}``."""
        header, *rows = self._cells("$-$", r"$\pm$", r"\%", _latex)
        lines = [
            *(f"% {note}" for note in self.notes),
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines) + "\n"

    def text_cells(self) -> list[list[str]]:
        """Return the header and the rows as text."""
        return self._cells("−", "±", "%")

    def _repr_html_(self) -> str:
        header, *rows = self._cells("−", "±", "%", escape)
        head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
        body = "".join(
            f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def __repr__(self) -> str:
        return self.to_markdown()

    def _cells(self, minus: str, plus: str, percent: str, quote: Callable[[str], str] = str) -> list[list[str]]:
        """Return the header and the rows as text."""

        def signed(value: float | None, digits: int = 4) -> str:
            return "–" if value is None else f"{value:+.{digits}f}".replace("-", minus)

        header = [
            "variant",
            "n",
            "steps",
            "FLOP",
            "loss",
            f"difference to {self.baseline}",
            "95 % interval",
            f"{AXIS_WORDS[self.by]} saved",
        ]
        cells = [[quote(cell) for cell in header]]
        for row in self.rows:
            loss = "–" if row.mean is None else f"{row.mean:.4f}"
            cells.append(
                [
                    quote(row.variant),
                    f"{row.n}, {row.diverged} diverged" if row.diverged else str(row.n),
                    "–" if row.steps is None else f"{row.steps:,.0f}",
                    "–" if row.flop is None else f"{row.flop:.3g}",
                    loss if row.spread is None else f"{loss} {plus} {row.spread:.4f}",
                    signed(row.difference),
                    "–" if row.low is None else f"[{signed(row.low)}, {signed(row.high)}]",
                    _saved_text(row, percent).replace("-", minus),
                ]
            )
        return cells


def compare_variants(study: StudyRecords, baseline: str | None = None, by: str = "flop") -> StudyTable:
    """Compare the finished runs of a study with those of the baseline, at equal values of an axis of `StudyRecords.curves`.

    Raises:
        ValueError: there is no such variant or axis.
    """
    first = study.names[0] if baseline is None else baseline
    if first not in study.names:
        raise ValueError(f"baseline={first!r}: there are {', '.join(map(repr, study.names))}")
    curves = {
        name: {seed: curve for seed, curve in by_seed.items() if study.is_complete(name, seed)}
        for name, by_seed in study.curves(by).items()
    }
    rows = tuple(_row(study, name, curves[name], None if name == first else curves[first]) for name in study.names)
    cuts = [cut for name in study.names if name != first for cut in _cuts(name, first, curves)]
    notes = [
        *_notes(study, rows, by),
        *_schedule_notes(study, cuts, by),
        *_coarse_notes(study, cuts, by),
        *_records(study),
    ]
    return StudyTable(rows, tuple(notes), first, by)


def paired_interval(values: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of `values` minus `others`; None with fewer than three pairs."""
    if len(values) < MIN_SEEDS:
        return None
    differences = np.subtract(values, others)
    if np.ptp(differences) == 0:
        return float(differences[0]), float(differences[0])  # scipy warns of a spread of 0
    interval = require("scipy.stats").ttest_rel(values, others).confidence_interval(LEVEL)
    return float(interval.low), float(interval.high)


def losses_at_equal_place(curve: Curve, other: Curve) -> tuple[float, float] | None:
    """Return two losses at the lower of the total computes; None if one of the curves begins after that."""
    place = min(curve[0][-1], other[0][-1])
    if place < max(curve[0][0], other[0][0]):
        return None
    return float(np.interp(place, *curve)), float(np.interp(place, *other))


def saved_share(curve: Curve, baseline: Curve) -> float | None:
    """Return the share of the baseline's compute that a run saves when it first reaches the baseline's last loss."""
    target, spent = baseline[1][-1], baseline[0][-1]
    for i, loss in enumerate(curve[1]):
        if loss <= target:
            if i == 0:
                return 1 - curve[0][0] / spent
            above = curve[1][i - 1]
            flop = np.interp(above - target, [0, above - loss], curve[0][i - 1 : i + 1])
            return float(1 - flop / spent)
    return None


def _row(study: StudyRecords, name: str, curves: dict[int, Curve], others: dict[int, Curve] | None) -> TableRow:
    diverged = sum(study.diverged_at(name, seed) is not None for seed in study.seeds_of(name))
    if not curves:
        return TableRow(name, 0, diverged=diverged)
    ends = [study.last_counts(name, seed) for seed in curves]
    losses = [curve[1][-1] for curve in curves.values()]
    row = {
        "steps": float(np.mean([end.step for end in ends])),
        "flop": float(np.mean([end.flop for end in ends])),
        "mean": float(np.mean(losses)),
        "spread": float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
    }
    return TableRow(name, len(curves), diverged=diverged, **row, **_difference(curves, others or {}))


def _difference(curves: dict[int, Curve], others: dict[int, Curve]) -> dict[str, Any]:
    shared = [seed for seed in curves if seed in others]
    pairs = [pair for seed in shared if (pair := losses_at_equal_place(curves[seed], others[seed]))]
    if not pairs:
        return {}
    values, baseline = zip(*pairs, strict=True)
    shares = [saved_share(curves[seed], others[seed]) for seed in shared]
    reached = [share for share in shares if share is not None]
    low, high = paired_interval(values, baseline) or (None, None)
    return {
        "difference": float(np.mean(np.subtract(values, baseline))),
        "pairs": len(pairs),
        "low": low,
        "high": high,
        "reached": len(reached),
        "saved": math.fsum(reached) / len(reached) if len(reached) == len(shares) else None,
    }


@dataclass(frozen=True)
class CutRun:
    """A run that is compared at a place before its end."""

    variant: str
    seed: int
    place: float


def _cuts(name: str, baseline: str, curves: dict[str, dict[int, Curve]]) -> list[CutRun]:
    """Return the runs that are compared before their ends, of a variant or of the baseline."""
    found = []
    for seed in curves[name].keys() & curves[baseline].keys():
        ends = {each: curves[each][seed][0][-1] for each in (name, baseline)}
        longer, place = max(ends, key=lambda each: ends[each]), min(ends.values())
        if ends[longer] > place:
            found.append(CutRun(longer, seed, place))
    return found


def _schedule_notes(study: StudyRecords, cuts: Sequence[CutRun], by: str) -> list[str]:
    """Name the runs whose learning rate still changes after the place where they are compared."""
    steps: dict[tuple[str, int], list[int]] = {}  # by variant and total steps
    for cut in cuts:
        rows = [row for row in study.run_rows(cut.variant, cut.seed) if row["split"] == "train"]
        after = [row for row in rows if row[by] >= cut.place]
        if len(after) - 1 > _REST * rows[-1]["step"] and len({row["lr"] for row in after}) > 1:
            steps.setdefault((cut.variant, rows[-1]["step"]), []).append(after[0]["step"])
    if not steps:
        return []
    places = "; ".join(
        f"{name} after {' or '.join(f'{step:,}' for step in sorted({*found}))} of {total:,} steps"
        for (name, total), found in steps.items()
    )
    (name, _), (length, *_) = next(iter(steps.items()))
    return [
        f"Runs compared in the middle of their learning rate's schedule: {places}. The other run has finished its schedule, "
        f"which favours it. Make the length of the schedule a factor of make_relay, and add a variant of {name} that ends there, "
        f'as Variant(schedule, {{**factors, "length": {length}}}, steps={length}); or compare where the runs '
        'end together, as with table(by="step").'
    ]


def _coarse_notes(study: StudyRecords, cuts: Sequence[CutRun], by: str) -> list[str]:
    """State how far the held-out measurements are apart between which a loss is interpolated, if that is far."""
    widest = 0.0
    for cut in cuts:
        rows = [row for row in study.run_rows(cut.variant, cut.seed) if row["split"] == "held out"]
        for before, after in pairwise(rows):
            if before[by] < cut.place < after[by] and after["step"] - before["step"] > 1:
                widest = max(widest, (after[by] - before[by]) / cut.place)
    if widest <= COARSE:
        return []
    return [
        f"Losses are interpolated linearly between measurements that are up to {widest:.0%} of the compared distance apart, "
        "which shifts the differences: pass a smaller evaluate_every= and another folder=."
    ]


def _notes(study: StudyRecords, rows: Sequence[TableRow], by: str) -> list[str]:
    done, runs = sum(row.n + row.diverged for row in rows), len(study.runs)
    notes = [] if done == runs else [f"{done} of {runs} runs are finished; the others are not in the table."]
    if diverged := study.diverged_runs():
        notes.append(
            f"Diverged, with a loss or gradient that is not finite: {'; '.join(diverged)}. The means are of the other runs."
        )
    axis = AXIS_WORDS[by]
    kind = "held-out losses" if study.has_held_out else "training losses of single steps, as no held_out= was given"
    notes.append(
        f"Loss: mean ± standard deviation over seeds of the last {kind}. Difference: paired by seed, at equal {axis}; interval "
        f"of the paired t-test. {axis.capitalize()} saved: share of the baseline's {'FLOP' if by == 'flop' else axis} that is "
        "not needed to reach its last loss."
    )
    if any(0 < row.pairs < MIN_SEEDS for row in rows):
        notes.append("There is no interval with fewer than three seeds: run the study with seeds=range(3) or more.")
    return notes


def _records(study: StudyRecords) -> list[str]:
    """Return notes on circumstances, shared steps and the count of operations."""
    headers = [header for run in study.runs if (header := study.header_of(*run))]
    values = {key: dict.fromkeys(str(header.get(key)) for header in headers) for key in CIRCUMSTANCES}
    notes = [f"Runs differ in {key}: {', '.join(each)}." for key, each in values.items() if len(each) > 1]
    return [*notes, str(study.saving), *study.flop_formulas]


def _saved_text(row: TableRow, percent: str) -> str:
    if row.saved is not None:
        return f"{row.saved * 100:.0f} {percent}"
    return f"reached by {row.reached} of {row.pairs}" if row.pairs else "–"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    return "".join(special.get(char, rf"\{char}" if char in "&%$#_{}" else char) for char in text)
