"""Losses and counts of a study, as its folder records them, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.study.segment import Counts, SharedSegment, chains, read_json

if TYPE_CHECKING:
    import pandas

SCHEMA, VERSION = "l2l-study", 1


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


class StudyRecords:
    """Losses and counts of a study, read from its folder.

    Args:
        folder: folder of the study.

    Raises:
        FileNotFoundError: the folder holds no study.
        ValueError: another version wrote it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        spec = read_json(self.folder / "study.json")
        if spec is None:
            raise FileNotFoundError(f"{self.folder} holds no study: pass the folder= of a Study that has been run")
        if (spec.get("schema"), spec.get("version")) != (SCHEMA, VERSION):
            raise ValueError(
                f"{self.folder / 'study.json'} was written by another version: run the study in a new folder"
            )
        self._spec = spec

    progress_line = ""  # the last line of progress of a study in training
    is_running = False

    @property
    def spec(self) -> Mapping[str, Any]:
        """Content of `study.json`: variants, seeds, budget."""
        return self._spec

    @property
    def names(self) -> list[str]:
        """Names of the variants; the first is the baseline of comparisons."""
        return [*self.spec["variants"]]

    @property
    def seeds(self) -> list[int]:
        """Seeds, in order."""
        return [*self.spec["seeds"]]

    @cached_property
    def factor_names(self) -> list[str]:
        """Columns of the frame for factors, in the order of their first appearance."""
        columns = (variant["columns"] for variant in self.spec["variants"].values())
        return [*dict.fromkeys(name for names in columns for name in names)]

    def segments_of(self, variant: str, seed: int) -> list[SharedSegment]:
        """Return the segments of a run, in order."""
        return chains(self.folder, f"s{seed}-g{self.spec['variants'][variant]['group']}", variant)

    def is_complete(self, variant: str, seed: int) -> bool:
        """Return True if the run has reached the budget."""
        segments = self.segments_of(variant, seed)
        end = segments[-1].end if segments else None
        return end is not None and not end["children"]

    def finished_runs(self) -> str:
        """Return the number of finished runs, in words."""
        runs = [(name, seed) for name in self.names for seed in self.seeds]
        return f"{sum(self.is_complete(*run) for run in runs)} of {len(runs)} runs finished"

    @property
    def saving(self) -> Saving:
        """Steps and compute of all runs, and those that were trained; the others were shared."""
        runs = [self.segments_of(name, seed) for name in self.names for seed in self.seeds]
        ends = [segments[-1].last() for segments in runs if segments]
        trained = {segment.name: segment for segments in runs for segment in segments}.values()
        steps = [(segment.first, segment.last()) for segment in trained]
        return Saving(
            sum(end.step for end in ends),
            sum(end.flop for end in ends),
            sum(last.step - first.step for first, last in steps),
            sum(last.flop - first.flop for first, last in steps),
        )

    def frame(self, seconds: bool = True) -> pandas.DataFrame:
        """Return a tidy frame: a row per variant, seed and step, or held-out measurement.

        Columns: variant, factors, seed, step, flop, tokens, split ("train", "held out"), loss, lr, layers, and seconds. FLOP,
        tokens and seconds are totals since the first step, shared steps included.

        Args:
            seconds: if False, without the wall time. Then a repeated or resumed study gives the same frame, to the bit.
        """
        pandas = require("pandas")
        columns = ["variant", *self.factor_names, "seed", "step", "flop", "tokens", "split", "loss", "lr", "layers"]
        if seconds:
            columns.append("seconds")
        rows = [row for name in self.names for seed in self.seeds for row in self._run_rows(name, seed)]
        return pandas.DataFrame(rows, columns=columns)

    def _run_rows(self, name: str, seed: int) -> list[dict[str, Any]]:
        fixed = {"variant": name, **self.spec["variants"][name]["columns"], "seed": seed}
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

        Raises:
            ValueError: there is no such axis.
        """
        if x not in ("step", "flop", "tokens", "seconds"):
            raise ValueError(f"x={x!r} is not an axis: pass 'step', 'flop', 'tokens' or 'seconds'")
        split = "held out" if self.has_held_out else "train"
        return {
            name: {
                seed: ([row[x] for row in rows], [row["loss"] for row in rows])
                for seed in self.seeds
                if (rows := [row for row in self._run_rows(name, seed) if row["split"] == split])
            }
            for name in self.names
        }

    @property
    def has_held_out(self) -> bool:
        """True if the study measures held-out losses."""
        return bool(self.spec["held_out"])

    def last_counts(self, variant: str, seed: int) -> Counts:
        """Return the counts at the end of a run so far."""
        segments = self.segments_of(variant, seed)
        return segments[-1].last() if segments else Counts()
