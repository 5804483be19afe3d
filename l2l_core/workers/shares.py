"""Blocks and optimizer state in parts, one on each worker, and whole again.

State follows weights: a tensor of a parameter's shape is cut where the parameter is, and everything else (a count of steps)
is kept by whoever holds a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.devices import Ledger
from l2l_core.eps import Masters, Side
from l2l_core.eps.blocks import Block, Layout, Piece, Unit, is_absent, new_piece
from l2l_core.workers.crew import Crew

Known = Mapping[str, Any] | None  # what an optimizer knows of a parameter
_State = MutableMapping[nn.Parameter, dict[str, Any]]


class Shares:
    """Cuts what the EPS holds, and puts it together.

    Args:
        crew: the workers.
        masters: blocks and optimizer.
        host: gets the bytes of masters booked.
        empty: makes a float32 host buffer of so many elements.
    """

    def __init__(self, crew: Crew, masters: Masters, host: Ledger, empty: Callable[[int], torch.Tensor]) -> None:
        self._crew, self._masters, self._host, self._empty = crew, masters, host, empty

    def take_weights(self) -> None:
        """Let all workers have the weights that worker 0 has; blocks are whole."""
        for block in self._masters.blocks:
            self._crew.control.meet(f"take over {block.key}")
            self._crew.control.spread(block.values, 0, f"take over {block.key}")

    def take_buffers(self, units: Sequence[Unit]) -> None:
        """Let all workers have the buffers that worker 0 has."""
        held = [unit.buffers.copy() for unit in units]
        first = self._crew.control.share(held if self._crew.rank == 0 else None, "take over buffers")[0]
        for unit, values in zip(units, first, strict=True):
            unit.buffers.restore(values)

    def cut(self) -> None:
        """Keep this worker's part of every block that is whole, and of its state."""
        rank = self._crew.rank
        for block in [block for block in self._masters.blocks if block.part is None]:
            cut, params, state = self._crew.cut_of(block), self._masters.params_of(block), self._masters.optimizer.state
            part, start, stop = cut.part(rank), cut.edges[rank], cut.edges[rank + 1]
            mine = self._empty(cut.size(rank)).zero_()
            mine[: stop - start].copy_(block.values[start:stop])
            pieces = zip(block.layout.pieces, _known(params, state), part.pieces, strict=True)
            known = [_recut([(whole, known)], whole, held) for whole, known, held in pieces]
            with self._booked(block):
                _put(block, part, mine, params, state, known)
        self._masters.book_state()

    def join(self) -> None:
        """Make every block and its state whole, on all workers."""
        for block in [block for block in self._masters.blocks if block.part is not None]:
            with self._booked(block):
                self._join(block, self._masters.params_of(block), self._masters.optimizer.state)
        self._masters.book_state()

    def join_waiting(self, waiting: Mapping[Block, Side]) -> None:
        """Make blocks whole, on all workers, that no layer of a stack has: so edits find them."""
        for block, side in waiting.items():
            if block.part is not None:
                self._join(block, side.masters, side.state)

    def _join(self, block: Block, params: Sequence[nn.Parameter], state: _State) -> None:
        cut = self._crew.cut_of(block)
        every = self._empty(cut.numel)
        self._crew.control.meet(f"gather {block.key}")
        self._crew.gather_weights(self._crew.control, block, every)
        parts = [cut.part(rank) for rank in range(self._crew.count)]
        known = self._crew.control.share(_known(params, state), f"gather what is known of {block.key}")
        _put(block, None, every[: block.layout.numel], params, state, _joined(known, block.layout, parts))

    @contextmanager
    def _booked(self, block: Block) -> Iterator[None]:
        """Book what a block has after the code in here, in place of what it had."""
        before = block.nbytes
        yield
        self._host.release("weights", block.key, before)
        self._host.book("weights", block.key, block.nbytes)


def _known(params: Sequence[nn.Parameter], state: _State) -> list[Known]:
    return [state[param] if param in state else None for param in params]


def _put(
    block: Block,
    part: Layout | None,
    master: torch.Tensor,
    params: Sequence[nn.Parameter],
    state: _State,
    known: Sequence[Known],
) -> None:
    """Let a block hold another part of it, or all, and the optimizer know this of it."""
    block.hold_part(part, master, params)
    for param, each in zip(params, known, strict=True):
        state.pop(param, None)
        if each is not None:
            state[param] = dict(each)


def _joined(every: Sequence[Sequence[Known]], layout: Layout, parts: Sequence[Layout]) -> list[Known]:
    """Put together what each worker knows of its parts of a block's parameters."""
    return [
        _recut([(part.pieces[i], known[i]) for part, known in zip(parts, every, strict=True)], whole, whole)
        for i, whole in enumerate(layout.pieces)
    ]


def _recut(held: Sequence[tuple[Piece, Known]], whole: Piece, wanted: Piece) -> Known:
    """Say of a piece of a parameter what others know of their pieces of it."""
    sources = [(piece, known) for piece, known in held if known is not None]
    if not sources or is_absent(wanted, whole):
        return None
    if sources[0][0].size == wanted.size == whole.size:
        return sources[0][1]
    pieces = [piece for piece, _ in sources]

    def of(*leaves: Any) -> Any:
        follows = all(isinstance(x, torch.Tensor) and x.shape == p.size for x, p in zip(leaves, pieces, strict=True))
        return new_piece(wanted, whole, zip(pieces, leaves, strict=True)) if follows else leaves[0]

    return pytree.tree_map(of, *(known for _, known in sources))
