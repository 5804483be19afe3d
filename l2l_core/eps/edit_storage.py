"""Access to blocks and optimizer state for edits, between steps.

In memory, an edit takes effect at once. With other storage, a block is loaded while it is read or changed, and all changes of an
edit take effect together, at `commit`.
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
BlockContents = tuple[torch.Tensor, list[dict[str, Any] | None]]  # weights, optimizer state of each parameter


class StateView(NamedTuple):
    """The optimizer's parameters of a block, and a mapping with their state (and possibly that of others)."""

    masters: Sequence[nn.Parameter]
    state: MutableMapping[nn.Parameter, dict[str, Any]]


class EditStorage(Protocol):
    """Loads blocks between two steps. One edit lasts from the first change to `commit` or `rollback`.

    Attributes:
        notes: plain data given to the last `commit`, also by an earlier process.
    """

    notes: Notes

    def lease(self, blocks: Mapping[Block, StateView], writable: bool) -> AbstractContextManager[None]:
        """Keep weights and state of blocks in memory inside the context; changes take effect at `commit`."""
        ...

    def read(self, block: Block, view: StateView) -> BlockContents:
        """Return weights and state of a block, read-only; files are memory-mapped."""
        ...

    def store_unit(self, unit: Unit, entries: Mapping[Block, OptimizerEntry]) -> None:
        """Store a new layer, in memory so far, before it joins the stack.

        Raises:
            ValueError, OSError: there is no room for it.
        """
        ...

    def commit(self, units: Sequence[Unit], notes: Notes) -> None:
        """Commit the edit; `units` are the shell and the layers now.

        Raises:
            ValueError, OSError: the commit failed, and the state before the edit is in force.
        """
        ...

    def rollback(self) -> None:
        """Discard changes since the last `commit`; memory has been restored by the caller."""
        ...

    def undo_for(self, undo: Callable[[], object]) -> Callable[[], object]:
        """Return the function that restores changed values before `commit`: `undo`, unless `rollback` does so."""
        ...

    def delete(self, blocks: Iterable[Block]) -> None:
        """Delete blocks that can no longer be restored."""
        ...

    def nbytes(self, blocks: Iterable[Block]) -> int:
        """Return the bytes of weights and optimizer state of blocks."""
        ...

    def require_all_in_memory(self, what: str, remedy: str) -> None:
        """Prepare for an operation that needs all weights at once, or raise ValueError."""
        ...


class MemoryEditStorage:
    """Edit storage for blocks in memory."""

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
