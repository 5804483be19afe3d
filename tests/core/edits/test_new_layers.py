"""Layers that an edit makes: the identity, inherited, warmed up, drawn without random numbers, of other kinds."""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
from small import keys, make_batch, make_gpt, make_relay, state_of
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from l2l_core import Drop, EmulatedDevice, Insert, Relay, Replace, Swap


def test_post_norm_layers_are_inserted_with_the_norm_before_them() -> None:
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=3, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=32)
    model = BertForMaskedLM(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "LayerNorm" in name or name.endswith("bias"):
                param.add_(0.3 * torch.randn_like(param))
    batch = {"input_ids": torch.randint(32, (4, 8)), "labels": torch.randint(32, (4, 8))}
    with make_relay(model) as relay:
        relay.step(batch)
        before, loss = state_of(relay), relay.evaluate(batch)
        relay.apply(Insert(at=2))
        assert relay.evaluate(batch) == pytest.approx(loss, abs=1e-6)
        norm = relay.stack[1].module.output.LayerNorm
        assert torch.equal(norm.weight, torch.ones(16)) and torch.equal(norm.bias, torch.zeros(16))
        moved = relay.stack[2].module.output.LayerNorm.weight
        assert torch.equal(moved, before["bert.encoder.layer.1.output.LayerNorm.weight"])
        state = state_of(relay)
        name = "output.LayerNorm.weight/exp_avg"
        assert torch.equal(state[f"bert.encoder.layer.2.{name}"], before[f"bert.encoder.layer.1.{name}"])
        relay.step(batch)
        relay.undo()
        relay.step(batch)
        assert relay.verify(batch).equal


def test_a_new_layer_warms_up_and_in_core_training_agrees(relay: Relay) -> None:
    relay.apply(Insert(at=2, init="copy", warmup=4))
    sizes = []
    for seed in range(5):
        assert relay.verify(make_batch(seed)).equal
        relay.step(make_batch(seed))
        sizes.append([unit.stats["update_ratio"] for unit in relay.stack])
    first, last = (row[2] / row[1] for row in (sizes[0], sizes[4]))  # against the layer it was copied from
    assert first < 0.5 * last


def mlp(inner: int | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4)) if inner is None else nn.Sequential(nn.Linear(4, inner), nn.Linear(inner, 4))


def test_a_layer_of_another_kind_joins_the_groups_of_its_like() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(mlp() for _ in range(3)))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
    with Relay(model, optimizer, EmulatedDevice(), loss=lambda out, batch: (out**2).mean()) as relay:
        batch = (torch.ones(2, 4),)
        relay.step(batch)
        relay.apply(Replace(1, mlp(6)))
        for group, is_matrix in zip(relay.optimizer.param_groups, (True, False), strict=True):
            assert len(group["params"]) == 4 and all((param.dim() > 1) == is_matrix for param in group["params"])
        assert relay.verify(batch).equal
        relay.step(batch)
        relay.apply(Drop(1))  # no other layer relies on what an edit brought in
        relay.undo()
        assert len(relay.stack) == 3 and relay.verify(batch).equal


def test_evidence_may_be_overruled() -> None:
    torch.manual_seed(0)
    with Relay(nn.Sequential(mlp(6), mlp(), mlp()), device=EmulatedDevice(), loss=lambda out, _: out.mean()) as relay:
        with pytest.raises(ValueError, match="not interchangeable.*force=True"):
            relay.apply(Swap(0, 1))
        assert keys(relay) == ["L000", "L001", "L002"]
        relay.apply(Swap(0, 1), force=True)
        assert keys(relay) == ["L001", "L000", "L002"]
        with pytest.raises(ValueError, match="not interchangeable"):
            relay.apply(Swap(1, 2))
        relay.undo()
        relay.redo()
        assert keys(relay) == ["L001", "L000", "L002"] and relay.verify((torch.ones(2, 4),)).equal


class Drawn(nn.Linear):
    """Initialised with Python's random numbers."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, random.random())
        nn.init.zeros_(self.bias)


def test_initialising_a_layer_takes_no_random_numbers_and_gives_the_same_each_time() -> None:
    made = []
    for seed in (1, 2):
        model = nn.Sequential(*(nn.Sequential(Drawn(4, 4)) for _ in range(2)))
        with make_relay(model, loss=lambda y, b: y.square().mean()) as relay:
            random.seed(seed)
            before = random.getstate(), torch.get_rng_state()
            relay.apply(Insert(at=1, init="fresh"))
            assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
            made.append(relay.stack[1].params[0].detach().clone())
    assert torch.equal(*made)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "vit"])
def test_an_identity_layer_does_not_move_the_loss(family: str) -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = torch.randint(64, (4, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    if family == "gpt2":
        model = make_gpt(3)
        batch = make_batch(1)
    elif family == "bert":
        model = BertForMaskedLM(BertConfig(vocab_size=64, **small))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **small))
        model.loss_type = "ForCausalLM"
    else:
        model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **small))
        batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(5, (4,))}
    with make_relay(model.train()) as relay:
        for _ in range(3):
            relay.step(batch)
        for at in (3, 1, 2):
            loss = relay.evaluate(batch)
            relay.apply(Insert(at=at))
            assert relay.evaluate(batch) == pytest.approx(loss, abs=1e-6)
            assert relay.verify(batch).equal
        relay.step(batch)
        relay.step(batch)
        assert all(unit.stats["update_ratio"] > 0 for unit in relay.stack), "the new layers learn"


def test_what_an_identity_layer_is_called_with_is_found_without_running_the_whole_stack() -> None:
    with make_relay(make_gpt(8)) as relay:
        relay.step(make_batch())
        config, ran = relay.model.config, []
        hooks = [unit.module.register_forward_hook(lambda m, *_: ran.append(m)) for unit in relay.stack]
        stack = relay._editor.registry.stacks[0]
        relay._editor.layer_factory.plan_identity(copy.deepcopy(relay.stack[5].module), stack, 6)
        assert len(ran) <= 3 and relay.model.config is config and len(relay.model.transformer.h) == 8
        for hook in hooks:
            hook.remove()
        loss = relay.evaluate(make_batch(1))
        for at in (6, 0, 10, 3):
            relay.apply(Insert(at=at))
            assert relay.evaluate(make_batch(1)) == pytest.approx(loss, abs=1e-6)
        assert relay.verify(make_batch()).equal


def test_a_layer_that_cannot_be_the_identity_is_refused_whatever_is_known_of_others_built_alike() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(8, 8), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x) + self.shift

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), list(model), lambda y, b: y.mean()) as relay:
        relay.step((torch.randn(4, 8),))
        relay.apply(Insert(at=3))
        model[4].shift = 0.5  # looked at before, so nothing but running it shows the difference
        with pytest.raises(ValueError, match="cannot make a Block the identity"):
            relay.apply(Insert(at=5))
        assert len(relay.stack) == 6
