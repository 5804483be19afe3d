"""What ranks that `workbench.launch` starts run in tests: their processes import it."""

import os
import time
from functools import partial

import torch
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig, Workers
from workbench import Recorder, Session

SECONDS = 0.02  # that a layer takes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return x + torch.tanh(self.linear(x))


def loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def relay_of(workers: Workers | None = Workers(timeout_s=60.0)) -> Relay:  # noqa: B008 - a value
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*(Layer() for _ in range(4))), nn.Linear(8, 1))
    config = RelayConfig(seed=0, micro_batches=2)
    return Relay(
        model, partial(torch.optim.SGD, lr=0.01), EmulatedDevice(), model[1], loss, config=config, workers=workers
    )


def batches_of(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)) for _ in range(3)]


def train() -> Session:
    """A folder named in the environment gets a recording of each rank."""
    relay, folder = relay_of(), os.environ.get("RANKS_RECORDED_IN")
    loggers = [Recorder(f"{folder}/rank{relay.rank}.jsonl", title="two ranks")] if folder else []
    return Session(relay, batches_of(relay.rank), probe=False, loggers=loggers)


def train_but_one() -> Session:
    """Rank 1 fails before it has a relay."""
    if os.environ["RANK"] == "1":
        raise FileNotFoundError("no data on this rank")
    return train()


def train_alone() -> Session:
    return Session(relay_of(workers=None), batches_of(0), probe=False)
