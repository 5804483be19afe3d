"""Which gradients are kept apart by micro-batch until all have come, so that they are added in the order of plain training."""

from __future__ import annotations

from collections import Counter

from l2l_core.eps.blocks import Block, Unit


class Apart:
    """Blocks to which several visits or segments contribute, as far as a step knows them by now.

    Args:
        shell: what is in no layer.
        visits_of: how often each layer, by key, was visited so far.
        all_are: whether every block's micro-batches are kept apart, whoever contributes.

    Attributes:
        shell_is: whether segments of the shell, or micro-batches that take different ways, share its parameters.
        parted: keys of layers whose first visit was thought to be the last.
    """

    def __init__(self, shell: Unit, visits_of: Counter[str], all_are: bool = False) -> None:
        self._shell, self._visits_of, self._all_are = set(shell.blocks), visits_of, all_are
        self.shell_is = False
        self.parted: set[str] = set()

    def __call__(self, block: Block) -> bool:
        """Whether the block's micro-batches are kept apart."""
        if block.shared or self._all_are:
            return True
        if block in self._shell:
            return self.shell_is
        return self._visits_of[block.key] > 1 or block.key in self.parted
