"""Models of transformers on bitsandbytes' 4 and 8 bits, with adapters of peft; import it where both are installed."""

from dataclasses import replace
from functools import partial
from typing import Any

import bitsandbytes
import peft
import torch
import transformers as hf
from torch import nn
from zoo import BY_NAME, Kind

ON = {"bert": ["query", "value"], "gpt2": ["c_attn"], "t5": ["q", "v"]}  # others: q_proj, v_proj


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
