"""Saved bytes of GPT-2 by rows and length: fake tensors against real ones."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from l2l_core.strategies import activation_bytes, activation_map

ROWS = (1, 2, 3, 4, 6, 8)
LENGTHS = (8, 16, 24, 32, 40, 48, 56, 64)


def eager() -> nn.Module:
    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    config._attn_implementation = "eager"
    return GPT2Model(config).train()


class Fused(nn.Module):
    """A decoder whose attention is one operation; the one of transformers makes other masks on fake tensors."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.mixes = nn.Embedding(64, width), nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.mixes(self.norm(x)).chunk(3, -1))
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.mlp(self.norm(x))
        return x


def forward(model: nn.Module, rows: int, length: int) -> torch.Tensor:
    out = model(torch.zeros(rows, length, dtype=torch.long))
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


def check(make: Callable[[], nn.Module], rows: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    fake = activation_map(make, forward, rows, lengths)
    model = make()
    assert fake == {(n, t): activation_bytes(model, forward, n, t) for n in rows for t in lengths}
    for t in lengths:  # linear in rows from the second on; with one row some copies are views
        each = fake[3, t] - fake[2, t]
        assert all(fake[n, t] == fake[2, t] + (n - 2) * each for n in rows[1:])
    for n in rows:  # quadratic in the length if attention matrices are kept, else linear
        cells = [fake[n, t] for t in lengths]
        steps = [b - a for a, b in pairwise(cells)]
        second = {b - a for a, b in pairwise(steps)}
        assert len(second) == 1 and (second.pop() > 0) == (make is eager)


@pytest.mark.parametrize("make", [eager, Fused])
def test_fake_cells_equal_measured_ones(make: Callable[[], nn.Module]) -> None:
    check(make, (1, 2, 3), LENGTHS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("make", [eager, Fused])
def test_all_48_cells_equal_measured_ones(make: Callable[[], nn.Module]) -> None:
    assert len(ROWS) * len(LENGTHS) == 48
    check(make, ROWS, LENGTHS)
