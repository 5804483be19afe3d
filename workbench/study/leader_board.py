"""Leader board of recipes of depth: a file of entries, each checked over seeds before it is written.

    board = LeaderBoard(Path("leader_board.csv"), deep="4 layers", shallow=["1 layer", "2 layers"])
    board.enter(study, "late growth")

An entry has saved compute if all of its seeds reach the last loss of the deep model with less. The board also states whether the
recipe ends below the shallow models at equal compute, with an interval; a recipe that does not is no reason to grow.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.study.study_table import MIN_SEEDS, StudyTable, TableRow

if TYPE_CHECKING:
    from workbench.study import RecordedStudy

BELOW, ABOVE, OPEN = "below", "above", "no difference shown"


@dataclass(frozen=True)
class BoardEntry:
    """One recipe.

    Attributes:
        recipe: its name.
        saved: share of the deep model's compute that is not needed for its last loss, mean over seeds.
        shallow: "below", "above" or "no difference shown" against the shallow models at equal compute.
        seeds, steps: number of seeds and of steps.
        schedule: text of the schedule.
    """

    recipe: str
    saved: float
    shallow: str
    seeds: int
    steps: int
    schedule: str


@dataclass(frozen=True)
class LeaderBoard:
    """Entries in a file, the largest saving first.

    Args:
        path: CSV file; made with the first entry.
        deep: variant of a study whose last loss is to be reached.
        shallow: variants of fewer layers, the lines to beat.
    """

    path: Path
    deep: str
    shallow: Sequence[str]

    def enter(self, study: RecordedStudy, recipe: str) -> BoardEntry:
        """Check a recipe of a finished study and write it into the file, over an earlier entry.

        Raises:
            ValueError: too few seeds, unfinished runs, another depth at the end, or a loss that some seed does not reach.
        """
        row = _row(study.table(self.deep), recipe)
        if row.diverged:
            raise ValueError(
                f"{row.diverged} runs of {recipe!r} diverged: an entry needs all of its seeds, so change the recipe"
            )
        if row.n < MIN_SEEDS or row.n < len(study.seeds_of(recipe)):
            raise ValueError(
                f"{recipe!r} has {row.n} finished runs of {len(study.seeds_of(recipe))}: an entry needs all, and at least "
                f"{MIN_SEEDS} seeds; call study.run()"
            )
        depths = {name: study.frame().query("variant == @name")["layers"].iloc[-1] for name in (recipe, self.deep)}
        if depths[recipe] != depths[self.deep]:
            raise ValueError(
                f"{recipe!r} ends with {depths[recipe]} layers, {self.deep!r} with {depths[self.deep]}: end with as many"
            )
        if row.saved is None:
            raise ValueError(
                f"{row.reached} of {row.pairs} seeds of {recipe!r} reach the last loss of {self.deep!r}: all must, so give the "
                "layers more steps together"
            )
        schedule = study.header_of(recipe, study.seeds_of(recipe)[0])["schedule"]
        entry = BoardEntry(recipe, row.saved, self.verdict(study, recipe), row.n, round(row.steps or 0), schedule)
        self._write([other for other in self.entries() if other.recipe != recipe] + [entry])
        return entry

    def verdict(self, study: RecordedStudy, recipe: str) -> str:
        """Compare a recipe with every shallow variant at equal compute, by the intervals over seeds."""
        rows = [_row(study.table(name), recipe) for name in self.shallow]
        if any(row.low is None or row.high is None for row in rows):
            return OPEN
        if all(row.high is not None and row.high < 0 for row in rows):
            return BELOW
        return ABOVE if any(row.low is not None and row.low > 0 for row in rows) else OPEN

    def entries(self) -> list[BoardEntry]:
        """Read the entries, the largest saving first."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return [
                BoardEntry(
                    row["recipe"],
                    float(row["saved"]),
                    row["shallow"],
                    int(row["seeds"]),
                    int(row["steps"]),
                    row["schedule"],
                )
                for row in csv.DictReader(file)
            ]

    def _write(self, entries: Sequence[BoardEntry]) -> None:
        part = self.path.with_name(f".{self.path.name}.part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(BoardEntry)])
            writer.writeheader()
            writer.writerows(vars(entry) for entry in sorted(entries, key=lambda entry: -entry.saved))
        part.replace(self.path)

    def _repr_html_(self) -> str:
        head = ("", "recipe", "compute saved", "at equal compute, the shallow models are beaten", "seeds", "steps")
        words = {BELOW: "yes", ABOVE: "no", OPEN: "not shown"}
        lines = [
            (i, escape(each.recipe), f"{each.saved:.0%}", words[each.shallow], each.seeds, each.steps)
            for i, each in enumerate(self.entries(), start=1)
        ]
        cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
        header = "".join(f'<th scope="col">{cell}</th>' for cell in head)
        return f"<table><thead><tr>{header}</tr></thead><tbody>{cells}</tbody></table>"


def _row(table: StudyTable, variant: str) -> TableRow:
    for row in table.rows:
        if row.variant == variant:
            return row
    raise ValueError(
        f"{variant!r} is no variant of the study: there are {', '.join(row.variant for row in table.rows)}"
    )
