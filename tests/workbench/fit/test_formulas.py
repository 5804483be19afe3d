"""Ways by formula: against steps that ran on an H100, and sums by hand; cards, arguments, the table and its HTML."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, ViTConfig

from workbench.__main__ import main
from workbench.fit import ALIASES, CARDS, PRESETS, WAYS, FitTable, FitWay, find_card, fit_html, make_request

# `docs/BENCHMARKS.md`, "On a GPU": layers, width, rows, and seconds and GB of the relay and in core with recompute.
ON_H100 = [
    (24, 2048, 16, {"relay": (1.30, 3.49), "recompute": (0.736, 26.5)}),
    (24, 2048, 64, {"relay": (4.54, 3.49), "recompute": (3.44, 26.6)}),
    (32, 4096, 32, {"relay": (6.46, 6.60)}),
]


def llama(layers: int, width: int) -> LlamaConfig:
    """The shape of `benchmarks/gpu.py`."""
    heads, inner = width // 128, -(-8 * width // 3 // 64) * 64
    return LlamaConfig(hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads)


def ways_of(model: Any, **settings: Any) -> dict[str, FitWay]:
    return {way.name: way for way in make_request(model, **settings).table().ways}


@pytest.mark.parametrize(("layers", "width", "rows", "measured"), ON_H100)
def test_steps_on_an_h100_are_within_the_margins(layers: int, width: int, rows: int, measured: Any) -> None:
    config = llama(layers, width)
    request = make_request(config, card="H100 80GB", host="135GB", rows=4, length=1024)  # micro-batches of 4 rows
    factor = rows // 4
    for way in request.table().ways:
        if way.name not in measured:
            continue
        seconds, gigabytes = measured[way.name]
        copies = 2 * request.source.num_params if way.name == "recompute" else 0  # there, autocast kept its copies
        assert (way.device.value + copies) / 1e9 == pytest.approx(gigabytes, rel=0.08), way.name
        if way.name == "recompute":
            low, high = (factor * (way.seconds.value + sign * way.seconds.margin) for sign in (-1, 1))
            assert low < seconds < high, way.name
    if rows <= 32:  # the relay's updates are hidden under more micro-batches, so its whole step is forecast
        way = ways_of(config, card=replace(CARDS["H100 80GB"], memory_bytes=8 * 10**9), host="135GB", rows=rows)[
            "relay"
        ]
        assert abs(way.seconds.value - measured["relay"][0]) < way.seconds.margin


def test_bytes_per_parameter() -> None:
    """16 in core, and 2 of autocast's copies; 10 with an optimizer of 8 bits; 2 and the adapters with LoRA."""
    request = make_request(llama(8, 2048), card="H100 80GB", rows=1, length=1)
    ways, N = {way.name: way for way in request.table().ways}, request.source.num_params
    assert ways["in core"].device.value / N == pytest.approx(18, rel=0.01)
    assert ways["8-bit optimizer"].device.value / N == pytest.approx(18 - 6 + 8 / 256, rel=0.01)
    matrices = [(2048, 2048)] * 4 + [(2048, 5504)] * 3
    adapters = 8 * 8 * sum(map(sum, matrices))  # 8 layers, rank 8
    assert ways["LoRA"].device.value == pytest.approx(2 * N + 16 * adapters, rel=0.01)
    assert ways["LoRA"].seconds.value / ways["in core"].seconds.value == pytest.approx(4 / 6)
    assert ways["ZeRO-Offload"].host.value == 14 * N
    on_nf4, matrix_params = ways["relay, LoRA on NF4"], 8 * sum(rows * columns for rows, columns in matrices)
    host = (0.5 + 1 / 64 + 4 / 64 / 256) * matrix_params + 6 * (N - matrix_params) + 14 * adapters
    assert on_nf4.host.value == pytest.approx(host, rel=0.02)
    assert on_nf4.device.value < ways["relay"].device.value


def test_the_fewest_micro_batches_that_fit_are_taken_and_recompute_only_where_needed() -> None:
    wide, narrow = (ways_of("gpt2", card=card, rows=32, length=1024) for card in ("H100 80GB", "RTX 4090"))
    assert wide["in core"].micro_batches < narrow["in core"].micro_batches
    small = replace(CARDS["RTX 4090 24GB"], memory_bytes=2 * 10**9)
    ways = ways_of("gpt2", card=small, rows=8, length=1024)
    assert ways["8-bit optimizer"].recomputes and not narrow["8-bit optimizer"].recomputes


def test_table_names_what_binds_and_what_is_lacking() -> None:
    table = make_request("llama", card="4090", host="32GB", disk="100GB", rows=8, length=512).table()
    ways = {way.name: way for way in table.ways}
    assert table.binds(ways["in core"]) == "device memory" and "of device memory" in table.verdict(ways["in core"])
    assert table.binds(ways["relay"]) == "host memory"
    assert table.binds(ways["relay on disk"]) == "disk" and "GB of disk" in table.verdict(ways["relay on disk"])
    assert table.fits(ways["LoRA"]) and table.fits(ways["relay, LoRA on NF4"])
    assert (
        table.best is ways["LoRA"] and "only LoRA and relay, LoRA on NF4 fit, which train few weights" in table.summary
    )
    for words in ("in core", "formula", "forecast", "±", "NVIDIA Ada whitepaper"):
        assert words in str(table) and words in fit_html(table)
    larger = make_request("llama", card="4090", host="32GB", disk="1TB", rows=8, length=512).table()
    assert larger.best is not None and larger.best.name == "relay on disk"
    assert re.search(r"relay on disk, [\d.,]+ ± [\d.,]+ s a step", larger.summary)


def test_images_have_the_length_of_their_patches() -> None:
    config = ViTConfig(num_hidden_layers=2)
    one, other = (make_request(config, card="L4 24GB", rows=2, length=length).table() for length in (8, 4000))
    assert one.ways == other.ways and "197 tokens" in one.title


@pytest.mark.parametrize("name", [*ALIASES, *PRESETS])
def test_names_give_configurations_and_programs_that_compile(name: str) -> None:
    request = make_request(name, card="H100 80GB", host="64GB")
    for way in WAYS:
        assert ast.parse(request.code(FitWay(way, 2, True, pool_bytes=10**9)))


def test_cards_have_sources_and_are_found_by_part_of_their_name() -> None:
    assert find_card("rtx4090") is CARDS["RTX 4090 24GB"] and find_card("h100 80gb") is CARDS["H100 80GB"]
    for card in CARDS.values():
        assert "NVIDIA" in card.source and card.flops_per_s["bf16"] > card.flops_per_s["fp32"]
        assert f"{card.memory_bytes // 10**9}GB" in card.name


@pytest.mark.parametrize(
    ("wrong", "message", "right"),
    [
        ({"card": "A100"}, r"card='A100' matches A100 40GB, A100 80GB: choose one of", {"card": "A100 40GB"}),
        ({"card": "TPU"}, r"card='TPU' matches no card: .* or \"emulated 2GB\"", {"card": "emulated 2GB"}),
        ({"host": "many"}, r"host='many': must be a number of bytes with a unit", {"host": "500 MB"}),
        ({"disk": "nowhere/at/all"}, r"disk='nowhere/at/all': .*or an existing folder", {"disk": "."}),
        ({"rows": 0}, r"rows=0: must be a whole number of at least 1", {"rows": 1}),
        ({"precision": "fp8"}, r"precision='fp8': must be one of 'bf16', 'fp32'", {"precision": "bf16"}),
        ({"model": "gpt9"}, r"model='gpt9': neither a folder .* nor one of the names .*gpt2", {"model": "gpt2"}),
        ({"model": 3}, r"model=3 is a int: give a folder", {"model": "bert"}),
    ],
)
def test_arguments_that_cannot_be_read_are_refused_with_a_remedy(wrong: Any, message: str, right: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make_request(**{"model": "gpt2", **wrong})
    assert make_request(**{"model": "gpt2", **right})


def test_rows_longer_than_the_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"length=2048: gpt2 has 1024 positions, so a row has at most 1024 tokens"):
        make_request("gpt2", length=2048).table()
    assert make_request("gpt2", length=1024, rows=1).table()


def test_the_command_prints_table_program_and_cards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama(2, 256).to_diff_dict()))
    options = ["fit", str(tmp_path), "--card", "H100 80GB", "--host", "128GB", "--disk", "1TB", "--rows", "2"]
    assert main(options) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{tmp_path.name}, 2 rows of 1,024 tokens a step, bf16; H100 80GB, 128 GB of host memory")
    assert main([*options, "--code", "relay"]) == 0
    assert f"AutoConfig.from_pretrained({str(tmp_path)!r})" in capsys.readouterr().out
    assert main([*options[:-2], "--cards"]) == 0 and "NVIDIA A100 datasheet" in capsys.readouterr().out
    assert main(["fit", "gpt2", "--card", "TPU"]) == 1 and "choose one of" in capsys.readouterr().err
    assert main(["fit"]) == 2 and "give a model" in capsys.readouterr().err


def test_html_escapes_and_marks_the_chosen_way() -> None:
    table = make_request("gpt2", card="L4 24GB", rows=2).table()
    html = fit_html(FitTable("<b>", table.ways, table.limits), "relay")
    assert "<b>" not in html and "&lt;b&gt;" in html
    assert html.count("l2l-chosen") == 1 and html.count("<tr data-key=") == len(table.ways)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_program_on_nf4_runs_as_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("accelerate", "bitsandbytes", "peft"):
        pytest.importorskip(library, reason="the extra quant is not installed")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=16, bos_token_id=0, eos_token_id=0)
    request = make_request(config, card="L4 24GB", host="8GB", rows=2, length=16, precision="fp32")
    [way] = [way for way in request.table().ways if way.name == "relay, LoRA on NF4"]
    for _ in range(2):  # the second time the program of the folder that the first one has written
        program = request.code(way)
        exec(program.replace("device='cuda'", "device='cpu'"), {})
        losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
        assert len(losses) == 3 and losses[2] < losses[0] and "from_pretrained" in program
        request = make_request(tmp_path / "out" / "base", card="L4 24GB", rows=2, length=16, precision="fp32")
