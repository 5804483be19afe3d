"""Loss, count and outputs of a held-out batch: those of `evaluate` and `forward`, and nothing of them is left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from l2l_core import EmulatedDevice, Relay, RelayConfig

VOCABULARY = 12


class Tokens(nn.Module):
    """Three residual layers over tokens, with batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def mean_over_targets(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def mean_over_rows(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    each = functional.cross_entropy(logits.transpose(1, 2), batch[1], reduction="none")
    return (each.sum(1) / (batch[1] != -100).sum(1)).mean()


def make_relay(loss: Any, micro_batches: int = 2, **options: Any) -> Relay:
    torch.manual_seed(0)
    model = Tokens()
    config = RelayConfig(micro_batches=micro_batches, seed=0)
    return Relay(
        model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), list(model.layers), loss, config=config, **options
    )


def make_batch(rows: int, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose first row has fewer targets."""
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randint(0, VOCABULARY, (rows, 6), generator=generator) for _ in range(2))
    y[0, :ignored] = -100
    return x, y


@pytest.mark.parametrize(
    ("loss", "options", "count"),
    [
        (mean_over_targets, {}, 32),
        (mean_over_targets, {"micro_batches": 1}, 32),
        (mean_over_targets, {"loss_over": "batch"}, 6),
        (mean_over_targets, {"weight": lambda part: 2.0 * len(part[1])}, 12),
        (mean_over_rows, {}, 6),
        (mean_over_rows, {"micro_batches": 1}, 6),
        (lambda logits, batch: 36 * mean_over_rows(logits, batch).sum() / 36, {"loss_over": "sum"}, 1),
    ],
    ids=["targets", "in one part", "whole batch", "weight", "rows", "rows in one part", "sum"],
)
def test_loss_is_that_of_evaluate_and_counts_the_items_of_its_mean(loss: Any, options: Any, count: float) -> None:
    batch = make_batch(6, 4)
    with make_relay(loss, **options) as relay:
        expected, outputs = relay.evaluate(batch), relay.forward(batch)
        alone, found = relay.probe_batch(batch), relay.probe_batch(batch, outputs=True)
    assert alone.loss == found.loss == expected and alone.outputs is None
    assert torch.equal(found.outputs, outputs)
    assert (found.count, found.rows) == (count, 6)


def test_an_objective_has_outputs_too() -> None:
    batch = make_batch(6, 4)
    with make_relay(None, objective=lambda model, part: mean_over_targets(model(part[0]), part)) as relay:
        with pytest.raises(TypeError):
            relay.probe_batch(batch, outputs=True)  # the model takes one argument, and the batch has two
        assert relay.probe_batch(batch).loss == relay.evaluate(batch)
    with make_relay(None, objective=lambda model, part: model(part["x"]).square().mean()) as relay:
        found = relay.probe_batch({"x": batch[0]}, outputs=True)
        assert found.outputs.shape == (6, 6, VOCABULARY)
        assert found.loss == pytest.approx(float(found.outputs.square().mean()))


def test_it_leaves_no_trace() -> None:
    """Counters of hooks and losses, buffers, modes and random streams are as before."""
    counted: list[int] = []
    calls: list[int] = []

    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        counted.append(1)
        return mean_over_targets(logits, batch)

    results = []
    for probes in (0, 3):
        counted.clear()
        with make_relay(loss) as relay:
            calls.clear()
            relay.model.register_forward_hook(lambda *_: calls.append(1))
            losses = []
            for seed in range(3):
                losses.append(relay.step(make_batch(6, seed)).loss)
                for _ in range(probes):
                    relay.probe_batch(make_batch(4, 0), outputs=True)
            state = [tensor.clone() for tensor in relay.model.state_dict().values()]
            results.append((losses, len(counted), len(calls), state, all(m.training for m in relay.model.modules())))
    plain, probed = results
    assert plain[:3] == probed[:3] and plain[4] and probed[4]
    assert all(torch.equal(a, b) for a, b in zip(plain[3], probed[3], strict=True))
