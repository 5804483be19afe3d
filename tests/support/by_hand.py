"""Kinds of models made by hand, of a layer and a shell for one test, and what such a test says of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_equal, assert_state, copy_state, run_both
from torch import Tensor, nn
from zoo import Chain, Kind, cross_entropy, sequences

from l2l_core import Relay, RelayConfig, TornStep

stashes = pytest.mark.parametrize("stash", ["device", "host"])


def kind_of(
    build: Callable[[], nn.Module],
    make_batch: Callable[..., Any] = sequences,
    loss: Callable[[Any, Any], Tensor] = cross_entropy,
) -> Kind:
    """A kind from a function that builds its model; weights are the same every time.

    Such tests are about the passes of a step, so there are no others, and their losses may mix rows.
    """

    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return Kind("by hand", make_model, make_batch, loss, loss_over="micro-batch")


def chain_of(layer: Callable[[], nn.Module], shell: type[Chain] = Chain, count: int = 3) -> Kind:
    return kind_of(lambda: shell([layer() for _ in range(count)]))


def assert_trains(kind: Kind, stash: str = "host", micro_batches: int = 3, steps: int = 3) -> None:
    """Equal bits in the metered first step, and in those after it."""
    assert_equal(run_both(kind, steps, RelayConfig(micro_batches=micro_batches, stash=stash)))


def assert_refused_or_trains(kind: Kind, message: str, stash: str, micro_batches: int) -> None:
    """Never a silent difference: the same bits, or an error that says what is meant."""
    try:
        assert_trains(kind, stash, micro_batches)
    except RuntimeError as error:
        assert re.search(message, str(error)), str(error)


def with_charge(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """Cross entropy plus what the layers charge."""
    return F.cross_entropy(outputs[0], batch[-1]) + 0.1 * outputs[1]


def assert_unshadowed(model: nn.Module) -> None:
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def assert_refused(kind: Kind, message: str, config: RelayConfig, steps: int = 2) -> None:
    """A step raises an error that says what is meant, and the model is as before."""
    model = kind.make_model()
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
        before = copy_state(model)
        with pytest.raises((TypeError, RuntimeError, ValueError), match=message) as caught:
            for seed in range(steps):
                relay.step(kind.make_batch(4, seed))
        assert not isinstance(caught.value, TornStep), caught.value
        assert_state(model, before)
        assert_unshadowed(model)
