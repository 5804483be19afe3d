"""The leader board takes what is checked, refuses the rest with what would help, and orders by what was saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from workbench.study.leader_board import ABOVE, BELOW, OPEN, LeaderBoard
from workbench.study.study_table import StudyTable, TableRow


class Rows:
    """A finished study, as its tables show it."""

    def __init__(
        self, row: TableRow, interval: Mapping[str, tuple[float | None, float | None]], layers: int = 4, seeds: int = 3
    ) -> None:
        self._row, self._interval, self._layers, self._seeds = row, interval, layers, seeds

    def table(self, baseline: str) -> StudyTable:
        low, high = self._interval.get(baseline, (None, None))
        row = TableRow(**{**vars(self._row), "low": low, "high": high})
        return StudyTable((TableRow(baseline, self._seeds), row), (), baseline)

    def seeds_of(self, variant: str) -> list[int]:
        return [*range(self._seeds)]

    def frame(self) -> pandas.DataFrame:
        return pandas.DataFrame({"variant": ["4 layers", "mine"], "layers": [4, self._layers]})

    def header_of(self, variant: str, seed: int) -> dict[str, Any]:
        return {"schedule": "Depth(depth={0: 1, 9: 4}, 'top')"}


def study(saved: float | None = 0.3, n: int = 3, reached: int = 3, **options: Any) -> Any:
    options.setdefault("interval", {"1 layer": (-0.3, -0.1), "2 layers": (-0.3, -0.1)})
    return Rows(TableRow("mine", n, steps=30.0, reached=reached, pairs=3, saved=saved), **options)


@pytest.fixture
def board(tmp_path: Path) -> LeaderBoard:
    return LeaderBoard(tmp_path / "leader_board.csv", "4 layers", ["1 layer", "2 layers"])


def test_an_entry_is_written_in_its_order_and_replaces_its_earlier_one(board: LeaderBoard) -> None:
    assert board.entries() == [] and "<td>" not in board._repr_html_()
    first = board.enter(study(0.3), "mine")
    assert (first.saved, first.shallow, first.seeds, first.steps) == (0.3, BELOW, 3, 30)
    other = SimpleNamespace(**{**vars(first), "recipe": "other <b>", "saved": 0.4})
    board._write([first, other])  # type: ignore[list-item] - it has the attributes of an entry
    assert [entry.recipe for entry in board.entries()] == ["other <b>", "mine"]
    board.enter(study(0.5), "mine")
    assert [(entry.recipe, entry.saved) for entry in board.entries()] == [("mine", 0.5), ("other <b>", 0.4)]
    assert board.entries()[0].schedule == first.schedule
    assert "other &lt;b&gt;" in board._repr_html_() and "50%" in board._repr_html_()
    assert [path.name for path in board.path.parent.iterdir()] == ["leader_board.csv"]


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("one", "two", "verdict"),
    [
        ((-0.3, -0.1), (-0.2, 0.1), OPEN),
        ((-0.3, -0.1), (0.1, 0.2), ABOVE),
        ((None, None), (-0.2, -0.1), OPEN),
    ],
)
def test_the_verdict_is_against_all_shallow_models(board: LeaderBoard, one: Any, two: Any, verdict: str) -> None:
    assert board.verdict(study(interval={"1 layer": one, "2 layers": two}), "mine") == verdict


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 2}, "2 finished runs of 3.*call study.run"),
        ({"n": 2, "seeds": 2}, "at least 3 seeds"),
        ({"layers": 1}, "ends with 1 layers, '4 layers' with 4: end with as many"),
        ({"saved": None, "reached": 1}, "1 of 3 seeds of 'mine' reach the last loss"),
    ],
)
def test_what_is_not_shown_is_not_entered(board: LeaderBoard, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        board.enter(study(**wrong), "mine")
    assert not board.path.exists()
    assert board.enter(study(), "mine").saved == 0.3


def test_an_unknown_recipe_is_named(board: LeaderBoard) -> None:
    with pytest.raises(ValueError, match="'yours' is no variant of the study: there are 4 layers, mine"):
        board.enter(study(), "yours")
