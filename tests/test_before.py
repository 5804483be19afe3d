"""What earlier versions have written still loads: the files of `tests/stored`, made when all of the engine was in one folder."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from sessions import make_relay, mse

from l2l_core import Relay
from workbench import load_run
from workbench.pictures import journal_table

STORED = Path(__file__).with_name("stored")


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, targets = (torch.Generator().manual_seed(each) for each in (seed, 9 + seed))
    return torch.randn(4, 4, generator=rows), torch.randn(4, 1, generator=targets)


def test_a_relay_that_was_saved_goes_on(tmp_path: Path) -> None:
    """With its layer more, its journal and its branch; losses as they were, up to another processor's rounding."""
    expected = json.loads((STORED / "expected.json").read_text())
    folder = shutil.copytree(STORED / "relay", tmp_path / "relay")
    with make_relay() as fresh:
        model = fresh.model
    with Relay.load(folder, model, partial(torch.optim.AdamW, lr=1e-2), loss=mse) as relay:
        assert len(relay.stack) == expected["layers"] and relay.steps == 4
        assert [relay.step(batch(seed)).loss for seed in (4, 5)] == pytest.approx(expected["losses"], rel=1e-5)
        assert {branch.name for branch in relay.branches} == {"main", "other"} and len(relay.journal) == 2
        relay.undo()
        relay.undo()
        assert len(relay.stack) == 4
        relay.switch("main")
        assert len(relay.stack) == 5
        assert relay.verify(batch(6)).equal


def test_a_run_that_was_recorded_is_shown() -> None:
    run = load_run(STORED / "run.jsonl.gz")
    assert run.complete and [row.step for row in run.snapshot().steps] == [*range(1, 11)]
    assert run.traced
    for trace in map(run.trace, run.traced):
        assert max(event.stay for event in trace.lanes["compute"]) > 0  # the lines do not say it
    (table,) = [journal_table(now.journal, now.changes) for now in [run.snapshot()]]
    assert [row[3] for row in table.rows] == ["not measured"] * len(table.rows) and table.rows, (
        "by that version, of edits"
    )
