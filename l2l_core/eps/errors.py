"""What can go wrong between a gradient and the weights that it updates."""

from __future__ import annotations

from collections.abc import Sequence


class TornStep(RuntimeError):
    """Says that an error came after some layers had been updated and others not.

    Attributes:
        updated: keys of the layers that hold the new weights.
    """

    def __init__(self, message: str, updated: Sequence[str]) -> None:
        super().__init__(message)
        self.updated = tuple(updated)


class NonFiniteError(FloatingPointError):
    """Says that a loss or gradient is infinite or not a number; names the layer that produced it first."""
