"""Runs whose loss or gradient is not finite end as diverged, and the other runs of the study go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from l2l_core import Depth, EmulatedDevice, Relay, RelayConfig
from workbench import Study, Variant
from workbench.study.leader_board import LeaderBoard
from workbench.study.study_figure import mean_curves
from workbench.study.study_picture import draw_study

matplotlib = pytest.importorskip("matplotlib")


class Root(nn.Module):
    """A layer whose gradient is not finite, although its output is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(self.weight)


def make_relay(seed: int, lr: float = 0.1, seed_of_lr: int | None = None, root: bool = False, fails: int = -1) -> Relay:
    if seed == fails:
        raise ZeroDivisionError("made to fail")
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2)]
    if root:
        layers[0] = Root()
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(4, 1))
    rate = lr if seed_of_lr in (None, seed) else 0.1
    config = RelayConfig(verify="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return Relay(model, optimizer, EmulatedDevice(), layers=[*model[0]], loss=nn.MSELoss(), config=config)


def draw(seed: int) -> Any:
    while True:
        yield torch.randn(4, 4), torch.randn(4, 1)


GROWTH = Depth({0: 2, 5: 4}, grow="top")
VARIANTS: dict[str, Any] = {
    "plain": None,
    "high": Variant(None, {"lr": 1e25}),
    "high, grown": Variant(GROWTH, {"lr": 1e25}),
    "once": Variant(None, {"lr": 1e25, "seed_of_lr": 1}),
    "root": Variant(None, {"root": True}),
}


def make_study(folder: Path, *names: str, **options: Any) -> Study:
    held_out = [(torch.ones(4, 4), torch.ones(4, 1))]
    variants = {name: VARIANTS[name] for name in names or VARIANTS}
    given: dict[str, Any] = {"seeds": range(2), "steps": 6, "evaluate_every": 1, "folder": folder} | options
    return Study(make_relay, variants, batches=draw, held_out=held_out, **given)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    study = make_study(tmp_path_factory.mktemp("study") / "all")
    study.run(report=None)
    return study


def test_the_other_runs_have_the_bits_of_a_study_without_it(study: Study, tmp_path: Path) -> None:
    alone = make_study(tmp_path, "plain")
    alone.run(report=None)
    frame = study.frame(seconds=False).query("variant == 'plain'")[[*alone.frame(seconds=False).columns]]
    assert alone.frame(seconds=False).equals(frame) and len(alone.frame()) == 2 * 12


def test_a_diverged_run_is_recorded_with_its_step_and_those_that_share_it_too(study: Study) -> None:
    steps = {(name, seed): study.diverged_at(name, seed) for name, seed in study.runs}
    ended = {run: step for run, step in steps.items() if step is not None}
    assert {*ended} == {
        ("high", 0),
        ("high", 1),
        ("high, grown", 0),
        ("high, grown", 1),
        ("once", 1),
        ("root", 0),
        ("root", 1),
    }
    assert ended["root", 0] == 1 and ended["high", 0] == ended["high, grown", 0] > 1
    rows = study.frame().query("split == 'diverged'")
    assert {(row.variant, row.seed): row.step for row in rows.itertuples()} == ended and rows["loss"].isna().all()
    runs = study.run_frame().set_index(["variant", "seed"])
    assert runs["diverged_at"].dropna().to_dict() == ended and runs["finished"].sum() == 3
    assert not [*study.folder.rglob("state")]
    assert study.share_done() == 1


def test_it_is_shown_in_progress_table_and_figures(study: Study, tmp_path: Path) -> None:
    lines = list[str]()
    rows = {path: path.read_bytes() for path in study.folder.rglob("rows.jsonl")}
    study.run(report=lines.append)  # nothing is tried again
    assert len(lines) == 1 and lines[0].startswith("3 of 10 runs finished, 7 diverged.")
    assert {path: path.read_bytes() for path in study.folder.rglob("rows.jsonl")} == rows
    table = study.table()
    assert [(row.n, row.diverged) for row in table.rows] == [(2, 0), (0, 2), (0, 2), (1, 1), (0, 2)]
    text = table.to_markdown()
    assert "| once | 1, 1 diverged | 6 |" in text and "| high | 0, 2 diverged | – |" in text
    step = study.diverged_at("once", 1)
    assert f"not finite: high (seed 0 at step {step}, seed 1 at step {step});" in text
    assert f"once (seed 1 at step {step}); root (seed 0 at step 1, seed 1 at step 1). The means" in text
    assert "runs are finished; the others" not in text
    assert mean_curves(study, "step")["once"].n == 1 and mean_curves(study, "step")["once"].x[-1] == 6
    drawn = draw_study(study, "flop")
    assert "; once: 1 of 2 diverged; root: 2 of 2 diverged" in drawn  # for screen readers
    assert (
        "over seeds; high: 2 of 2 diverged; high, grown: 2 of 2 diverged" in drawn and "…" in drawn
    )  # within its width
    assert "once: 1 of 2 diverged" in study.save(tmp_path / "figure.svg").read_text()
    with pytest.raises(
        ValueError, match="1 runs of 'once' diverged: an entry needs all of its seeds, so change the recipe"
    ):
        LeaderBoard(tmp_path / "board.csv", "plain", []).enter(study, "once")


def test_other_errors_stop_the_study(tmp_path: Path) -> None:
    study = Study(make_relay, {"a": Variant(None, {"fails": 0})}, seeds=[0], steps=2, batches=draw, folder=tmp_path)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="made to fail"):
            study.run(report=None)
    assert study.finished_runs() == "0 of 1 runs finished"


@pytest.mark.slow
def test_processes_record_it_too(study: Study, tmp_path: Path) -> None:
    other = make_study(tmp_path, workers=2)
    other.run(report=None)
    assert other.frame(seconds=False).equals(study.frame(seconds=False)) and str(other.table()) == str(study.table())
