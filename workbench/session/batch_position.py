"""Position in a source of batches, from which a new process continues."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy
import torch

from l2l_core.batches import Batch, leaves_in
from workbench.session.random_states import RandomStates

SourceKind = Literal["iterable", "iterator", "function"]
_SAMPLE = 4096  # elements at either end of a tensor that a fingerprint includes


@dataclass
class BatchPosition:
    """Number of batches taken, and the random states with which they are taken again.

    Attributes:
        kind: kind of the source.
        count: batches taken since the source was last iterated; of an iterator or a function, since the beginning.
        begun: random states before the source was last iterated.
        first, last: random states before the first and the last of these batches.
        fingerprint: of the last batch.
        is_pending: True if the last batch was not used yet.
        epoch: number of times that the source was iterated.
        state: `state_dict` of a source that has one; the batches are not counted then.
    """

    kind: SourceKind
    count: int = 0
    begun: RandomStates | None = None
    first: RandomStates | None = None
    last: RandomStates | None = None
    fingerprint: str = ""
    is_pending: bool = False
    epoch: int = 1
    state: Any = None

    def begin(self, states: RandomStates) -> None:
        """Record that the source is iterated from its beginning."""
        self.count, self.begun, self.first, self.last = 0, states, None, None

    def add(self, states: RandomStates, batch: Batch) -> None:
        """Record a batch, and the random states before it was taken."""
        self.count, self.last, self.fingerprint = self.count + 1, states, fingerprint(batch)
        self.first = states if self.count == 1 else self.first

    def to_plain(self) -> dict[str, Any]:
        """Return plain data with tensors and arrays; the inverse of `of_plain`."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: v.to_plain() if isinstance(v, RandomStates) else v for name, v in plain.items()}

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> BatchPosition:
        """Return the position from `to_plain`."""
        states = {name: plain[name] and RandomStates.of_plain(plain[name]) for name in ("begun", "first", "last")}
        return BatchPosition(**{**plain, **states})


def has_state(source: object) -> bool:
    """Return True if a source saves its position itself, as torchdata's StatefulDataLoader."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def fingerprint(batch: Batch) -> str:
    """Return a checksum of the shapes of a batch and of the first and last elements of each tensor."""
    found = hashlib.sha256()
    for leaf in leaves_in(batch):
        if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            found.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            flat = leaf.detach().reshape(-1)
            ends = torch.cat([flat[:_SAMPLE], flat[_SAMPLE:][-_SAMPLE:]]).cpu()
            found.update(ends.view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode() if isinstance(leaf, str | int | float) else type(leaf).__name__.encode())
    return found.hexdigest()
