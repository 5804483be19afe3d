"""Where blocks with all that the optimizer knows of them are between two steps, and how somebody else gets at them.

Whoever goes through a whole model asks for one block after another, and holds none of them longer than it needs to: so it works
alike where all of them are in memory and where one at a time can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from l2l_core.eps.blocks import Block
from l2l_core.eps.masters import Masters
from l2l_core.eps.optimizers import state_bytes

BlockStates = list[dict[str, Any] | None]  # of each parameter of a block what the optimizer knows, None where nothing


class BlockStorage(Protocol):
    """Has the blocks of an EPS; nobody asks in the middle of a step."""

    def lease(self, block: Block) -> AbstractContextManager[None]:
        """Let `values` of a block and the optimizer's state of it be here in a block of code, to be read."""

    def nbytes(self, block: Block) -> int:
        """Count the bytes of weights and state."""

    def load(
        self, blocks: Iterable[Block], read_state: Callable[[Block], BlockStates], fill: Callable[[Block], None]
    ) -> None:
        """Let blocks have other weights and state; of all others the optimizer's state goes.

        Args:
            blocks: all of them, each once.
            read: gives the state.
            fill: writes the weights into `values`.
        """

    def snapshot(self) -> Callable[[], None]:
        """Keep all weights, versions and all that the optimizer keeps; the result puts them back bit by bit, after any steps."""

    def commit_load(self, steps: int) -> None:
        """Hear that all else is as it was after so many steps: settings, versions, buffers, random generators."""


class MemoryBlockStorage:
    """Has them in memory: blocks change when all that they are to have is read, so that nothing can fail between them.

    Args:
        masters: the optimizer's side of the blocks.
    """

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
        knows = {block: read_state(block) for block in blocks}
        with torch.no_grad():
            for block in knows:
                fill(block)
        state.clear()
        for block, known in knows.items():
            pairs = zip(masters.params_of(block), known, strict=True)
            state.update((param, each) for param, each in pairs if each is not None)
        masters.book_state()

    def snapshot(self) -> Callable[[], None]:
        return self._masters.snapshot()

    def commit_load(self, steps: int) -> None:
        pass

    def _states_of(self, block: Block) -> list[Mapping[str, Any]]:
        state = self._masters.optimizer.state
        return [state[param] for param in self._masters.params_of(block) if param in state]
