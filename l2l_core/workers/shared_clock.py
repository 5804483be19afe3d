"""One clock for all workers: worker 0's, as far as messages let the others know it.

A message is there no earlier than it was sent. So when workers that have just met tell one another what their clocks say,
each learns that another one's clock is ahead by so much at most, and together they know of every difference a least and a
greatest value. An estimate moves only as far as these demand. It begins at no difference, which is right, and so stays right, for
processes of one machine, where all read the same counter; and a step towards a range that holds the truth never leads away
from the truth, so that estimates of clocks of several machines get better, and follow when clocks drift.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_AllGatherFn = Callable[[torch.Tensor], torch.Tensor]  # gives everybody's, a row each


class SharedClock:
    """Tells the time on worker 0's clock.

    Invariant: `offsets_s` are the same on all workers.

    Attributes:
        offsets_s: by worker, what is added to its own clock.
    """

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self.offsets_s = rank, [0.0] * count

    def now(self) -> float:
        """Read the clock, in seconds."""
        return self.from_local(time.perf_counter())

    def from_local(self, own_s: float) -> float:
        """Turn a reading of this process's `time.perf_counter` into one of the clock."""
        return own_s + self.offsets_s[self._rank]

    def synchronize(self, all_gather: _AllGatherFn) -> None:
        """Compare clocks; all workers have just met."""
        told = all_gather(torch.tensor([time.perf_counter()], dtype=torch.float64)).flatten()
        most = all_gather(time.perf_counter() - told)  # [i, j]: i's clock is ahead of j's by so much at most
        for rank in range(1, len(self.offsets_s)):
            least_s, most_s = -float(most[rank, 0]), float(most[0, rank])
            self.offsets_s[rank] = min(max(self.offsets_s[rank], least_s), most_s)
