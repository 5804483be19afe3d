"""Files of a segment: a stretch of steps that one or more runs of a study share.

    study.json                   variants, seeds, budget, fingerprints of the user's functions
    segments/s0-g0/              seed 0, first group of factors: all runs that begin alike
        segment.json             variants, factors, schedule, settings, versions, commit
        rows.jsonl               a line per step and per held-out measurement; the same bytes in every repetition
        seconds.jsonl            wall time of each step, which differs between repetitions
        state/                   the last save of the relay, until no run needs it; with keep_models that of a run's end stays
        end.json                 step, FLOP and tokens at the end, the formula of FLOP, and the variants of each child; or the
                                 error of a run that diverged
    segments/s0-g0.1/            second child: continues from the state at the end of s0-g0

A process that is killed leaves complete lines, a complete save, and at most lines of steps after the save, which are dropped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEGMENTS = "segments"


@dataclass(frozen=True)
class Counts:
    """Finished steps of a run, and their compute and tokens."""

    step: int = 0
    flop: int = 0
    tokens: int = 0


class SharedSegment:
    """One segment of a study's folder.

    Args:
        study: folder of the study.
        name: seed, group of factors, and numbers of the branches that led here: ``s0-g0.1.0``.
    """

    def __init__(self, study: Path, name: str) -> None:
        self.study, self.name = study, name
        self.folder = study / SEGMENTS / name

    @property
    def seed(self) -> int:
        """Seed of its runs."""
        return int(self.name.partition("-")[0][1:])

    @property
    def parent(self) -> SharedSegment | None:
        """The segment that this one continues."""
        before = self.name.rpartition(".")[0]
        return SharedSegment(self.study, before) if before else None

    @property
    def state(self) -> Path:
        """Folder of the relay's last save."""
        return self.folder / "state"

    @property
    def end(self) -> dict[str, Any] | None:
        """Content of `end.json`; None if the segment has not ended."""
        return read_json(self.folder / "end.json")

    @property
    def children(self) -> list[SharedSegment]:
        """Segments that go on from the end of this one."""
        end = self.end or {"children": ()}
        return [SharedSegment(self.study, f"{self.name}.{i}") for i in range(len(end["children"]))]

    @property
    def header(self) -> dict[str, Any]:
        """Content of `segment.json`; empty before the first step."""
        return read_json(self.folder / "segment.json") or {}

    @property
    def first(self) -> Counts:
        """Counts at its beginning."""
        return Counts() if self.parent is None else _counts(self.parent.end or {})

    def last(self) -> Counts:
        """Return the counts after its last recorded step."""
        steps = [row for row in self.rows() if row["split"] == "train"]
        return _counts(steps[-1]) if steps else self.first

    # -- lines ---------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Return the recorded rows, in order."""
        return [*_read_lines(self.folder / "rows.jsonl")]

    def seconds(self) -> dict[int, float]:
        """Return the wall time of each step."""
        return {row["step"]: row["seconds"] for row in _read_lines(self.folder / "seconds.jsonl")}

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append a row, which survives the end of this process."""
        _append(self.folder / "rows.jsonl", row)

    def add_seconds(self, step: int, seconds: float) -> None:
        """Append the wall time of a step."""
        _append(self.folder / "seconds.jsonl", {"step": step, "seconds": seconds})

    def drop_after(self, step: int) -> None:
        """Drop the lines of later steps, which are trained again."""
        for name in ("rows.jsonl", "seconds.jsonl"):
            path = self.folder / name
            kept = [row for row in _read_lines(path) if row["step"] <= step]
            _replace(path, "".join(_line(row) for row in kept))

    # -- the end -------------------------------------------------------------------------------------------------------

    def write_header(self, header: Mapping[str, Any]) -> None:
        """Write `segment.json`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "segment.json", header)

    def finish(
        self, counts: Counts, formula: str, children: Sequence[Sequence[str]] = (), diverged: str | None = None
    ) -> None:
        """Write `end.json`.

        Args:
            counts: at its end.
            formula: statement of what the operations in `counts` contain.
            children: the variants of each segment that continues from here.
            diverged: the error of the next step if the loss or a gradient was not finite; the segment's runs end here.
        """
        end = {**vars(counts), "formula": formula, "children": children}
        write_json(self.folder / "end.json", end if diverged is None else {**end, "diverged": diverged})

    def drop_state(self) -> None:
        """Remove the save of the relay."""
        shutil.rmtree(self.state, ignore_errors=True)


def chains(study: Path, root: str, variant: str) -> list[SharedSegment]:
    """Return the segments of the run of a variant, from the root to the last that has begun."""
    found, segment = list[SharedSegment](), SharedSegment(study, root)
    while segment.folder.exists():
        found.append(segment)
        branches = (segment.end or {"children": ()})["children"]
        at = next((i for i, names in enumerate(branches) if variant in names), None)
        if at is None:
            break
        segment = segment.children[at]
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object; the file has the old or the new content at any moment."""
    _replace(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(row))


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file; the last one is incomplete if the process was killed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _counts(row: Mapping[str, Any]) -> Counts:
    return Counts(row.get("step", 0), row.get("flop", 0), row.get("tokens", 0))
