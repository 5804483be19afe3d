"""`Relay.from_pretrained`: models of a folder, quantised while they are read, train as those that transformers loads."""

import logging
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from oracle import InCore, differences
from torch import nn
from zoo import BY_NAME

from l2l_core import EmulatedDevice, FileShelf, Relay, RelayConfig
from l2l_core.eps.blocks import quantised_parts
from l2l_core.integrations import load_pretrained
from l2l_core.shelf import initial_weights

CONFIG = RelayConfig(micro_batches=3, stash="host", seed=0)
KIND = BY_NAME["llama"]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
trained_adamw = partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """bitsandbytes warns in every forward that 8-bit layers compute in float16, and transformers shows progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    hf.utils.logging.disable_progress_bar()
    yield
    logging.disable(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama in several files."""
    KIND.make_model().save_pretrained(tmp_path / "base", max_shard_size="20kB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    return tmp_path / "base"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return trained_adamw([param for param in model.parameters() if param.requires_grad])


def check_three_steps(relay: Relay, twin: nn.Module) -> None:
    plain = InCore(KIND, twin, adamw(twin), CONFIG)
    for seed in range(3):
        batch = KIND.make_batch(7, seed)
        assert relay.step(batch).loss == plain.step(batch)


def test_without_quantisation_all_weights_are_trained(folder: Path) -> None:
    with Relay.from_pretrained(folder, trained_adamw, device=EmulatedDevice(), config=CONFIG) as relay:
        check_three_steps(relay, KIND.make_model())


def quantised_twin(folder: Path, bits: str) -> Any:
    """The same by transformers and peft alone."""
    import peft

    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    quantised = {"nf4": {"load_in_4bit": True, **four}, "int8": {"load_in_8bit": True}}[bits]
    base = hf.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=hf.BitsAndBytesConfig(**quantised), device_map="cpu", dtype=torch.float32
    )
    torch.manual_seed(1)
    return peft.get_peft_model(base, lora()).train()


def lora() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")


def needs_libraries() -> None:
    for library in ("bitsandbytes", "peft", "accelerate"):
        pytest.importorskip(library, reason="the extra quant is not installed")


@pytest.mark.parametrize("bits", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_adapters_on_a_quantised_base_train_as_in_core(bits: str, folder: Path, tmp_path: Path) -> None:
    needs_libraries()
    options: dict[str, Any] = {"quantize": bits, "adapters": lora(), "device": EmulatedDevice(), "config": CONFIG}
    torch.manual_seed(1)
    with Relay.from_pretrained(folder, trained_adamw, **options) as relay:
        twin = quantised_twin(folder, bits)
        assert relay.stack[0].blocks[0].in_bytes
        check_three_steps(relay, twin)
        assert not differences(relay.model, twin)
    torch.manual_seed(1)
    shelf = FileShelf(folder=tmp_path / "shelf", memory_bytes="8 MB")
    with Relay.from_pretrained(folder, trained_adamw, shelf=shelf, **options) as relay:
        check_three_steps(relay, quantised_twin(folder, bits))


def test_a_shelf_is_filled_from_mapped_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but small tensors are mapped from files until they are in a record, and none of these files is left."""
    monkeypatch.setattr("l2l_core.integrations.pretrained._PAGE", 64)
    mapped: list[bool] = []
    fill = initial_weights.fill_block

    def watched(weights: Any, block: Any, values: Any, given: Any) -> None:
        mapped.extend(value.untyped_storage().filename is not None for value in values if value.nbytes >= 64)
        fill(weights, block, values, given)

    monkeypatch.setattr("l2l_core.shelf.disk_backend.fill_block", watched)
    shelf = FileShelf(folder=tmp_path / "shelf", memory_bytes="8 MB")
    options: dict[str, Any] = {"shelf": shelf, "device": EmulatedDevice(), "config": CONFIG}
    with Relay.from_pretrained(folder, trained_adamw, **options) as relay:
        check_three_steps(relay, KIND.make_model())
    assert len(mapped) > 20 and all(mapped)
    assert not [*(tmp_path / "shelf").glob("tmp*")]


@pytest.mark.parametrize("bits", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_codes_and_scales_are_mapped(bits: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_libraries()
    monkeypatch.setattr("l2l_core.integrations.pretrained._PAGE", 1)
    torch.manual_seed(1)
    model: Any = load_pretrained(folder, bits, lora(), torch.float32, map_in=tmp_path)
    params = [param for param in model.parameters() if not param.requires_grad]
    assert all(param.untyped_storage().filename is not None for param in params)
    twin = quantised_twin(folder, bits)
    parts, theirs = quantised_parts(model.modules()), quantised_parts(twin.modules())
    scales = [part for found in parts.values() for name, part in found.items() if "absmax" in name or name == "CB"]
    assert scales and all(scale.untyped_storage().filename is not None for scale in scales)
    pairs = zip(parts.values(), theirs.values(), strict=True)
    assert all(torch.equal(ours[name], other[name]) for ours, other in pairs for name in other)
    assert not differences(model, twin)


def test_what_cannot_be_loaded_is_refused_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quantize='fp3': give one of 'nf4', 'int8'"):
        Relay.from_pretrained(folder, quantize="fp3")
    config = hf.AutoConfig.from_pretrained(folder)
    config.architectures = ["LlamaOfMine"]
    config.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"names 'LlamaOfMine' .* model_class=transformers.AutoModelForCausalLM"):
        Relay.from_pretrained(folder)
    with Relay.from_pretrained(
        folder, trained_adamw, model_class=hf.AutoModelForCausalLM, device=EmulatedDevice(), config=CONFIG
    ) as relay:
        check_three_steps(relay, KIND.make_model())
    config.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        Relay.from_pretrained(tmp_path / "bare", model_class=hf.AutoModelForCausalLM)


@pytest.mark.slow
def test_the_host_needs_the_memory_of_the_quantised_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading 300 million weights and training a step takes less than the files in bfloat16 do."""
    needs_libraries()
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "benchmarks")
    import pretrained

    params = pretrained.write_model(tmp_path, 3e8)
    args = Namespace(cap="2 GB", dtype="bfloat16", rows=1, length=16, memory="60 MB")
    seen = pretrained.in_process("relay", tmp_path, args)
    assert "error" not in seen, seen
    of_host = seen["stepped"] - seen["before"] - seen["device"]  # the emulated device is in the same memory
    assert 280e6 < params and of_host < 2 * seen["weights"] < 2 * params, seen


@pytest.mark.slow
def test_a_shelf_needs_the_memory_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling it takes less than loading the model does, by most of the quantised model."""
    needs_libraries()
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "benchmarks")
    import pretrained

    pretrained.write_model(tmp_path, 3e8, vocabulary=1000)
    args = Namespace(cap="2 GB", dtype="bfloat16", rows=1, length=16, memory="60 MB")
    seen = {side: pretrained.in_process(side, tmp_path, args) for side in ("relay", "shelf")}
    assert not any("error" in each for each in seen.values()), seen
    loaded = {side: each["loaded"] - each["before"] for side, each in seen.items()}
    assert loaded["shelf"] < loaded["relay"] - 0.7 * seen["relay"]["weights"], seen
