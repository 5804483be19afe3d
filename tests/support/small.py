"""Small relays to edit, and everything that can be compared of them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import EmulatedDevice, Relay, RelayConfig

Batch = dict[str, torch.Tensor]


def make_gpt(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train()


def make_batch(seed: int = 0) -> Batch:
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def make_relay(model: nn.Module, **options: Any) -> Relay:
    options.setdefault("config", RelayConfig(micro_batches=2))
    return Relay(model, partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), **options)


def keys(relay: Relay) -> list[str]:
    return [unit.key for unit in relay.stack]


def state_of(relay: Relay) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name, in copies."""
    held = {name: param.detach().clone() for name, param in relay.model.named_parameters()}
    names = {id(p): n for n, p in relay.model.named_parameters()}
    for master, param in relay.store.masters.model_params.items():
        for name, value in relay.optimizer.state.get(master, {}).items():
            held[f"{names[id(param)]}/{name}"] = torch.as_tensor(value).clone()
    return held


def whole(relay: Relay) -> dict[str, torch.Tensor]:
    """Everything of a state that can be compared: weights, optimizer, versions, flags, order, buffers, settings."""
    held = state_of(relay)
    held |= {f"buffer {name}": buffer.clone() for name, buffer in relay.model.named_buffers()}
    held |= {f"version {unit.key}": torch.tensor([unit.version, unit.frozen]) for unit in relay.stack}
    held["order"] = torch.tensor([int(key[1:]) for key in keys(relay)])
    held["steps"] = torch.tensor(relay.steps)
    held["rates"] = torch.tensor([group["lr"] for group in relay.optimizer.param_groups])
    held["random"] = torch.get_rng_state()
    return held


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:8]
    unequal = [name for name in a if not torch.equal(a[name], b[name])]
    assert not unequal, unequal[:8]


def new_block(relay: Relay) -> nn.Module:
    module = copy.deepcopy(relay.stack[0].module)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)
    return module
