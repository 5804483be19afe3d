"""The examples in the README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import l2l_core
from workbench.lessons.demo import draw_batch, make_model
from workbench.lessons.demo_values import Settings

ROOT = Path(__file__).resolve().parent.parent


def example(holds: str) -> str:
    """The example that holds a text."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (each for each in examples if holds in each)
    return found


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example("relay.verify"), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("True"), "the relay is equal to training in core"
    assert (tmp_path / "out" / "run").is_dir()


def test_the_example_of_dynamic_depth_runs() -> None:
    settings = Settings(layers=12, width=16, context=8, rows=4, micro_batches=2)
    text = torch.arange(256, dtype=torch.uint8)
    batches = [draw_batch(text, settings, torch.Generator().manual_seed(0)) for _ in range(2)]
    with l2l_core.Relay(make_model(settings), device="cpu") as relay:
        relay.step(batches[0])
        exec(
            compile(example("relay.fork"), "README.md", "exec"),
            {**vars(l2l_core), "relay": relay, "batch": batches[0], "batches": batches},
        )
        assert [branch.name for branch in relay.branches] == ["main", "slim"] and len(relay.stack) == 3


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # where no GPU is found
def test_the_example_of_transformers_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")
    monkeypatch.chdir(tmp_path)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0))
    rows = [{"input_ids": torch.arange(i, i + 6), "labels": torch.arange(i, i + 6)} for i in range(8)]
    names = {"model": model, "rows": rows, "RelayConfig": l2l_core.RelayConfig}
    exec(compile(example("RelayTrainer("), "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 3
