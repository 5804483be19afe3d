"""A model of six layers, a batch and a relay, with which the examples of the reference begin."""

import torch
from torch import nn

from l2l_core import Relay, RelayConfig


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Looped(nn.Module):
    """Two layers that the forward runs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.loops = nn.ModuleList([Block(), Block()]), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.loops):
            for layer in self.layers:
                x = layer(x)
        return x


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(6)), nn.Linear(16, 4))  # six layers, and a head as the shell
batch = torch.randn(8, 16), torch.randint(4, (8,))  # rows and their targets
relay = Relay(model, device="cpu", loss=nn.CrossEntropyLoss(), config=RelayConfig(micro_batches=2))
