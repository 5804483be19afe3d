"""Adapters of peft on bases of bitsandbytes' 4 and 8 bits train as in core; the extra "quant" installs both libraries."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_equal, assert_state, both, copy_state
from torch import nn
from zoo import BY_NAME, Kind

from l2l_core import Drop, Duplicate, Insert, Relay, RelayConfig, Swap

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra quant is not installed")
peft = pytest.importorskip("peft", reason="the extra quant is not installed")
hf = pytest.importorskip("transformers")

# peft reads it when it attaches adapters
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CONFIG = RelayConfig(micro_batches=3, stash="host")
ON = {"bert": ["query", "value"], "gpt2": ["c_attn"], "t5": ["q", "v"]}  # others: q_proj, v_proj


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """bitsandbytes warns in every forward that 8-bit layers compute in float16."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def quantised(linear: nn.Module, bits: int) -> nn.Module:
    is_transposed = type(linear).__name__ == "Conv1D"  # of GPT-2
    weight = linear.weight.data.t().contiguous() if is_transposed else linear.weight.data
    make: Any = partial(bitsandbytes.nn.Linear4bit, quant_type="nf4")
    if bits == 8:
        make = partial(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False)
    new = make(weight.shape[1], weight.shape[0], bias=linear.bias is not None)
    own = bitsandbytes.nn.Params4bit if bits == 4 else bitsandbytes.nn.Int8Params
    given = {"quant_type": "nf4"} if bits == 4 else {}
    new.weight = own(weight.clone(), requires_grad=False, **given)
    new.bias = linear.bias
    return new.to("cpu")  # there its weight becomes codes


def quantise(model: nn.Module, bits: int) -> nn.Module:
    """Every linear layer but the head and T5's `wo`, as transformers' BitsAndBytesConfig does."""
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, hf.pytorch_utils.Conv1D) and not {"head", "classifier", "wo"}.intersection(
            name.replace("_", ".").split(".")
        ):
            model.set_submodule(name, quantised(module, bits))
    return model.requires_grad_(False)


def mistral() -> Kind:
    def make() -> nn.Module:
        sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
        settings = dict(num_key_value_heads=1, head_dim=16, max_position_embeddings=32, vocab_size=128, pad_token_id=1)
        torch.manual_seed(0)
        return hf.MistralForCausalLM(hf.MistralConfig(**sizes, **settings))

    return replace(BY_NAME["llama"], name="mistral", make_model=make)


FAMILIES = {name: BY_NAME[name] for name in ("llama", "gemma3", "qwen3", "gpt2", "bert", "t5")} | {"mistral": mistral()}


def adapters(kind: str, family: str) -> Any:
    on = ON.get(family, ["q_proj", "v_proj"])
    if kind == "IA3":
        return peft.IA3Config(target_modules=on, feedforward_modules=[])
    if kind == "VeRA":
        return peft.VeraConfig(r=4, target_modules=on[:1])
    return peft.LoraConfig(r=4, target_modules=on, lora_dropout=0.1, use_dora=kind == "DoRA")


def adapted(family: str, kind: str, bits: int) -> Kind:
    def make() -> nn.Module:
        base = quantise(FAMILIES[family].make_model(), bits)
        for part in base.modules():  # T5's decoder has a config of its own
            if hasattr(getattr(part, "config", None), "use_cache"):
                part.config.use_cache = False  # as the relay does: a cache changes strides, and so rounding
        torch.manual_seed(1)
        return peft.get_peft_model(base, adapters(kind, family)).train()

    return replace(FAMILIES[family], name=f"{family} {kind} {bits}", make_model=make)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


KINDS = ("LoRA", "DoRA", "IA3", "VeRA")
# DoRA on 8 bits fails in core: peft's conversion on a CPU loses the scales after the first forward.
CASES = [
    *((family, kind, 4) for kind in KINDS for family in FAMILIES),
    *((family, "LoRA", 8) for family in FAMILIES),
    *(("llama", kind, 8) for kind in ("IA3", "VeRA")),
]


def check_three_steps(family: str, kind: str, bits: int, **settings: Any) -> None:
    made = adapted(family, kind, bits)
    with both(made, replace(CONFIG, **settings), adamw) as pair:
        assert_equal([pair.step(made.make_batch(7, seed)) for seed in range(3)])
        batch = made.make_batch(7, 3)
        assert pair.relay.forecast(batch).peak_device_bytes == pair.relay.step(batch).peak_device_bytes


@pytest.mark.parametrize(("family", "kind", "bits"), CASES)
def test_three_steps_as_in_core(family: str, kind: str, bits: int) -> None:
    check_three_steps(family, kind, bits)


@pytest.mark.parametrize("kind", KINDS)
def test_kept_graphs(kind: str) -> None:
    check_three_steps("llama", kind, 4, stash="device", keep=2)


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_depth_first_and_evaluation(kind: str) -> None:
    made = adapted("llama", kind, 4)
    with both(made, replace(CONFIG, schedule="depth_first", stash="device"), adamw) as pair:
        for seed in range(2):
            pair.relay.evaluate(made.make_batch(7, seed))
            assert_equal([pair.step(made.make_batch(7, seed))])


@pytest.mark.parametrize("bits", [4, 8])
def test_files_of_the_adapter_are_those_without_a_relay(bits: int, tmp_path: Path) -> None:
    made = adapted("llama", "LoRA", bits)
    with both(made, CONFIG, adamw) as pair:
        assert_equal([pair.step(made.make_batch(7, 0))])
        pair.relay.model.save_pretrained(tmp_path / "relay")
        pair.in_core.model.save_pretrained(tmp_path / "core")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "relay" / name).read_bytes() == (tmp_path / "core" / name).read_bytes()


EDITS: dict[str, Callable[[], Any]] = {
    "drop": lambda: Drop(1),
    "copy": lambda: Insert(1, init="copy"),
    "duplicate": lambda: Duplicate(1),
    "swap": lambda: Swap(0, 2),
}


@pytest.mark.parametrize(("edit", "kind"), [*zip(EDITS, KINDS, strict=True)])
def test_edits_undo_branches_and_saves(edit: str, kind: str, tmp_path: Path) -> None:
    made = adapted("llama", kind, 4)
    batch = partial(made.make_batch, 7)
    model = made.make_model()
    with Relay(model, adamw(model), config=CONFIG) as relay:
        relay.step(batch(0))
        before = copy_state(model)
        relay.apply(EDITS[edit]())
        assert relay.verify(batch(1)).equal
        relay.undo()
        assert_state(model, before)
        relay.redo()
        relay.step(batch(1))
        assert relay.forecast(batch(1)).peak_device_bytes == relay.step(batch(1)).peak_device_bytes
        relay.fork("other")
        relay.step(batch(2))
        relay.save(tmp_path / "run")
        with Relay.load(
            tmp_path / "run",
            made.make_model(),
            lambda ps: torch.optim.AdamW([p for p in ps if p.requires_grad], lr=1e-2),
        ) as loaded:
            assert loaded.step(batch(3)).loss == relay.step(batch(3)).loss
            assert_state(loaded.model, copy_state(relay.model))
