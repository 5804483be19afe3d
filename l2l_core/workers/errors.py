"""Errors of a relay with several workers."""

from __future__ import annotations

from collections.abc import Sequence


class WorkerError(RuntimeError):
    """Raised on every worker when one has failed, or when workers are about to run different operations.

    Attributes:
        ranks: ranks of the workers that failed, or that differ from the first one.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorkerLostError(WorkerError):
    """Raised when a worker has died or exceeded the time limit. Start all workers again from a save."""


def cause_of(error: BaseException) -> str | None:
    """Return the cause of a worker's failure, or None if it follows from the failure of another worker."""
    return None if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
