"""The line of a race, as plain values for JSON, and back: see `lines.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from workbench.runs.lines import Row, build
from workbench.session import Change, Measured, Race, Racer, StepRow


def race_row(race: Race) -> Row:
    """Make the row of a race that is over, with all steps of its branches: moments do not say which of them were in a race."""
    return {"asked": race.asked, "ended": race.ended, "racers": [asdict(racer) for racer in race.racers]}


def race_of(row: Mapping[str, Any]) -> Race:
    """Make the race that `race_row` was given.

    Raises:
        KeyError, TypeError, ValueError: it is no such row.
    """
    racers = tuple(_racer_of(racer) for racer in row["racers"])
    if len(racers) < 2:
        raise ValueError(f"a race of {len(racers)} branches")
    return Race(int(row["asked"]), racers, is_over=True, ended=str(row["ended"]))


def _racer_of(row: Mapping[str, Any]) -> Racer:
    steps = tuple(build(StepRow, step) for step in row["steps"])
    measured = tuple((int(at), Measured.of_plain(found)) for at, found in row["measured"])
    # Pictures read these side by side: what does not fit is named with its line here, and breaks no picture later.
    if len(row["flop"]) != len(steps) or any(not 0 <= at <= len(steps) for at, _ in measured):
        raise ValueError(f"FLOP or measurements do not fit the {len(steps)} steps of {row['name']}")
    lists = {
        "steps": steps,
        "flop": tuple(map(int, row["flop"])),
        "measured": measured,
        "changes": tuple(build(Change, change) for change in row["changes"]),
    }
    return Racer(**(dict(row) | lists))
