"""What can go wrong between workers."""

from __future__ import annotations

from collections.abc import Sequence


class WorkerError(RuntimeError):
    """Says that workers could not go on together: one has failed, or they were about to do different things.

    Attributes:
        ranks: of the workers that failed, or that differ from the first one.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorkerLostError(WorkerError):
    """Says that a worker is gone, or did not come in time. These workers cannot go on: start again from a save."""


def cause_of(error: BaseException) -> str | None:
    """Say why a worker has failed; None if it did because another one had."""
    return None if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
