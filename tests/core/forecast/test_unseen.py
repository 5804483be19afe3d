"""Forecasts, searches and checks restore a model's counters, containers and generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from oracle import adamw
from torch import Tensor
from zoo import BY_NAME, Chain, ResidualMlp

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig

CHAIN = BY_NAME["chain"]


def make_relay() -> Relay:
    model = StatefulChain()
    return Relay(model, adamw(model), EmulatedDevice(), model.layers, CHAIN.loss, config=RelayConfig(micro_batches=2))


class StatefulChain(Chain):
    """Counts, logs and draws in its forward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__([ResidualMlp() for _ in range(3)])
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.log, self.sizes, self.drawn = 0, [], {}, torch.Generator().manual_seed(0)

    def walk(self, h: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        self.log.append(len(h))
        self.sizes[len(h)] = self.count
        self.last = torch.rand((), generator=self.drawn).item() + numpy.random.rand()
        return super().walk(h) * min(1.0, self.count / 100)

    def state(self) -> list[Any]:
        """Return all its state."""
        generators = self.drawn.get_state().tolist(), numpy.random.get_state()[1].tolist()
        return [self.calls.item(), *generators, *([self.count, [*self.log], {**self.sizes}, vars(self).get("last")])]


def advice_on_a_step(relay: Relay, batch: Any) -> None:
    """Make a step run out of memory, whose advice is found by rehearsals."""
    numpy_before = numpy.random.get_state()
    limit, relay.device.ledger.limit_bytes = relay.device.ledger.limit_bytes, 10
    try:
        with pytest.raises(DeviceOutOfMemory):
            relay.step(batch)
    finally:
        relay.device.ledger.limit_bytes = limit
        numpy.random.set_state(numpy_before)


@pytest.mark.all_cases
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "look",
    [
        Relay.forecast,
        partial(Relay.fit, fixed=["micro_batches"]),
        Relay.verify,
        advice_on_a_step,
        lambda relay, batch: relay.forecast(batch, RelayConfig(micro_batches=2, keep="9 kB")),
    ],
)
def test_a_models_own_counters_stay_as_they_are(look: Callable[[Relay, Any], Any], steps: int) -> None:
    with make_relay() as relay:
        for seed in range(steps):
            relay.step(CHAIN.make_batch(4, seed))
        before = relay.model.state()
        look(relay, CHAIN.make_batch(4, 9))
        assert relay.model.state() == before


def test_an_evaluation_leaves_buffers_of_the_shell_and_random_numbers() -> None:
    with make_relay() as relay:
        before = numpy.random.get_state()[1].tolist()
        relay.evaluate(CHAIN.make_batch(4, 0))
        assert relay.model.calls == 0 and numpy.random.get_state()[1].tolist() == before
