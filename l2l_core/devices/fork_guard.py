"""The process that made something with threads, which a fork leaves behind: whoever waits for one in a child waits for ever."""

from __future__ import annotations

import os


class ForkGuard:
    """The one that this object was made in."""

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether we are still there, and not in a child that was forked."""
        return os.getpid() == self._id

    def check(self, what: str) -> None:
        """Refuse work for threads that are not here.

        Raises:
            RuntimeError: this is another process.
        """
        if not self.is_current:
            raise RuntimeError(
                f"{what} was made in process {self._id}, and this is process {os.getpid()}, forked from it: the threads that "
                "copy and update stayed behind. Make the relay in the process that trains: in one started by "
                "multiprocessing.get_context('spawn'), or after the fork"
            )
