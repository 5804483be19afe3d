"""Random numbers of micro-batches: each draws from streams of its own, as if it ran alone.

To carry a generator's state from turn to turn costs more than most operations of a small layer, Python's most of all, and
hardly any model draws from that. So a metered pass finds out which generators are drawn from, and passes like it carry those
alone; should another one be drawn from then, the pass is made again, metered.
"""

from __future__ import annotations

from l2l_core.model import STREAMS, Ambient, RandomState
from l2l_core.step.traffic import Metered, NewHabit


class Streams:
    """The generators of which every micro-batch has a stream of its own in one pass.

    Args:
        metered: what is known of passes of this kind, or gets to be known.
        learns: whether this is the metered pass.
    """

    def __init__(self, metered: Metered, learns: bool) -> None:
        self._metered, self._learns = metered, learns
        self.carried = frozenset(STREAMS) if learns else frozenset(metered.draws)
        self._left_alone = frozenset(STREAMS) - self.carried
        self._before = RandomState.take()

    def take(self) -> Ambient:
        """Read the thread's state, with the generators that are carried; its stacks are left empty."""
        return Ambient.take(self.carried)

    def seeded(self, seed: int) -> RandomState:
        """Make the state with which the micro-batch of this seed begins."""
        return RandomState.seeded(seed).only(self.carried)

    def forward_ended(self, began: RandomState) -> None:
        """A micro-batch's forward, which began with this state, is over.

        Raises:
            NewHabit: it has drawn from a generator that no earlier one has drawn from.
        """
        if self._learns:
            self._metered.draws |= began.moved(RandomState.take())
        elif self._left_alone and self._before.only(self._left_alone).moved(RandomState.take(self._left_alone)):
            raise NewHabit(
                "the model draws from a random generator that steps of the same shape did not draw from (torch's or Python's)"
            )

    def close(self) -> None:
        """The pass is over, and its forwards' streams are put away: what has moved since was drawn by hooks or optimizers."""
        if self._learns:
            self._metered.draws |= self._before.moved(RandomState.take())
