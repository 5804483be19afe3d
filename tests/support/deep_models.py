"""Models of any depth, as small as they can be, and batches for them: what grows with depth or micro-batches is seen on these."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

ROWS, WIDTH = 4, 32


class Block(nn.Module):
    """The inside of a residual block; the shell adds the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """A chain with its residuals in the shell."""

    def __init__(self, depth: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Recurring(Chain):
    """One layer that runs three times: the first step expects it to run once."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = x + self.layers[0](x)
        return self.head(x)


def chain_batch(micro_batches: int, rows: int = ROWS) -> Any:
    return torch.randn(rows * micro_batches, 8), torch.randn(rows * micro_batches, 3)


def squared_error(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[-1])


def gpt2(depth: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, n_embd=32, n_layer=depth, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(GPT2Config(**sizes))


def padded_batch(micro_batches: int) -> Any:
    tokens = torch.randint(2, 64, (ROWS * micro_batches, 24))
    mask = torch.ones_like(tokens)
    mask[::2, 18:] = 0  # the same amount of padding in every micro-batch
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class Normed(nn.Module):
    """A model that does not run with one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def unpadded_batch() -> Any:
    """Rows with and without padding need not take the same memory, and forecasts take those of one shape to be alike."""
    batch = padded_batch(2)
    return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
