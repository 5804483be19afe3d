"""Storage of blocks and their optimizer state between steps.

A pass over a whole model leases one block after another, each as briefly as possible, so that it also works if only one block at
a time fits into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from l2l_core.eps.blocks import Block
from l2l_core.eps.masters import Masters
from l2l_core.eps.optimizers import state_bytes

BlockStates = list[dict[str, Any] | None]  # optimizer state of each parameter of a block, or None


class BlockStorage(Protocol):
    """Holds the blocks of an EPS; not used in the middle of a step."""

    def lease(self, block: Block) -> AbstractContextManager[None]:
        """Make `values` of a block and its optimizer state available inside the context, read-only."""
        ...

    def nbytes(self, block: Block) -> int:
        """Return the bytes of weights and state."""
        ...

    def load(
        self, blocks: Iterable[Block], read_state: Callable[[Block], BlockStates], fill: Callable[[Block], None]
    ) -> None:
        """Replace weights and state of blocks; the optimizer state of all others is dropped.

        Args:
            blocks: all of them, each once.
            read_state: returns the state of a block.
            fill: writes the weights of a block into `values`.
        """
        ...

    def snapshot(self) -> Callable[[], None]:
        """Copy all weights, versions and optimizer state; call the result to restore them exactly."""
        ...

    def commit_load(self, steps: int) -> None:
        """Commit a load after everything else (settings, versions, buffers, random states) is that of step `steps`."""
        ...


class MemoryBlockStorage:
    """Blocks in memory. `load` reads everything before it changes any block, so that it cannot fail half-way."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters

    def lease(self, block: Block) -> AbstractContextManager[None]:
        return nullcontext()

    def nbytes(self, block: Block) -> int:
        return block.nbytes + state_bytes(*self._states_of(block))

    def load(
        self, blocks: Iterable[Block], read_state: Callable[[Block], BlockStates], fill: Callable[[Block], None]
    ) -> None:
        masters, state = self._masters, self._masters.optimizer.state
        states = {block: read_state(block) for block in blocks}
        with torch.no_grad():
            for block in states:
                fill(block)
        state.clear()
        for block, of_params in states.items():
            pairs = zip(masters.params_of(block), of_params, strict=True)
            state.update((param, each) for param, each in pairs if each is not None)
        masters.book_state()

    def snapshot(self) -> Callable[[], None]:
        return self._masters.snapshot()

    def commit_load(self, steps: int) -> None:
        pass

    def _states_of(self, block: Block) -> list[Mapping[str, Any]]:
        state = self._masters.optimizer.state
        return [state[param] for param in self._masters.params_of(block) if param in state]
