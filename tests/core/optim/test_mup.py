"""Rules of muP: activations keep their size in width and depth, groups train as plainly, and refusals lead on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import RECIPES, EmulatedDevice, MupScaling, Relay, RelayConfig, WarmupStableDecay, mup_scaling


class Residual(nn.Module):
    """A residual network whose branches end in the layer "2"."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).tanh()
        for layer in self.layers:
            x = x + layer(x)
        return x, self.head(x)


def make(width: int, layers: int = 2) -> Residual:
    torch.manual_seed(0)
    return Residual(width, layers)


def changes(model: Residual, groups: Any, steps: int = 3) -> Tensor:
    """Sizes of the last activations and of the logits, and of their changes in a few steps of Adam."""
    noise = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 16, generator=noise), torch.randint(8, (32,), generator=noise)
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    with torch.no_grad():
        before = model(x)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x)[1], y).backward()
        optimizer.step()
    with torch.no_grad():
        after = model(x)
    sizes = [before[0], *(b - a for a, b in zip(before, after, strict=True))]
    return torch.stack([each.square().mean().sqrt() for each in sizes])


@pytest.mark.all_cases
@pytest.mark.parametrize(("width", "layers"), [(512, 2), (64, 32), (256, 16)])
def test_activations_keep_their_size_in_width_and_depth(width: int, layers: int) -> None:
    base = changes(*with_parameters(make(64)))
    standard = changes(*with_parameters(make(width, layers)))
    model = make(width, layers)
    scaling = mup_scaling(model, make(64), branch_ends=["2"])
    scaling.rescale_weights()
    by_mup = changes(model, scaling.groups(lr=1e-2))
    assert (standard / base).max() > 3
    assert ((by_mup / base) > 0.8).all() and ((by_mup / base) < 1.25).all()


def with_parameters(model: Residual) -> tuple[Residual, Any]:
    return model, model.parameters()


def make_gpt(width: int, layers: int, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"n_layer": layers, "n_embd": width, "n_head": width // 8, "vocab_size": 32, "n_positions": 8}
    settings |= {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "resid_pdrop": 0.0} | changes
    model = GPT2LMHeadModel(GPT2Config(**settings, embd_pdrop=0.0, attn_pdrop=0.0))
    model.loss_type = "ForCausalLM"
    return model.train()


ENDS = ("attn.c_proj", "mlp.c_proj")


def test_the_table_of_a_gpt2() -> None:
    model = make_gpt(32, 4)
    scaling = mup_scaling(model, make_gpt(16, 1), branch_ends=ENDS)
    factors = {row.name: (row.kind, row.init, row.rate) for row in scaling.rows}
    assert factors["transformer.wte.weight"] == factors["transformer.wpe.weight"] == ("input", 1, 1)
    assert factors["transformer.h.3.ln_1.weight"] == ("vector", 1, 1 / 2)
    assert factors["transformer.h.0.attn.c_attn.weight"] == ("hidden", 2**-0.5, 1 / 4)
    assert factors["transformer.h.2.mlp.c_proj.weight"] == ("hidden", 2**-0.5 / 2, 1 / 8)
    assert factors["transformer.h.2.mlp.c_proj.bias"] == ("vector", 1 / 2, 1 / 4)
    assert factors["lm_head.weight"] == ("output", 1 / 2, 1 / 2)
    line = next(line for line in str(scaling).split("\n") if "attn.c_attn.weight" in line)
    assert line.split()[:6] == ["transformer.h.*.attn.c_attn.weight", "(x", "4)", "hidden", "0.7071", "0.25"]
    scaling.rescale_weights()
    # GPT-2 begins with 0.02 at every width, and 0.02 / sqrt(2 * layers) at the end of a branch.
    assert model.lm_head.weight.std().item() == pytest.approx(0.01, rel=0.15)
    assert model.transformer.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 2**0.5 / 2**0.5 / 2, rel=0.15)


def test_a_model_like_its_base_stays_as_it_is_and_rescaling_twice_is_rescaling_once() -> None:
    model, before = make(64), make(64).state_dict()
    scaling = mup_scaling(model, make(64))
    scaling.rescale_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [(group["lr"], group["weight_decay"]) for group in scaling.groups(0.1, 0.2)] == [(0.1, 0.2), (0.1, 0.0)]
    wide = make(128)
    for _ in range(2):
        mup_scaling(wide, make(64)).rescale_weights()
        assert wide.head.weight.square().mean().sqrt().item() == pytest.approx(
            make(64).head.weight.square().mean().sqrt().item() / 2
        )


def test_weight_decay_times_rate_is_the_same_for_all_matrices() -> None:
    groups = mup_scaling(make(256), make(64)).groups(lr=1e-2, weight_decay=0.1)
    assert {round(group["lr"] * group["weight_decay"], 12) for group in groups} == {1e-3, 0.0}
    assert sum(len(group["params"]) for group in groups) == len([*make(256).parameters()])


def test_a_late_recipe_with_the_groups_equals_plain_training() -> None:
    """To the bit, with the rates of a warm-up, a constant part and a decay, before and after the growth."""

    def optimizer(model: nn.Module) -> tuple[MupScaling, torch.optim.Optimizer]:
        scaling = mup_scaling(model, make_gpt(16, 1), branch_ends=ENDS)
        scaling.rescale_weights()
        return scaling, torch.optim.AdamW(scaling.groups(lr=1e-2, weight_decay=0.1), betas=(0.9, 0.95))

    steps, noise = 5, torch.Generator().manual_seed(1)
    tokens = [torch.randint(32, (4, 8), generator=noise) for _ in range(steps)]
    rate = WarmupStableDecay(steps, warmup=2, decay=1)
    plain, model = make_gpt(32, 3), make_gpt(32, 3)
    layers, (_, adam) = plain.transformer.h, optimizer(plain)
    first = [group["lr"] for group in adam.param_groups]
    with Relay(model, optimizer(model)[1], EmulatedDevice(), config=RelayConfig(micro_batches=1)) as relay:
        schedule = RECIPES["one layer, late"].plan(0, steps, 3) + rate
        for step, ids in enumerate(tokens):
            plain.transformer.h = layers if step >= 4 else layers[:1]
            for group, lr in zip(adam.param_groups, first, strict=True):
                group["lr"] = lr * rate.factor(step)
            adam.zero_grad()
            loss = plain(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            adam.step()
            assert schedule.step(relay, {"input_ids": ids, "labels": ids}).loss == loss.item()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert len({group["lr"] for group in relay.optimizer.param_groups}) > 3


# -- refusals, and their remedies ----------------------------------------------------------------------------------------


def test_tied_weights_are_refused_and_untied_ones_taken() -> None:
    tied = make_gpt(32, 1, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight are one tensor.*tie_word_embeddings=False"):
        mup_scaling(tied, make_gpt(16, 1, tie_word_embeddings=True))
    assert mup_scaling(make_gpt(32, 1, tie_word_embeddings=False), make_gpt(16, 1)).rows


def test_another_depth_needs_the_ends_of_branches() -> None:
    with pytest.raises(ValueError, match=r"a layer has 'ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp"):
        mup_scaling(make_gpt(16, 2), make_gpt(16, 1))
    with pytest.raises(ValueError, match="no layer has 'c_projection'"):
        mup_scaling(make_gpt(16, 2), make_gpt(16, 1), branch_ends=["c_projection"])
    assert mup_scaling(make_gpt(16, 2), make_gpt(16, 1), branch_ends=ENDS).rows


class Learned(nn.Module):
    """A matrix of its own beside a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, width))
        self.head = nn.Linear(width, 2)


def test_a_matrix_of_unknown_use_needs_its_dimension() -> None:
    with pytest.raises(ValueError, match=r"input_dims={'table': 1}"):
        mup_scaling(Learned(8), Learned(4))
    kinds = [mup_scaling(Learned(8), Learned(4), input_dims={"table": dim}).rows[0].kind for dim in (0, 1)]
    assert kinds == ["input", "output"]


def test_models_that_do_not_correspond_are_refused() -> None:
    with pytest.raises(ValueError, match="first.weight has no counterpart"):
        mup_scaling(make(8), Learned(4))
    zero, before = make(8), make(8)
    with torch.no_grad():
        zero.head.weight.zero_()
    scaling = mup_scaling(zero, make(4))
    with pytest.raises(ValueError, match=r"head.weight is zero, but not in the base"):
        scaling.rescale_weights()
    assert torch.equal(zero.first.weight, before.first.weight)
    base = copy.deepcopy(make(4))
    with torch.no_grad():
        base.head.weight.zero_()
    mup_scaling(zero, base).rescale_weights()  # the remedy
    assert not zero.head.weight.any()
