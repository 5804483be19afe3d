"""Blocks whose gradients are kept apart by micro-batch, so that they are added in the order of plain training."""

from __future__ import annotations

from collections import Counter

from l2l_core.eps.blocks import Block, Unit


class PerMicroBatch:
    """Blocks to which several visits or segments contribute; the set grows during a step.

    Args:
        visit_counts: number of visits of each layer so far, by key.
        always: keep the gradients of every block apart.

    Attributes:
        includes_shell: several segments, or micro-batches in different orders, share parameters of the shell.
        revisited: keys of layers that were visited again after a visit that was expected to be the last.
    """

    def __init__(self, shell: Unit, visit_counts: Counter[str], always: bool = False) -> None:
        self._shell, self._visit_counts, self._always = set(shell.blocks), visit_counts, always
        self.includes_shell = False
        self.revisited: set[str] = set()

    def __call__(self, block: Block) -> bool:
        """Whether the gradients of the block are kept apart by micro-batch."""
        if block.shared or self._always:
            return True
        if block in self._shell:
            return self.includes_shell
        return self._visit_counts[block.key] > 1 or block.key in self.revisited
