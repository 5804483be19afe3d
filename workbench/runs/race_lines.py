"""Conversion of a race to a JSON row and back (see `run_lines.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from workbench.runs.run_lines import JsonRow, build_record
from workbench.session import Change, ProbeLosses, Race, Racer, StepRow


def race_row(race: Race) -> JsonRow:
    """Convert a finished race to a row with the steps of its branches, because moments do not mark them."""
    return {"asked": race.asked, "ended": race.ended, "racers": [asdict(racer) for racer in race.racers]}


def race_from_row(row: Mapping[str, Any]) -> Race:
    """Convert a row of `race_row` back.

    Raises:
        KeyError, TypeError, ValueError: the row is malformed.
    """
    racers = tuple(_racer_from_row(racer) for racer in row["racers"])
    if len(racers) < 2:
        raise ValueError(f"a race of {len(racers)} branches")
    return Race(int(row["asked"]), racers, is_over=True, ended=str(row["ended"]))


def _racer_from_row(row: Mapping[str, Any]) -> Racer:
    steps = tuple(build_record(StepRow, step) for step in row["steps"])
    measured = tuple((int(at), ProbeLosses.of_plain(found)) for at, found in row["measured"])
    # Checked here, where the error has a line number, because pictures rely on it.
    if len(row["flop"]) != len(steps) or any(not 0 <= at <= len(steps) for at, _ in measured):
        raise ValueError(f"FLOP or measurements do not fit the {len(steps)} steps of {row['name']}")
    lists = {
        "steps": steps,
        "flop": tuple(map(int, row["flop"])),
        "measured": measured,
        "changes": tuple(build_record(Change, change) for change in row["changes"]),
    }
    return Racer(**(dict(row) | lists))
