"""Programs with adapters of peft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import adamw, llama, tokens
from torch import Tensor, nn

STEPS = 3
adapter_case = partial(case, "adapters", "peft")


def attached(kind: str, **settings: Any) -> nn.Module:
    """Return a Llama with adapters."""
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(llama(), getattr(peft, kind)(task_type="CAUSAL_LM", **settings)).train()


def trains(side: Side, make: Callable[[], nn.Module]) -> None:
    model = make()
    with side.training(model, adamw(model)) as step:
        for n in range(STEPS):
            step(tokens(n))


ON_ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
lora = partial(attached, "LoraConfig", r=4, **ON_ATTENTION)
ADAPTERS = {
    "LoRA": lora,
    "LoRA with dropout": partial(lora, lora_dropout=0.2),
    "rsLoRA, and the head in modules_to_save": partial(lora, use_rslora=True, modules_to_save=["lm_head"]),
    "LoRA on all linear layers, PiSSA initialisation": partial(
        attached, "LoraConfig", r=4, target_modules="all-linear", init_lora_weights="pissa"
    ),
    "DoRA": partial(lora, use_dora=True),
    "IA3": partial(attached, "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA, whose projections all layers share": partial(attached, "VeraConfig", r=4, target_modules=["q_proj"]),
    "OFT": partial(attached, "OFTConfig", oft_block_size=4, **ON_ATTENTION),
    "LoHa": partial(attached, "LoHaConfig", r=4, **ON_ATTENTION),
    "prompt tuning": partial(attached, "PromptTuningConfig", num_virtual_tokens=3),
    "p-tuning": partial(attached, "PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=16),
}
for what, make in ADAPTERS.items():
    adapter_case(what)(partial(trains, make=make))


def preference(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """DPO of the first and the second half of a row, beside the model without its adapter."""
    logits = model(batch["input_ids"]).logits
    with torch.no_grad(), model.disable_adapter():
        base = model(batch["input_ids"]).logits
    ratios = (logits.log_softmax(-1) - base.log_softmax(-1))[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return -nn.functional.logsigmoid(ratios[:, :3].sum(1) - ratios[:, 3:].sum(1)).mean()


@adapter_case("disable_adapter() in the objective, as the reference of DPO")
def reference(side: Side) -> None:
    model = lora()
    with side.training(model, adamw(model), objective=preference) as step:
        for n in range(STEPS):
            step(tokens(n))


@adapter_case("disable_adapter() in the objective, one micro-batch")
def reference_of_one(side: Side) -> None:
    side.config = replace(side.config, micro_batches=1)
    reference(side)


@adapter_case("two adapters, set_adapter() between steps")
def two_adapters(side: Side) -> None:
    import peft

    model: Any = lora()
    model.add_adapter("other", peft.LoraConfig(r=2, **ON_ATTENTION, init_lora_weights="gaussian"))
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "lora" in name], lr=0.1)
    with side.training(model, optimizer) as step:
        for n in range(4):
            model.set_adapter("other" if n % 2 else "default")
            step(tokens(n))


@adapter_case("merge_adapter() and unmerge_adapter() around an evaluation between steps")
def merged(side: Side) -> Any:
    model: Any = lora()
    losses = []
    with side.training(model, adamw(model)) as step:
        for n in range(STEPS):
            step(tokens(n))
            model.merge_adapter()
            with torch.no_grad():
                losses.append(model(**tokens(99)).loss.item())
            model.unmerge_adapter()
    return losses


@adapter_case("save_pretrained of the adapter between steps, and from_pretrained")
def saved(side: Side) -> Any:
    import peft

    model: Any = lora()
    with side.training(model, adamw(model)) as step:
        for n in range(STEPS):
            step(tokens(n))
        model.save_pretrained(str(side.folder / "adapter"))
    loaded = peft.PeftModel.from_pretrained(llama(), str(side.folder / "adapter"))
    return {name: value for name, value in loaded.state_dict().items() if "lora" in name}


@adapter_case("prefix tuning", "train a PromptTuningConfig or a LoraConfig instead")
def prefix(side: Side) -> None:
    trains(side, lora if side.is_remedied else partial(attached, "PrefixTuningConfig", num_virtual_tokens=3))


@adapter_case("LoRA on a base of bitsandbytes' Linear4bit")
def on_four_bits(side: Side) -> None:
    import bitsandbytes
    import peft

    base = llama()
    for layer in base.model.layers:
        for name in ("q_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            new = bitsandbytes.nn.Linear4bit(old.in_features, old.out_features, bias=False, quant_type="nf4")
            new.weight = bitsandbytes.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
            setattr(layer.self_attn, name, new.to("cpu"))
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **ON_ATTENTION)).train()
    trains(side, lambda: model)
