"""A gradient on one worker alone is announced to all, though handshakes carry no more than a digest of the masks."""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from l2l_core.workers.channel import Handshake
from l2l_core.workers.distributed_reducer import DistributedReducer


class Other:
    """A channel to one other worker, which has gradients of these parameters."""

    def __init__(self, covers: list[int]) -> None:
        self.covers, self.sent = torch.tensor(covers, dtype=torch.uint8), 0

    def handshake(self, what: str, note: bytes) -> Handshake:
        return Handshake(0, (0.0, 0.0), (note, hashlib.sha256(self.covers.numpy().tobytes()).digest()[:8]))

    def all_gather_small(self, row: torch.Tensor, what: str) -> torch.Tensor:
        self.sent += 1
        return torch.stack([row, self.covers])


@pytest.mark.parametrize("covers", [[0, 0], [0, 1]])
def test_covers_are_sent_where_they_differ(covers: list[int]) -> None:
    other = Other(covers)
    crew: Any = SimpleNamespace(reduces=other, count=2)
    _, every = DistributedReducer(crew, per_micro_batch=False)._handshake({}, 2, "reduce")
    assert every.tolist() == [[[0, 0]], [covers]] and other.sent == any(covers)
