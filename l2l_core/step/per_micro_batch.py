"""Which gradients are kept apart by micro-batch until all have come, so that they are added in the order of plain training."""

from __future__ import annotations

from collections import Counter

from l2l_core.eps.blocks import Block, Unit


class PerMicroBatch:
    """Blocks to which several visits or segments contribute, as far as a step knows them by now.

    Args:
        shell: what is in no layer.
        visits_of: how often each layer, by key, was visited so far.
        all_are: whether every block's micro-batches are kept apart, whoever contributes.

    Attributes:
        shell_is: whether segments of the shell, or micro-batches that take different ways, share its parameters.
        parted: keys of layers whose first visit was thought to be the last.
    """

    def __init__(self, shell: Unit, visit_counts: Counter[str], always: bool = False) -> None:
        self._shell, self._visit_counts, self._always = set(shell.blocks), visit_counts, always
        self.includes_shell = False
        self.revisited: set[str] = set()

    def __call__(self, block: Block) -> bool:
        """Whether the block's micro-batches are kept apart."""
        if block.shared or self._always:
            return True
        if block in self._shell:
            return self.includes_shell
        return self._visit_counts[block.key] > 1 or block.key in self.revisited
