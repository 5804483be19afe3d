"""Costs of the parts of a step: seconds of compute and of the EPS, bytes of weights, gradients and stash.

They do not depend on the link or on how far loads run ahead; `simulate` adds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SHELL = "shell"
COPY_LANES = ("h2d", "d2h")
BEFORE_FIRST_STAY = -1  # index of the turns before the first layer

MemorySamples = tuple[tuple[str, Mapping[str, int]], ...]  # after an operation: place, bytes by category


class GradientPartCost(NamedTuple):
    """A gradient of one micro-batch that is pushed and reduced by itself."""

    layer: str
    nbytes: int
    block: str  # key of the block
    block_bytes: int
    reduce_s: float
    visit: int


class ComputeOp(NamedTuple):
    """One compute event."""

    kind: str
    layer: str
    visit: int
    seconds: float
    overhead_s: float = 0.0  # of the host before it, neither work nor waiting
    demand_bytes: int = 0  # stash fetched on demand
    gradient_parts: tuple[GradientPartCost, ...] = ()
    memory: MemorySamples = ()


class StashMoves(NamedTuple):
    """The storages that a turn moves, each by its number in the image of the micro-batch."""

    fetched: tuple[int, ...] = ()  # for the turn while the one before computes
    demanded: tuple[tuple[int, tuple[int, ...]], ...] = ()  # index of the operation, and its storages
    offloaded: tuple[tuple[int, int], ...] = ()  # when the turn ends, with their bytes
    freed: tuple[int, ...] = ()  # offloaded earlier and freed by the end of the turn


class TurnCost(NamedTuple):
    """One micro-batch's part of a stay, until its suspension."""

    k: int
    ops: tuple[ComputeOp, ...]
    batch_bytes: int = 0  # rows copied before it
    fetch_bytes: int = 0  # stash fetched for it while the turn before computes
    stash_bytes: int = 0  # stash offloaded when it ends
    moves: StashMoves | None = None  # the storages of both, if the stash is on disk
    fetch_parts: tuple[
        int, ...
    ] = ()  # `fetch_bytes` by event, if several: fetched ahead, anew after a wrong guess, and late


class StayCost(NamedTuple):
    """The turns of a layer on the device; the last layer's stay is both forward and backward."""

    layer: str
    visit: int
    turns: tuple[TurnCost, ...]

    def has(self, kind: str) -> bool:
        """Return True if the stay has operations of this kind."""
        return any(op.kind == kind for turn in self.turns for op in turn.ops)

    @property
    def is_backward(self) -> bool:
        """True if the stay computes gradients of the layer."""
        return self.has("backward")


class LayerCost(NamedTuple):
    """Bytes and seconds to move and update a layer, or the shell."""

    load_bytes: int
    push_bytes: int = 0  # of the summed gradient; 0 without one, or if it is pushed by micro-batch
    block_bytes: int = 0  # of the masters that it updates
    reduce_s: float = 0.0
    update_s: float = 0.0


class EPSJob(NamedTuple):
    """Work of the EPS that waits for all gradients."""

    kind: str
    layer: str
    k: int
    seconds: float
    nbytes: int


class CopySpeed(NamedTuple):
    """Time of a copy without a limited link: `fixed_s + nbytes / bytes_per_s`."""

    fixed_s: float = 0.0
    bytes_per_s: float = float("inf")
