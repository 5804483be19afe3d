"""Losses and counts of a study, as its folder records them, without a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.study.segment import Counts, SharedSegment, chains, read_json

if TYPE_CHECKING:
    import pandas

SCHEMA, VERSION = "l2l-study", 3
CIRCUMSTANCES = ("l2l-workbench", "torch", "python", "device", "threads", "commit")  # of a run, in `segment.json`


def require(name: str) -> Any:
    """Import a package of the extra `study`.

    Raises:
        ModuleNotFoundError: it is not installed; the message has the install command.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name.partition(".")[0] != error.name.partition(".")[0]:
            raise
        remedy = 'run pip install "l2l-workbench[study]"'
        raise ModuleNotFoundError(f"a study needs {error.name}, which is not installed: {remedy}", name=name) from error


@dataclass(frozen=True)
class Saving:
    """Steps and compute that runs shared: of all runs, and those that were trained."""

    steps: int
    flop: int
    trained_steps: int
    trained_flop: int

    def __str__(self) -> str:
        if not self.steps:
            return "No step is trained yet."
        saved = self.steps - self.trained_steps
        if not saved:
            return f"No steps were shared between variants: {self.steps:,} steps, {self.flop:.3g} FLOP."
        share = 1 - self.trained_flop / self.flop
        return (
            f"Common beginnings were trained once: {saved:,} of {self.steps:,} steps and "
            f"{self.flop - self.trained_flop:.3g} of {self.flop:.3g} FLOP saved ({share:.0%})."
        )


@dataclass(frozen=True)
class RunPlace:
    """Place of a run in a folder: the variant's name there, its first segment, and its factors."""

    folder: Path
    variant: str
    root: str
    columns: Mapping[str, Any]


class StudyRecords:
    """Losses and counts of one or more studies, read from their folders.

    Of several studies, variants with the same name, schedule, factors and budget are one variant with the seeds of all; a seed
    that two of them have is read from the first. Other variants of the same name get the folder's name.

    Args:
        folders: folders of studies.

    Raises:
        FileNotFoundError: a folder holds no study.
        ValueError: another version wrote it, or the studies measured different held-out batches.
    """

    def __init__(self, *folders: str | Path) -> None:
        self._specs = {Path(folder): _read_spec(Path(folder)) for folder in folders}
        if not self._specs:
            raise ValueError("there is no folder to read: pass the folder= of a study")
        (first, spec), *others = self._specs.items()
        for folder, other in others:
            if other["held_out"] != spec["held_out"]:
                raise ValueError(
                    f"{folder} and {first} measured different held-out batches, so their losses cannot be compared: read each "
                    "alone"
                )

    progress_line = ""  # the last line of progress of a study in training
    is_running = False

    @property
    def folders(self) -> list[Path]:
        """Folders of the studies."""
        return [*self._specs]

    @cached_property
    def _places(self) -> dict[tuple[str, int], RunPlace]:
        found: dict[tuple[str, int], RunPlace] = {}
        known: dict[str, object] = {}  # description of each variant, by its name here
        for folder, spec in self._specs.items():
            for own, variant in spec["variants"].items():
                description = {**variant, "group": None, "budget": (spec["steps"], spec["flop"])}
                name = own if known.get(own, description) == description else f"{own} ({folder.name})"
                known[name] = description
                for seed in spec["seeds"]:
                    place = RunPlace(folder, own, f"s{seed}-g{variant['group']}", variant["columns"])
                    found.setdefault((name, seed), place)
        return found

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Variant and seed of every run."""
        return [(name, seed) for name in self.names for seed in self.seeds_of(name)]

    @property
    def names(self) -> list[str]:
        """Names of the variants; the first is the baseline of comparisons."""
        return [*dict.fromkeys(name for name, _ in self._places)]

    def seeds_of(self, variant: str) -> list[int]:
        """Return the seeds of a variant, in order."""
        return [seed for name, seed in self._places if name == variant]

    @cached_property
    def factor_names(self) -> list[str]:
        """Columns of the frame for factors, in the order of their first appearance."""
        return [*dict.fromkeys(name for place in self._places.values() for name in place.columns)]

    def segments_of(self, variant: str, seed: int) -> list[SharedSegment]:
        """Return the segments of a run, in order."""
        place = self._places[variant, seed]
        return chains(place.folder, place.root, place.variant)

    def is_complete(self, variant: str, seed: int) -> bool:
        """Return True if the run has reached the budget."""
        end = self._end_of(variant, seed)
        return end is not None and not end["children"] and "diverged" not in end

    def diverged_at(self, variant: str, seed: int) -> int | None:
        """Return the step whose loss or gradient was not finite, which ended the run; None if there is none."""
        end = self._end_of(variant, seed) or {}
        return end["step"] + 1 if "diverged" in end else None

    def diverged_runs(self) -> list[str]:
        """Return in words which runs diverged, by variant."""
        found = []
        for name in self.names:
            steps = {seed: step for seed in self.seeds_of(name) if (step := self.diverged_at(name, seed)) is not None}
            if steps:
                places = ", ".join(f"seed {seed} at step {step}" for seed, step in steps.items())
                found.append(f"{name} ({places})")
        return found

    def _end_of(self, variant: str, seed: int) -> dict[str, Any] | None:
        segments = self.segments_of(variant, seed)
        return segments[-1].end if segments else None

    def finished_runs(self) -> str:
        """Return the numbers of finished and of diverged runs, in words."""
        diverged = sum(self.diverged_at(*run) is not None for run in self.runs)
        text = f"{sum(self.is_complete(*run) for run in self.runs)} of {len(self.runs)} runs finished"
        return f"{text}, {diverged} diverged" if diverged else text

    def share_done(self) -> float:
        """Return the share of all runs' steps, or of their compute if that is the budget, that is trained."""
        shares = []
        for run in self.runs:
            spec, counts = self._specs[self._places[run].folder], self.last_counts(*run)
            if self.diverged_at(*run) is not None:
                shares.append(1.0)
                continue
            steps = spec["variants"][self._places[run].variant].get("steps", spec["steps"])
            share = counts.step / steps if steps is not None else counts.flop / spec["flop"]
            shares.append(min(1.0, share))
        return sum(shares) / len(shares)

    @property
    def saving(self) -> Saving:
        """Steps and compute of all runs, and those that were trained; the others were shared."""
        runs = [self.segments_of(*run) for run in self.runs]
        ends = [segments[-1].last() for segments in runs if segments]
        trained = {segment.folder: segment for segments in runs for segment in segments}.values()
        steps = [(segment.first, segment.last()) for segment in trained]
        return Saving(
            sum(end.step for end in ends),
            sum(end.flop for end in ends),
            sum(last.step - first.step for first, last in steps),
            sum(last.flop - first.flop for first, last in steps),
        )

    @property
    def flop_formulas(self) -> list[str]:
        """Statements of what the counted operations contain, of the finished runs."""
        ends = [segment.end for run in self.runs for segment in self.segments_of(*run)]
        return [*dict.fromkeys(end["formula"] for end in ends if end)]

    def frame(self, seconds: bool = True) -> pandas.DataFrame:
        """Return a tidy frame: a row per variant, seed and step, or held-out measurement.

        Columns: variant, factors, seed, step, flop, tokens, split ("train", "held out", "diverged"), loss, lr, layers, and
        seconds. FLOP, tokens and seconds are totals since the first step, shared steps included. A run ends with a row
        "diverged", without a loss, if the loss or a gradient of that step is not finite.

        Args:
            seconds: if False, without the wall time. Then a repeated or resumed study gives the same frame, to the bit.
        """
        pandas = require("pandas")
        columns = ["variant", *self.factor_names, "seed", "step", "flop", "tokens", "split", "loss", "lr", "layers"]
        if seconds:
            columns.append("seconds")
        rows = [row for run in self.runs for row in self.run_rows(*run)]
        return pandas.DataFrame(rows, columns=columns)

    def run_frame(self) -> pandas.DataFrame:
        """Return a frame with a row per run: counts, settings, versions, commit and folder."""
        rows = []
        for name, seed in self.runs:
            place, counts, header = self._places[name, seed], self.last_counts(name, seed), self.header_of(name, seed)
            facts = {key: header.get(key) for key in ("schedule", "settings", *CIRCUMSTANCES)}
            row = {
                "variant": name,
                **place.columns,
                "seed": seed,
                **vars(counts),
                "finished": self.is_complete(name, seed),
                "diverged_at": self.diverged_at(name, seed),
            }
            rows.append({**row, **facts, "folder": str(place.folder)})
        return require("pandas").DataFrame(rows)

    def header_of(self, variant: str, seed: int) -> dict[str, Any]:
        """Return what is recorded of the circumstances of a run; empty before its first step."""
        segments = self.segments_of(variant, seed)
        return segments[-1].header if segments else {}

    def run_rows(self, name: str, seed: int) -> list[dict[str, Any]]:
        """Return the rows of a run, as in the frame."""
        fixed = {"variant": name, **self._places[name, seed].columns, "seed": seed}
        found, spent = [], 0.0
        for segment in self.segments_of(name, seed):
            seconds = segment.seconds()
            for row in segment.rows():
                if row["split"] == "train":
                    spent += seconds.get(row["step"], 0.0)
                found.append({**fixed, **row, "seconds": spent})
        return found

    def curves(self, x: str = "flop") -> dict[str, dict[int, tuple[Sequence[float], Sequence[float]]]]:
        """Return the losses of every variant and seed over `x`: held-out losses, or training losses if there are none.

        Runs that diverged are left out if another one of the variant did not.

        Raises:
            ValueError: there is no such axis.
        """
        if x not in ("step", "flop", "tokens", "seconds"):
            raise ValueError(f"x={x!r} is not an axis: pass 'step', 'flop', 'tokens' or 'seconds'")
        split = "held out" if self.has_held_out else "train"
        return {
            name: {
                seed: ([row[x] for row in rows], [row["loss"] for row in rows])
                for seed in self._seeds_to_draw(name)
                if (rows := [row for row in self._rows_to_draw(name, seed) if row["split"] == split])
            }
            for name in self.names
        }

    def _seeds_to_draw(self, variant: str) -> list[int]:
        seeds = self.seeds_of(variant)
        return [seed for seed in seeds if self.diverged_at(variant, seed) is None] or seeds

    def _rows_to_draw(self, variant: str, seed: int) -> list[dict[str, Any]]:
        rows = self.run_rows(variant, seed)
        if self.diverged_at(variant, seed) is None:
            return rows
        return [row for row in rows if row["loss"] is not None and math.isfinite(row["loss"])]

    @property
    def has_held_out(self) -> bool:
        """True if the study measures held-out losses."""
        return any(spec["held_out"] for spec in self._specs.values())

    def last_counts(self, variant: str, seed: int) -> Counts:
        """Return the counts at the end of a run so far."""
        segments = self.segments_of(variant, seed)
        return segments[-1].last() if segments else Counts()


def _read_spec(folder: Path) -> dict[str, Any]:
    spec = read_json(folder / "study.json")
    if spec is None:
        raise FileNotFoundError(f"{folder} holds no study: pass the folder= of a Study that has been run")
    if (spec.get("schema"), spec.get("version")) != (SCHEMA, VERSION):
        raise ValueError(f"{folder / 'study.json'} was written by another version: run the study in a new folder")
    return spec
