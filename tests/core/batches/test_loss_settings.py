"""A verdict on a loss holds for batches of one structure, and for the settings that the loss had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from l2l_core import Relay, RelayConfig


def relay_of(loss: Any) -> Relay:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    return Relay(model, torch.optim.SGD(model.parameters(), 0.1), "cpu", loss=loss, config=RelayConfig(micro_batches=2))


def rows(**more: Any) -> dict[str, Any]:
    return {"input": torch.randn(8, 4)} | more


def contrast(outputs: Tensor, other: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ other.T * 5, torch.arange(len(outputs)))


def by_keys(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
    return contrast(outputs, batch["pos"]) if "pos" in batch else F.mse_loss(outputs, batch["y"])


def by_task(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
    return contrast(outputs, batch["y"]) if batch["task"] == "rank" else F.mse_loss(outputs, batch["y"])


@pytest.mark.parametrize(
    "loss, first, second",
    [
        (by_keys, lambda: rows(y=torch.randn(8, 4)), lambda: rows(pos=torch.randn(8, 4))),
        (by_task, lambda: rows(y=torch.randn(8, 4), task="mean"), lambda: rows(y=torch.randn(8, 4), task="rank")),
    ],
    ids=["keys", "task"],
)
def test_another_structure_of_batches_is_tried_anew(loss: Any, first: Any, second: Any) -> None:
    with relay_of(loss) as relay:
        assert relay.step(first()).objective.startswith("mean over rows")
        before = [param.clone() for param in relay.model.parameters()]
        with pytest.raises(ValueError, match="neither a mean over"):
            relay.step(second())
        assert all(map(torch.equal, before, relay.model.parameters()))
        relay.step(first())


@dataclass
class Switched:
    """A loss whose settings a user changes in training."""

    reduction: str = "mean"
    contrast: float = 0.0

    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss = F.mse_loss(outputs, batch["y"], reduction=self.reduction)
        return loss + self.contrast * contrast(outputs, batch["y"]) if self.contrast else loss


def test_a_mean_that_becomes_a_sum_is_added_up() -> None:
    loss = Switched()
    with relay_of(loss) as relay:
        batch = rows(y=torch.randn(8, 4))
        assert relay.step(batch).objective.startswith("mean over rows")
        loss.reduction = "sum"
        assert relay.step(batch).objective == "sum"
        loss.reduction = "mean"
        assert relay.step(batch).objective.startswith("mean over rows")


def test_a_term_that_is_switched_on_is_refused_if_it_mixes_rows() -> None:
    loss = Switched()
    with relay_of(lambda outputs, batch: loss(outputs, batch)) as relay:
        batch = rows(y=torch.randn(8, 4))
        relay.step(batch)
        loss.contrast = 0.5
        with pytest.raises(ValueError, match="neither a mean over"):
            relay.step(batch)


@pytest.mark.parametrize("labels", [[1, 2, 0, 2, 1, 2, 1, 2], [0, 1, 2, 2, 2, 1, 0, 2]])
def test_a_part_without_targets_contradicts_those_who_count_some(labels: list[int]) -> None:
    """`ignore_index=2`: a part of rows with this label has a loss of NaN."""

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch["y"], ignore_index=2)

    batch = rows(y=torch.tensor(labels))
    with relay_of(loss) as relay, pytest.raises(ValueError, match=r"weight="):
        relay.step(batch)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    with Relay(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        "cpu",
        loss=loss,
        weight=lambda part: float((part["y"] != 2).sum()),
        config=RelayConfig(micro_batches=2),
    ) as relay:
        assert "equal to the step in core" in relay.step(batch).verified


def cut_bags(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Cut tokens and offsets of bags, as equally as possible, the larger parts first."""
    offsets, ids = batch["offsets"], batch["input"]
    ends = [*offsets.tolist()[1:], len(ids)]
    size = -(-len(offsets) // parts)
    bags = [range(len(offsets))[start : start + size] for start in range(0, len(offsets), size)]
    return [
        {
            "input": ids[int(offsets[own[0]]) : ends[own[-1]]],
            "offsets": offsets[own[0] : own[-1] + 1] - offsets[own[0]],
            "y": batch["y"][own[0] : own[-1] + 1],
        }
        for own in bags
    ]


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        hidden = self.embedding(input, offsets)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum(-1)


def test_parts_without_common_rows_are_not_taken_for_equal_ones() -> None:
    """Seven bags in parts of four and three: the mean over bags is not that over parts."""
    torch.manual_seed(0)
    lengths = torch.tensor([1, 4, 2, 3, 5, 1, 2])
    ids = torch.randint(0, 20, (int(lengths.sum()),))
    batch = {"input": ids, "offsets": lengths.cumsum(0) - lengths, "y": torch.randn(7)}

    def relay(**how: Any) -> Relay:
        model = Bags()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        config = RelayConfig(micro_batches=2)
        loss = lambda out, part: F.mse_loss(out, part["y"])  # noqa: E731
        return Relay(model, optimizer, "cpu", split=cut_bags, loss=loss, config=config, **how)

    with relay() as undecided, pytest.raises(ValueError, match="weight="):
        undecided.step(batch)
    with relay(weight=lambda part: len(part["y"])) as weighed:
        assert weighed.step(batch).verified.startswith("equal to the step in core")
