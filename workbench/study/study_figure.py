"""Figure of a study for a paper: mean lines with bands over seeds. The same study gives the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.study.study_records import StudyRecords, require

SUFFIXES = (".pdf", ".svg", ".png")
AXES = {"step": "steps", "flop": "compute (FLOP)", "tokens": "tokens", "seconds": "seconds"}
UNITS = {"step": "steps", "flop": "FLOP", "tokens": "tokens", "seconds": "s"}
# Okabe and Ito's colours, which readers with colour blindness can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", "-.", ":")
POINTS = 200  # of a curve whose seeds were measured at different places
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "l2l",  # the same bytes in every process
}
NO_DATE = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


@dataclass(frozen=True)
class MeanCurve:
    """Mean over seeds and its band, one standard deviation to each side; without a band for one seed."""

    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    n: int


def mean_curves(study: StudyRecords, x: str) -> dict[str, MeanCurve]:
    """Return the mean curve of every variant with losses, where all of its seeds have some."""
    found = {name: _mean_curve([*by_seed.values()]) for name, by_seed in study.curves(x).items() if by_seed}
    return {name: curve for name, curve in found.items() if len(curve.x)}


def diverged_words(study: StudyRecords) -> list[str]:
    """Return for each variant with runs that diverged how many did, in words."""
    found = []
    for name in study.names:
        seeds = study.seeds_of(name)
        if count := sum(study.diverged_at(name, seed) is not None for seed in seeds):
            found.append(f"{name}: {count} of {len(seeds)} diverged")
    return found


def _mean_curve(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> MeanCurve:
    first, last = max(places[0] for places, _ in curves), min(places[-1] for places, _ in curves)
    places = sorted({place for each, _ in curves for place in each if first <= place <= last})
    if len(places) > POINTS and any(each != curves[0][0] for each, _ in curves):
        places = [*np.linspace(first, last, POINTS)]
    losses = np.array([np.interp(places, *curve) for curve in curves])
    mean, spread = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else np.zeros(len(places))
    return MeanCurve([*map(float, places)], [*mean], [*(mean - spread)], [*(mean + spread)], len(curves))


def save_figure(study: StudyRecords, path: Path, x: str, size: tuple[float, float]) -> Path:
    """Save the figure; see `RecordedStudy.save`."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path={str(path)!r}: pass a name that ends in {', '.join(SUFFIXES)}")
    curves = mean_curves(study, x)
    if not curves:
        raise ValueError(f"{study.folders[0]} has no losses to draw yet: run the study first")
    matplotlib, figure_module = require("matplotlib"), require("matplotlib.figure")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = figure_module.Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, curves, x, "held-out loss" if study.has_held_out else "training loss")
        for words in diverged_words(study):  # entries without a line
            axes.plot([], [], " ", label=words)
        axes.legend()
        figure.savefig(path, dpi=300, metadata=NO_DATE[path.suffix])
    return path


def _draw(axes: Any, curves: Mapping[str, MeanCurve], x: str, name: str) -> None:
    for i, (variant, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(curve.x, curve.mean, DASHES[i % len(DASHES)], color=colour, linewidth=1.2, label=variant)
        if curve.n > 1:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0)
    seeds = max(curve.n for curve in curves.values())
    axes.set_xlabel(AXES[x])
    axes.set_ylabel(f"{name} (mean ± s.d. of {seeds} seeds)" if seeds > 1 else name)
