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
from l2l_core.eps import Masters, OptimizerEntry
from l2l_core.eps.blocks import Block, Layout, Piece, Unit, assemble_new, is_absent
from l2l_core.workers.worker_group import WorkerGroup

MaybeParamState = Mapping[str, Any] | None  # what an optimizer knows of a parameter
_StateMapping = MutableMapping[nn.Parameter, dict[str, Any]]


class Sharding:
    """Cuts what the EPS holds, and puts it together.

    Args:
        crew: the workers.
        masters: blocks and optimizer.
        host: gets the bytes of masters booked.
        empty: makes a float32 host buffer of so many elements.
    """

    def __init__(
        self, group: WorkerGroup, masters: Masters, host: Ledger, empty: Callable[[int], torch.Tensor]
    ) -> None:
        self._group, self._masters, self._host, self._empty = group, masters, host, empty

    def broadcast_weights(self) -> None:
        """Let all workers have the weights that worker 0 has; blocks are whole."""
        for block in self._masters.blocks:
            self._group.control.handshake(f"take over {block.key}")
            self._group.control.broadcast(block.values, 0, f"take over {block.key}")

    def broadcast_buffers(self, units: Sequence[Unit]) -> None:
        """Let all workers have the buffers that worker 0 has."""
        held = [unit.buffers.copy() for unit in units]
        first = self._group.control.all_gather_object(held if self._group.rank == 0 else None, "take over buffers")[0]
        for unit, values in zip(units, first, strict=True):
            unit.buffers.restore(values)

    def shard(self) -> None:
        """Keep this worker's part of every block that is whole, and of its state."""
        rank = self._group.rank
        for block in [block for block in self._masters.blocks if block.local_layout is None]:
            cut, params, state = (
                self._group.shard_layout(block),
                self._masters.params_of(block),
                self._masters.optimizer.state,
            )
            part, start, stop = cut.shard(rank), cut.edges[rank], cut.edges[rank + 1]
            mine = self._empty(cut.shard_numel(rank)).zero_()
            mine[: stop - start].copy_(block.values[start:stop])
            pieces = zip(block.layout.pieces, _states_of(params, state), part.pieces, strict=True)
            known = [_reshard_state([(whole, known)], whole, held) for whole, known, held in pieces]
            with self._rebooked(block):
                _set_block(block, part, mine, params, state, known)
        self._masters.book_state()

    def unshard(self) -> None:
        """Make every block and its state whole, on all workers."""
        for block in [block for block in self._masters.blocks if block.local_layout is not None]:
            with self._rebooked(block):
                self._unshard_block(block, self._masters.params_of(block), self._masters.optimizer.state)
        self._masters.book_state()

    def unshard_detached(self, detached: Mapping[Block, OptimizerEntry]) -> None:
        """Make blocks whole, on all workers, that no layer of a stack has: so edits find them."""
        for block, side in detached.items():
            if block.local_layout is not None:
                self._unshard_block(block, side.masters, side.state)

    def _unshard_block(self, block: Block, params: Sequence[nn.Parameter], state: _StateMapping) -> None:
        cut = self._group.shard_layout(block)
        every = self._empty(cut.numel)
        self._group.control.handshake(f"gather {block.key}")
        self._group.gather_weights(self._group.control, block, every)
        parts = [cut.shard(rank) for rank in range(self._group.count)]
        known = self._group.control.all_gather_object(_states_of(params, state), f"gather what is known of {block.key}")
        _set_block(block, None, every[: block.layout.numel], params, state, _merge_states(known, block.layout, parts))

    @contextmanager
    def _rebooked(self, block: Block) -> Iterator[None]:
        """Book what a block has after the code in here, in place of what it had."""
        before = block.nbytes
        yield
        self._host.release("weights", block.key, before)
        self._host.book("weights", block.key, block.nbytes)


def _states_of(params: Sequence[nn.Parameter], state: _StateMapping) -> list[MaybeParamState]:
    return [state[param] if param in state else None for param in params]


def _set_block(
    block: Block,
    local_layout: Layout | None,
    master: torch.Tensor,
    params: Sequence[nn.Parameter],
    state: _StateMapping,
    known: Sequence[MaybeParamState],
) -> None:
    """Let a block hold another part of it, or all, and the optimizer know this of it."""
    block.set_local_master(local_layout, master, params)
    for param, each in zip(params, known, strict=True):
        state.pop(param, None)
        if each is not None:
            state[param] = dict(each)


def _merge_states(
    every: Sequence[Sequence[MaybeParamState]], layout: Layout, parts: Sequence[Layout]
) -> list[MaybeParamState]:
    """Put together what each worker knows of its parts of a block's parameters."""
    return [
        _reshard_state([(part.pieces[i], known[i]) for part, known in zip(parts, every, strict=True)], whole, whole)
        for i, whole in enumerate(layout.pieces)
    ]


def _reshard_state(held: Sequence[tuple[Piece, MaybeParamState]], whole: Piece, wanted: Piece) -> MaybeParamState:
    """Say of a piece of a parameter what others know of their pieces of it."""
    sources = [(piece, known) for piece, known in held if known is not None]
    if not sources or is_absent(wanted, whole):
        return None
    if sources[0][0].size == wanted.size == whole.size:
        return sources[0][1]
    pieces = [piece for piece, _ in sources]

    def of(*leaves: Any) -> Any:
        follows = all(isinstance(x, torch.Tensor) and x.shape == p.size for x, p in zip(leaves, pieces, strict=True))
        return assemble_new(wanted, whole, zip(pieces, leaves, strict=True)) if follows else leaves[0]

    return pytree.tree_map(of, *(known for _, known in sources))
