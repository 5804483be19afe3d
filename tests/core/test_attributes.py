"""What the model notes on itself in its forward is still there when its own micro-batch goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_equal, run_both
from torch import Tensor
from zoo import BY_NAME, Chain, Kind, ResidualMlp

from l2l_core import RelayConfig


class NotesNumber(Chain):
    """A number, a list and a tensor that the shell sets before the layers and reads after each."""

    def walk(self, h: Tensor) -> Tensor:
        self.rows, self.seen, self.scale = len(h), [], h.detach().mean()
        for layer in self.layers:
            h = layer(h) * (1 + 0.1 * self.rows) + self.scale
            self.seen.append(h.shape)
        assert len(self.seen) == len(self.layers), "another micro-batch's list"
        return h


class Counts(Chain):
    """A counter on the model that every forward advances."""

    count = 0

    def walk(self, h: Tensor) -> Tensor:
        self.count += 1
        mine = self.count
        h = super().walk(h)
        assert self.count == mine
        return h * (1 + 0.01 * self.count)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("model", [NotesNumber, Counts])
def test_notes_of_the_shell_are_its_own(model: Any, stash: str) -> None:
    chain = BY_NAME["chain"]

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return model([ResidualMlp() for _ in range(3)])

    kind = Kind("notes", make_model, chain.make_batch, chain.loss)
    assert_equal(run_both(kind, 3, RelayConfig(micro_batches=3, stash=stash), rows=7))
