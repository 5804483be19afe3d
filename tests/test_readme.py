"""The examples in the README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import l2l_core
from workbench.lessons.demo import draw_batch, make_model
from workbench.lessons.demo_values import Settings

ROOT = Path(__file__).resolve().parent.parent


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(examples()[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("True"), "the relay is equal to training in core"
    assert (tmp_path / "out" / "run").is_dir()


def test_the_example_of_dynamic_depth_runs() -> None:
    settings = Settings(layers=12, width=16, context=8, rows=4, micro_batches=2)
    text = torch.arange(256, dtype=torch.uint8)
    batches = [draw_batch(text, settings, torch.Generator().manual_seed(0)) for _ in range(2)]
    with l2l_core.Relay(make_model(settings), device="cpu") as relay:
        relay.step(batches[0])
        exec(
            compile(examples()[1], "README.md", "exec"),
            {**vars(l2l_core), "relay": relay, "batch": batches[0], "batches": batches},
        )
        assert [branch.name for branch in relay.branches] == ["main", "slim"] and len(relay.stack) == 3
