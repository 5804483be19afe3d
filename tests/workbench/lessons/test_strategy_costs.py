"""Ways to train, by formula: against counted steps of a small model, published bytes per parameter, and sums by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from l2l_core import Machine, RelayConfig
from workbench.commands.notebook_runner import FOLDER, read_notebook
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_optimizer, make_schedule
from workbench.lessons.demo_values import Settings
from workbench.lessons.plain_training import PlainTrainer
from workbench.lessons.strategy_costs import StepSpec, StrategyCost, all_micro_batchings, best_strategies, llama_config

MACHINE = Machine(flops_per_s=100e12, update_params_per_s=1.5e9, h2d_bytes_per_s=25e9, d2h_bytes_per_s=25e9)
SMALL = Settings(layers=6, width=32, context=32, rows=8, micro_batches=4)
LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=88,
    num_hidden_layers=6,
    num_attention_heads=4,
    max_position_embeddings=32,
)


def counted(recomputes: bool) -> int:
    """Most bytes of a plain step, every storage counted."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    if recomputes:
        model.activation_checkpointing_enable()
    factories = partial(make_optimizer, settings=SMALL), partial(make_schedule, settings=SMALL)
    plain = PlainTrainer(model, *factories, RelayConfig(seed=0, micro_batches=SMALL.micro_batches), torch.device("cpu"))
    return plain.measure_peak_bytes(draw_batch(load_corpus().train, SMALL, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("recomputes", [False, True])
def test_need_in_core_is_what_is_counted(recomputes: bool) -> None:
    step = StepSpec(LLAMA, MACHINE, SMALL.rows, SMALL.context, SMALL.micro_batches, "fp32")
    way = step.recompute() if recomputes else step.in_core()
    assert way.peak_bytes == pytest.approx(counted(recomputes), rel=0.05)


def test_bytes_per_parameter_are_those_of_the_papers() -> None:
    """ZeRO (arXiv 1910.02054): 16 in core. ZeRO-Offload (2101.06840): 2 on the device, and the rest on the host."""
    step = StepSpec(llama_config("70 B"), MACHINE, rows=1, length=1)
    params = step.model.num_params
    whole, offload = step.in_core(), step.zero_offload()
    assert sum(whole.device_bytes[name] for name in ("weights", "gradients", "optimizer")) == 16 * params
    assert offload.device_bytes["weights"] == 2 * params and offload.host_bytes == 14 * params
    assert offload.link_bytes == 4 * params  # the paper's volume of a step: gradients out, weights in
    assert step.fsdp_offload().host_bytes == 16 * params


def test_seconds_by_hand() -> None:
    """Of a step so short that all that counts is how often weights and gradients are copied."""
    step = StepSpec(llama_config("7 B"), MACHINE, rows=4, length=1, micro_batches=4)
    N = step.model.num_params
    update_s = N / 1.5e9
    assert step.fsdp_offload().seconds == pytest.approx(2 * 4 * (4 * N / 25e9) + update_s)
    assert step.zero_offload().seconds == pytest.approx(4 * (2 * N / 25e9) + update_s, rel=0.01)
    assert step.relay().link_bytes < 0.5 * step.fsdp_offload().link_bytes


def test_compute_by_hand() -> None:
    """6 operations per parameter and token in core, 8 with recompute; the embedding does none."""
    step = StepSpec(llama_config("70 B"), MACHINE, rows=1, length=64)
    operations = step.model.num_params * 64 / 100e12
    assert step.in_core().seconds == pytest.approx(6 * operations, rel=0.01)
    assert step.recompute().seconds == pytest.approx(8 * operations, rel=0.01)


def test_every_cut_of_the_batch_is_tried() -> None:
    ways = all_micro_batchings(StepSpec(llama_config("1 B"), MACHINE, rows=6, length=128))
    assert sorted({way.micro_batches for way in ways}) == [1, 2, 3, 6] and len(ways) == 4 * 5


def test_the_fastest_that_fits_or_else_the_smallest() -> None:
    def way(name: str, nbytes: int, seconds: float, host: int = 0) -> StrategyCost:
        return StrategyCost(name, 1, {"weights": nbytes}, host, seconds, 0)

    ways = [way("a", 9, 1.0), way("a", 5, 2.0), way("a", 4, 3.0), way("b", 30, 1.0), way("b", 20, 2.0)]
    best = best_strategies(ways, memory_bytes=5)
    assert (best["a"].peak_bytes, best["b"].peak_bytes) == (5, 20)
    assert best_strategies([*ways, way("a", 1, 0.5, host=7)], memory_bytes=5, host_bytes=6)["a"].seconds == 2.0


@pytest.mark.parametrize("rows, micro_batches", [(8, 3), (8, 0), (0, 1)])
def test_rows_that_cannot_be_cut_are_refused(rows: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match=f"rows={rows} in micro_batches={micro_batches}"):
        StepSpec(llama_config("1 B"), MACHINE, rows, 16, micro_batches)


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size='3 B': there are '1 B', '7 B', '70 B'"):
        llama_config("3 B")


def test_notebook_06_says_of_its_table_what_is_in_it() -> None:
    cells = read_notebook(FOLDER / "06_when_to_relay.ipynb").cells
    (told,) = (" ".join(cell.source.split()) for cell in cells if cell.source.startswith("Read the table by rows."))

    def best(size: str, gigabytes: int, machine: Machine = MACHINE, rows: int = 8) -> dict[str, StrategyCost]:
        return {
            **best_strategies(all_micro_batchings(StepSpec(llama_config(size), machine, rows, 2048)), gigabytes * 1e9)
        }

    offloading = {"ZeRO-Offload", "FSDP, offload", "relay"}
    for size, gigabytes in (("1 B", 8), ("7 B", 24)):
        table = best(size, gigabytes)
        assert {name for name, way in table.items() if way.fits(gigabytes * 1e9)} == offloading
        assert min(table[name].seconds for name in offloading) == table["relay"].seconds
    assert "In core does not fit, with recompute or without. ZeRO-Offload, FSDP with offload and the relay do." in told
    N = StepSpec(llama_config("7 B"), MACHINE, 8, 2048).model.num_params
    assert table["ZeRO-Offload"].link_bytes < table["relay"].link_bytes < 28 * N  # "less than that, though still more"
    unhidden = best("7 B", 24, replace(MACHINE, h2d_bytes_per_s=4e9, d2h_bytes_per_s=4e9), rows=1)
    zero_s, relay_s = unhidden["ZeRO-Offload"].seconds, unhidden["relay"].seconds
    assert zero_s < relay_s and f"one row per step, {zero_s:.0f} seconds against {relay_s:.0f}." in told
