"""What happens to a gradient before its update where several workers have one, and to weights before they are lent."""

from __future__ import annotations

from typing import Protocol

from l2l_core.eps.blocks import Block, GradientPiece


class Reducer(Protocol):
    """Makes one gradient of those of all workers. Called on the EPS's thread, block by block, in one order everywhere."""

    def reduce(self, block: Block, piece: GradientPiece) -> GradientPiece:
        """Give the gradient to update a block with, in the same buffer as `piece`, which is this worker's own."""

    def gather(self, block: Block) -> None:
        """Make a block's master whole before it is lent, where this worker holds a part of it."""


class Alone:
    """Is the reducer of one worker, whose gradient is the gradient, and whose masters are whole."""

    def reduce(self, block: Block, piece: GradientPiece) -> GradientPiece:
        return piece

    def gather(self, block: Block) -> None:
        pass
