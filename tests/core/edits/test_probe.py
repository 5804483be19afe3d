"""Losses of batches with and without edits, as if nobody had looked: the numbers are right, and training goes on to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from small import assert_same, keys, make_batch, make_gpt, make_relay, new_block, whole
from torch import nn

from l2l_core import (
    DeviceOutOfMemory,
    Drop,
    Duplicate,
    Edit,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Move,
    Relay,
    RelayConfig,
    Replace,
    Swap,
)

BATCHES = [make_batch(seed) for seed in (7, 8, 9)]
EDITS: dict[str, Callable[[Relay], Sequence[Edit]]] = {
    "nothing": lambda _: [],
    "drop": lambda _: [Drop(1)],
    "drop to the disk": lambda _: [Drop(slice(1, 3), park="disk")],
    "drop for good": lambda _: [Drop("L002", park=None)],
    "swap": lambda _: [Swap(0, 3)],
    "move": lambda _: [Move(0, 2)],
    "copy": lambda _: [Insert(2, init="copy", optimizer="copy")],
    "identity": lambda _: [Insert(2)],
    "new values": lambda _: [Insert(1, init="fresh")],
    "double": lambda _: [Duplicate(slice(0, 2))],
    "interpolate": lambda _: [Interpolate(1, 2, 0.25)],
    "replace": lambda relay: [Replace(1, new_block(relay))],
    "freeze": lambda _: [Freeze(0)],
    "a group": lambda _: [Insert(0, init="copy"), Drop(2), Interpolate(0, 1)],
}


def trained(**options: Any) -> Relay:
    """A relay with dropout, with edits behind it and one to do again."""
    relay = make_relay(make_gpt(), **options)
    for seed in range(2):
        relay.step(make_batch(seed))
    relay.apply(Interpolate(0, 1))
    relay.apply(Swap(0, 1))
    relay.undo()
    relay.step(make_batch(2))
    return relay


def everything(relay: Relay) -> dict[str, Any]:
    """All that a probe could disturb beside the tensors."""
    return {
        "journal": relay.journal,
        "turns": (relay.can_undo, relay.can_redo),
        "trace": id(relay.trace),
        "statistics": {unit.key: dict(unit.stats) for unit in relay.stack},
        "modes": [module.training for module in relay.model.modules()],
        "numpy": numpy.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
        "branches": relay.branches,
        "booked": {name: n for name, n in relay.host.by_category().items() if name != "gradients"},
        "groups": [[p.shape for p in group["params"]] for group in relay.optimizer.param_groups],
    }


@pytest.mark.parametrize("name", EDITS)
def test_it_gives_the_losses_after_the_edits_and_leaves_nothing_behind(name: str) -> None:
    with trained() as relay, trained() as applied:
        edits, before, other = EDITS[name](relay), whole(relay), everything(relay)
        losses = relay.probe(BATCHES, *edits)
        assert_same(whole(relay), before)
        assert everything(relay) == other
        if edits:
            applied.apply(*EDITS[name](applied))
        assert losses == [applied.evaluate(batch) for batch in BATCHES]
        assert len({*losses}) == 3


@pytest.mark.parametrize("stash", ["device", "host"])
def test_training_goes_on_as_if_nobody_had_looked(stash: Any) -> None:
    """Dropout, keys of layers and what is drawn for new ones included."""
    config = RelayConfig(micro_batches=2, stash=stash)
    with trained(config=config) as relay, trained(config=config) as alone:
        for name, make in EDITS.items():
            relay.probe(BATCHES, *make(relay))
            assert relay.step(make_batch(3)).loss == alone.step(make_batch(3)).loss, name
        for each in (relay, alone):
            each.redo()
            each.apply(Insert(1, init="fresh"))
            each.step(make_batch(4))
        assert keys(relay) == keys(alone)
        assert_same(whole(relay), whole(alone))


def test_what_cannot_be_done_is_refused_and_leaves_nothing_behind() -> None:
    with trained() as relay:
        before, other = whole(relay), everything(relay)
        for edits in ([Drop(slice(None))], [Insert(0, init="copy"), Drop(9)], ["L001"]):
            with pytest.raises((ValueError, TypeError)):
                relay.probe(BATCHES, *edits)  # type: ignore[arg-type]
            assert_same(whole(relay), before)
            assert everything(relay) == other
        assert keys(relay) == ["L000", "L001", "L002", "L003"]


class Noisy(nn.Module):
    """Counts its calls in a buffer and as an attribute, in evaluation mode too, and draws from every generator."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.calls += 1
            self.seen += 1
            numpy.random.rand()
            torch.rand(1)
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


def make_noisy(memory_bytes: int | None = None) -> Relay:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *(Noisy() for _ in range(3)), nn.Linear(4, 1))
    return Relay(
        model,
        partial(torch.optim.AdamW, lr=1e-2),
        EmulatedDevice(memory_bytes),
        list(model)[1:4],
        lambda y, batch: nn.functional.mse_loss(y, batch[1]),
        config=RelayConfig(micro_batches=2),
    )


def noisy_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)


def test_what_a_model_counts_and_draws_in_evaluation_mode_is_put_back() -> None:
    with make_noisy() as relay, make_noisy() as alone:
        for step in range(3):
            numpy.random.seed(step)
            before, other = whole(relay), everything(relay)
            relay.probe([noisy_batch(9)], Drop(step % 2))
            assert_same(whole(relay), before)
            assert everything(relay) == other
            assert [layer.seen for layer in list(relay.model)[1:4]] == [0, 0, 0]  # type: ignore[arg-type]
            assert relay.step(noisy_batch(step)).loss == alone.step(noisy_batch(step)).loss
        assert_same(whole(relay), whole(alone))


def test_a_device_that_is_too_small_for_it_trains_on() -> None:
    with make_noisy(40_000) as relay, make_noisy(40_000) as alone:
        relay.step(noisy_batch(0)), alone.step(noisy_batch(0))
        large = tuple(torch.cat([each] * 2000) for each in noisy_batch(0))
        with pytest.raises(DeviceOutOfMemory):
            relay.probe([large])
        assert relay.step(noisy_batch(1)).loss == alone.step(noisy_batch(1)).loss
        assert_same(whole(relay), whole(alone))


def test_what_a_loss_is_a_mean_over_is_not_learned_from_it() -> None:
    """A step decides from the batches that it sees, whatever was evaluated before."""
    with make_relay(make_gpt()) as relay:
        uneven = make_batch(0)
        uneven["labels"] = uneven["labels"].clone()
        uneven["labels"][:2, 2:] = -100
        relay.probe([uneven])
        assert not len(relay._runner.normaliser._remaining)
        relay.step(uneven)
        assert len(relay._runner.normaliser._remaining) == 1
