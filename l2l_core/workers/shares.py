"""Blocks and optimizer state in parts, one on each worker, and whole again.

State follows weights: a tensor of a parameter's shape is cut where the parameter is, and everything else (a count of steps)
is kept by whoever holds a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from l2l_core.devices import Ledger
from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block, Layout, Unit
from l2l_core.workers.crew import Crew

Piece = Any  # of a `Layout`
Known = Mapping[str, Any] | None  # what an optimizer knows of a parameter


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

    def take_first(self, units: Sequence[Unit]) -> None:
        """Let all workers have the weights and buffers that worker 0 has; blocks are whole."""
        for block in self._masters.blocks:
            self._crew.control.meet(f"take over {block.key}")
            self._crew.control.spread(block.values, 0, f"take over {block.key}")
        held = [unit.buffers.copy() for unit in units]
        first = self._crew.control.share(held if self._crew.rank == 0 else None, "take over buffers")[0]
        for unit, values in zip(units, first, strict=True):
            unit.buffers.restore(values)

    def cut(self) -> None:
        """Keep this worker's part of every block that is whole, and of its state."""
        rank = self._crew.rank
        for block in [block for block in self._masters.blocks if block.part is None]:
            cut = self._crew.cut_of(block)
            part, start, stop = cut.part(rank), cut.edges[rank], cut.edges[rank + 1]
            mine = self._empty(cut.size(rank)).zero_()
            mine[: stop - start].copy_(block.values[start:stop])
            pieces = zip(self._known(block), block.layout.pieces, part.pieces, strict=True)
            self._put(block, part, mine, [_cut(*each, start) for each in pieces])
        self._masters.book_state()

    def join(self) -> None:
        """Make every block and its state whole, on all workers."""
        for block in [block for block in self._masters.blocks if block.part is not None]:
            cut = self._crew.cut_of(block)
            every = self._empty(cut.numel)
            self._crew.control.meet(f"gather {block.key}")
            self._crew.gather_weights(self._crew.control, block, every)
            parts = [cut.part(rank) for rank in range(self._crew.count)]
            known = self._crew.control.share(self._known(block), f"gather what is known of {block.key}")
            self._put(block, None, every[: block.layout.numel], _joined(known, block.layout, parts))
        self._masters.book_state()

    def _known(self, block: Block) -> list[Known]:
        state = self._masters.optimizer.state
        return [state[param] if param in state else None for param in self._masters.params_of(block)]

    def _put(self, block: Block, part: Layout | None, master: torch.Tensor, known: Sequence[Known]) -> None:
        params = self._masters.params_of(block)
        self._host.release("weights", block.key, block.nbytes)
        block.hold_part(part, master, params)
        self._host.book("weights", block.key, block.nbytes)
        state = self._masters.optimizer.state
        for param, each in zip(params, known, strict=True):
            state.pop(param, None)
            if each is not None:
                state[param] = dict(each)


def _cut(known: Known, whole: Piece, part: Piece, start: int) -> Known:
    """Cut what is known of a parameter whose part lies in a range that begins at `start` of the block."""
    if known is None or part.size == (0,):
        return None
    if part.size == whole.size:
        return known
    first = max(0, start - whole.offset)

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.shape != whole.size:
            return leaf
        flat = torch.empty_strided(whole.size, whole.stride, dtype=leaf.dtype).copy_(leaf)
        return flat.as_strided((leaf.numel(),), (1,))[first : first + part.size[0]].clone()

    return pytree.tree_map(of, known)


def _joined(every: Sequence[Sequence[Known]], layout: Layout, parts: Sequence[Layout]) -> list[Known]:
    """Put together what each worker knows of its parts of a block's parameters."""
    return [
        _join([known[i] for known in every], whole, [part.pieces[i] for part in parts])
        for i, whole in enumerate(layout.pieces)
    ]


def _join(every: Sequence[Known], whole: Piece, pieces: Sequence[Piece]) -> Known:
    held = [(known, piece) for known, piece in zip(every, pieces, strict=True) if known is not None]
    if not held or held[0][1].size == whole.size:
        return held[0][0] if held else None

    def of(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor) or leaves[0].shape != held[0][1].size:
            return leaves[0]
        flat = torch.cat(leaves)
        into = torch.empty_strided(whole.size, whole.stride, dtype=flat.dtype)
        into.as_strided((flat.numel(),), (1,)).copy_(flat)
        return into

    return pytree.tree_map(of, *(known for known, _ in held))
