"""What the pieces of a step cost: seconds of compute and of the EPS, bytes of weights, gradients and stash.

Nothing here depends on the link or on how far loads run ahead; `simulate` puts that on top. The words are the loop's: a
layer *stays* on the device, and in a stay every micro-batch takes its *turn*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SHELL = "shell"
COPY_LANES = ("h2d", "d2h")
BEFORE_FIRST_STAY = -1  # in place of a stay's index: what comes before the first layer

MemorySamples = tuple[
    tuple[str, Mapping[str, int]], ...
]  # samples that follow a piece of work: place, bytes by category


class GradientPartCost(NamedTuple):
    """A gradient of one micro-batch that leaves by itself and is reduced by itself."""

    layer: str
    nbytes: int
    block: str  # as the EPS calls it
    block_bytes: int
    reduce_s: float
    visit: int


class ComputeOp(NamedTuple):
    """One compute event."""

    kind: str
    layer: str
    visit: int
    seconds: float
    overhead_s: float = 0.0  # before it: neither work nor waiting, the host's own time
    demand_bytes: int = 0  # stash that is fetched only when the event asks for it
    gradient_parts: tuple[GradientPartCost, ...] = ()
    memory: MemorySamples = ()


class StashMoves(NamedTuple):
    """The storages that move at a turn, each by its number in the image of the micro-batch.

    Attributes:
        fetched: that arrive for the turn while the one before computes.
        demanded: that are fetched when they are asked for: index of the operation that does, and storages.
        left: that leave when it gives way, with their bytes.
        gone: that were parked once, and are no longer there when it gives way.
    """

    fetched: tuple[int, ...] = ()
    demanded: tuple[tuple[int, tuple[int, ...]], ...] = ()
    offloaded: tuple[tuple[int, int], ...] = ()
    freed: tuple[int, ...] = ()


class TurnCost(NamedTuple):
    """One micro-batch's part of a stay: what it does before it gives way."""

    k: int
    ops: tuple[ComputeOp, ...]
    batch_bytes: int = 0  # rows that are copied before it
    fetch_bytes: int = 0  # stash that arrives for it while the turn before computes
    stash_bytes: int = 0  # stash that leaves when it gives way
    moves: StashMoves | None = None  # of both, where the stash is on the disk


class StayCost(NamedTuple):
    """A layer on the device, until another one takes over; at the turn a stay is forward and backward."""

    layer: str
    visit: int
    turns: tuple[TurnCost, ...]

    def has(self, kind: str) -> bool:
        """Whether there are events of a kind in it."""
        return any(op.kind == kind for turn in self.turns for op in turn.ops)

    @property
    def is_backward(self) -> bool:
        """Whether gradients of the layer come out of it."""
        return self.has("backward")


class LayerCost(NamedTuple):
    """What it takes to move and to update a layer, or the shell."""

    load_bytes: int
    push_bytes: int = 0  # of the summed gradient; 0 if there is none or its micro-batches are kept apart
    block_bytes: int = 0  # of the masters that this gradient updates
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
    """What a copy takes when nothing limits it: `fixed_s + nbytes / bytes_per_s`."""

    fixed_s: float = 0.0
    bytes_per_s: float = float("inf")
