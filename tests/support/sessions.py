"""A relay small enough for tests of what looks at it, layers that wait or fail when told to, and a few ways to wait."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from patience import HANG_S
from patience import wait_until as wait_until
from torch import nn

from l2l_core import Device, EmulatedDevice, Relay, RelayConfig
from workbench.session.session import Session
from workbench.session.snapshot import Snapshot

WIDTH = 8
Batch = tuple[torch.Tensor, torch.Tensor]
SESSION_THREADS = "session", "refresh loop"


class Layer(nn.Module):
    """A residual block that can be told to wait for a signal, or to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.error: Exception | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """A twin that waits for nothing: signals cannot be copied."""
        twin = Layer()
        twin.linear = copy.deepcopy(self.linear, memo)
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(HANG_S)
        if self.error is not None:
            raise self.error
        return x + torch.tanh(self.linear(x))


class Noisy(nn.Module):
    """A residual block with dropout, that has a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += float(self.training)
        return x + torch.tanh(self.dropout(self.linear(x)))


def noisy_relay(config: Any = RelayConfig(micro_batches=3, seed=5)) -> Relay:  # noqa: B008 - frozen
    """Four layers that draw random numbers and count their steps, in three micro-batches."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, WIDTH), *(Noisy() for _ in range(4)), nn.Dropout(0.2), nn.Linear(WIDTH, 1))
    return Relay(model, partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), list(model)[1:5], mse, config=config)


def make_relay(config: RelayConfig | None = None, device: Device | None = None) -> Relay:
    """Four layers between two of the shell."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), *(Layer() for _ in range(4)), nn.Linear(WIDTH, 1))
    return Relay(
        model,
        partial(torch.optim.AdamW, lr=1e-2),
        device or EmulatedDevice(),
        list(model)[1:5],
        mse,
        loss_over="micro-batch",  # layers wait and fail in steps alone, not in an evaluation of a few rows before the first
        config=config or RelayConfig(seed=0, micro_batches=2, verify="never"),  # for the same reason
    )


def mse(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def make_batches(count: int = 5) -> list[Batch]:
    """Batches of six rows."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)) for _ in range(count)]


@contextmanager
def held(relay: Relay) -> Iterator[None]:
    """Steps stay in the first layer as long as this is entered; a step must be begun inside."""
    first: Any = relay.model[1]
    first.entered.clear()
    first.gate = gate = threading.Event()
    try:
        yield
    finally:
        first.gate = None
        gate.set()


def enter(relay: Relay) -> None:
    """Wait until a step under way has come to the first layer."""
    first: Any = relay.model[1]
    assert first.entered.wait(HANG_S)


def train(session: Session, steps: int) -> None:
    """Train so many steps and wait for them."""
    session.run(steps)
    session.wait(HANG_S)


def threads_named(*names: str) -> list[str]:
    """Threads of these names that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name in names]


@contextmanager
def sessions_end() -> Iterator[None]:
    """Wait in the end for the threads of the sessions that begin inside: one that stays fails its own test alone."""
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not [thread for thread in set(threading.enumerate()) - before if thread.name in SESSION_THREADS])


def changes_of(now: Snapshot) -> list[tuple[int, str]]:
    """Steps and words of what has changed."""
    return [(change.step, change.what) for change in now.changes]


def weights_of(relay: Relay) -> list[torch.Tensor]:
    return [param.detach().clone() for param in relay.model.parameters()]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
