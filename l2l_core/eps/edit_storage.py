"""Where blocks and the optimizer's state of them are while no step runs, for whoever edits them; and when an edit counts.

In memory all of them are at hand, and an edit counts as soon as it is done. Elsewhere a block is brought for as long as it is
read or changed, and all that an edit has changed counts at once, when it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from l2l_core.eps.blocks import Block, Unit
from l2l_core.eps.masters import Masters, OptimizerEntry

Notes = dict[str, Any]
BlockContents = tuple[
    torch.Tensor, list[dict[str, Any] | None]
]  # weights, and what the optimizer knows of each parameter


class StateView(NamedTuple):
    """Is what the optimizer has of a block: its parameters, and the mapping that holds the state of these, maybe of others."""

    masters: Sequence[nn.Parameter]
    state: MutableMapping[nn.Parameter, dict[str, Any]]


class EditStorage(Protocol):
    """Brings blocks to memory between two steps. From the first change to `commit` or `abandon` is one edit.

    Attributes:
        notes: what the last `commit` was told, also by a process before this one; plain data.
    """

    notes: Notes

    def lease(self, blocks: Mapping[Block, StateView], writable: bool) -> AbstractContextManager[None]:
        """Let weights and state of blocks be in memory in a block of code; what `changes` counts after `commit`."""

    def read(self, block: Block, view: StateView) -> BlockContents:
        """Give weights and state of a block, to be read; what is in a file is mapped from there."""

    def store_unit(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        """Take over a new layer, as which it will stand in the stack; it is in memory until then.

        Raises:
            ValueError, OSError: there is no room for it.
        """

    def commit(self, units: Sequence[Unit], notes: Notes) -> None:
        """Let the edit count: `units` are the shell and the layers now.

        Raises:
            ValueError, OSError: it cannot be done, and what was there before is in force.
        """

    def rollback(self) -> None:
        """Forget what was changed since the last `commit`; memory is as it was by now."""

    def undo_for(self, undo: Callable[[], object]) -> Callable[[], object]:
        """Give what takes changed values back before `commit`: `rewrite`, unless `abandon` does it."""

    def delete(self, blocks: Iterable[Block]) -> None:
        """Give up blocks that nothing can bring back."""

    def nbytes(self, blocks: Iterable[Block]) -> int:
        """Count the bytes of the weights of blocks, and of the optimizer's state."""

    def require_all_in_memory(self, what: str, remedy: str) -> None:
        """Hear that something needs all weights at once.

        Raises:
            ValueError: they cannot be had.
        """


class MemoryEditStorage:
    """Has everything at hand.

    Args:
        masters: the blocks, and the optimizer over them.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters, self.notes = masters, Notes()

    def lease(self, blocks: Mapping[Block, StateView], writable: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, block: Block, view: StateView) -> BlockContents:
        return block.values, [view.state.get(master) for master in view.masters]

    def store_unit(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        pass

    def commit(self, units: Sequence[Unit], notes: Notes) -> None:
        pass

    def rollback(self) -> None:
        pass

    def undo_for(self, undo: Callable[[], object]) -> Callable[[], object]:
        return undo

    def delete(self, blocks: Iterable[Block]) -> None:
        pass

    def nbytes(self, blocks: Iterable[Block]) -> int:
        return sum(block.nbytes for block in blocks) + self._masters.state_bytes

    def require_all_in_memory(self, what: str, remedy: str) -> None:
        pass
