"""Ways that are measured on an emulated device: the program of each runs as copied, and has the bytes of the table."""

from __future__ import annotations

import contextlib
import copy
import io
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig, ResNetConfig, T5Config, ViTConfig

from l2l_core import Disk, EmulatedDevice
from workbench.fit import FitRequest, FitWay, make_request
from workbench.fit.measured_ways import MeasuredWays

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {"vocab_size": 64, "max_position_embeddings": 16}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0),
    "llama": LlamaConfig(**SIZES, **TEXT, bos_token_id=0, eos_token_id=0),
    "bert": BertConfig(**SIZES, **TEXT),
    "t5": T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0),
    "vit": ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=3),
    "resnet": ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=3),
}
DEVICE = EmulatedDevice(memory_bytes=10**9)
DISK = Disk(read_bytes_per_s=3e9, write_bytes_per_s=3e9, free_bytes=10**10)
EXACT = ("in core", "recompute", "relay", "relay on disk")


class Chain(nn.Module):
    """A plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def run_program(text: str, **given: Any) -> list[list[float]]:
    """Run a program as copied; return the numbers that each of its steps prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(text, copy.deepcopy(given))
    return [[float(word) for word in line.split()] for line in printed.getvalue().splitlines()]


def check_exact(request: FitRequest, **given: Any) -> dict[str, FitWay]:
    ways = {way.name: way for way in request.table().ways}
    for name in EXACT:
        step, loss, peak = run_program(request.code(ways[name]), **given)[-1]
        assert step == 2 and loss > 0
        assert peak == ways[name].device.value, name
        assert ways[name].device.origin == ("forecast" if "relay" in name else "measured")
    return ways


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "gpt2")]
)
def test_programs_of_a_configuration_have_the_bytes_of_the_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = make_request(CONFIGS[name], card=DEVICE, host="8 GB", disk=DISK, rows=4, length=16)
    ways = check_exact(request)
    assert ways["recompute"].device.value < ways["in core"].device.value
    assert ways["8-bit optimizer"].device.value < ways["in core"].device.value
    assert ways["in core"].seconds.origin == "measured" and ways["in core"].seconds.margin > 0


def test_programs_of_a_module_run_where_it_is_defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, batch, loss = Chain(), (torch.randn(8, 8), torch.randn(8, 32)), nn.MSELoss()
    whole = make_request(model, batch, loss=loss, card=DEVICE, host="8 GB", disk=DISK)
    ways = check_exact(whole, model=model, batch=batch, loss=loss)
    # on a card, the same measurements are reused, and programs are plain PyTorch
    on_card = make_request(model, batch, loss=loss, card="RTX 4090", host="8 GB")
    for way in on_card.table().ways[:2]:
        assert way.device.value == ways[way.name].device.value and way.seconds.origin == "formula"
        assert len(run_program(on_card.code(way), model=model, batch=batch, loss=loss)) == 3


@pytest.mark.slow
def test_a_small_device_takes_more_micro_batches() -> None:
    torch.manual_seed(0)
    model, batch, loss = Chain(), (torch.randn(64, 8), torch.randn(64, 32)), nn.MSELoss()
    whole = make_request(model, batch, loss=loss, card=DEVICE, host="8 GB").table().ways[0]
    device = EmulatedDevice(memory_bytes=round(whole.device.value) - 1)
    table = make_request(model, batch, loss=loss, card=device, host="8 GB").table()
    in_core = table.ways[0]
    assert in_core.micro_batches > whole.micro_batches and table.fits(in_core)
    assert table.ways[-1].reason.startswith("give a disk")


def test_a_model_too_large_to_measure_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "decoder_start_token_id": 0}
    memory = namedtuple("memory", "available total")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(2_000_000, 10**10))
    with pytest.raises(ValueError, match=r"has 84,800 parameters, .*Give the same configuration with fewer layers"):
        make_request(T5Config(num_layers=4, **sizes), rows=2, length=8).table()
    monkeypatch.setattr(MeasuredWays, "all_ways", lambda ways: [FitWay("in core", ways.rows)])
    assert make_request(T5Config(num_layers=1, **sizes), rows=2, length=8).table().ways == [FitWay("in core", 2)]
