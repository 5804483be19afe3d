"""Division of blocks and their optimizer state between workers, and its reversal.

A state tensor of a parameter's shape is divided like the parameter; other state (a step count) is kept by every worker that holds
a part of the parameter.

Frozen parameters that keep their dtypes stay whole on every worker: they are not updated, and gathers would send a quantised base
twice in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree
from l2l_core.devices import Ledger
from l2l_core.eps import Masters, OptimizerEntry, StateView
from l2l_core.eps.blocks import Block, Layout, Piece, Unit, assemble_new, is_absent
from l2l_core.workers.worker_group import WorkerGroup

MaybeParamState = Mapping[str, Any] | None  # optimizer state of a parameter
_StateMapping = MutableMapping[Any, dict[str, Any]]  # keys: parameters


class Sharding:
    """Shards the blocks of an EPS, and makes them whole again; `empty` allocates float32 host buffers."""

    def __init__(
        self, group: WorkerGroup, masters: Masters, host: Ledger, empty: Callable[[int], torch.Tensor]
    ) -> None:
        self._group, self._masters, self._host, self._empty = group, masters, host, empty

    def broadcast_weights(self) -> None:
        """Copy the weights of worker 0, whose blocks are whole, to all workers."""
        for block in self._masters.blocks:
            self.broadcast_block(block, block.values)

    def broadcast_block(self, block: Block, values: torch.Tensor) -> torch.Tensor:
        """Copy `values` of a whole block, (numel,), from worker 0 to all workers; return this worker's shard of them."""
        self._group.control.handshake(f"take over {block.key}")
        self._group.control.broadcast(values, 0, f"take over {block.key}")
        start, stop = self._group.shard_layout(block).edges[self._group.rank :][:2]
        return values[start:stop]

    def gather_block(self, block: Block, shard: torch.Tensor) -> torch.Tensor:
        """Return the weights of a whole block, (numel,); `shard` is this worker's part of them."""
        values = self._empty(self._group.shard_layout(block).numel)
        self._group.control.handshake(f"gather {block.key}")
        self._group.gather_weights(self._group.control, block, shard, values)
        return values[: block.layout.numel]

    def broadcast_buffers(self, units: Sequence[Unit]) -> None:
        """Copy the buffers of worker 0 to all workers."""
        own = [unit.buffers.copy() for unit in units] if self._group.rank == 0 else None
        first = self._group.control.all_gather_object(own, "take over buffers")[0]
        for unit, values in zip(units, first, strict=True):
            unit.buffers.restore(values)

    def shard(self) -> None:
        """Reduce every whole block and its state to this worker's shard."""
        for block in [block for block in self._masters.blocks if block.local_layout is None and not block.in_bytes]:
            with self._rebooked(block):
                self._shard_block(block, self._masters.params_of(block), self._masters.optimizer.state)
        self._masters.book_state()

    def unshard(self) -> None:
        """Make every block and its state whole on all workers."""
        for block in [block for block in self._masters.blocks if block.local_layout is not None]:
            with self._rebooked(block):
                self._unshard_block(block, self._masters.params_of(block), self._masters.optimizer.state)
        self._masters.book_state()

    def unshard_detached(self, detached: Mapping[Block, OptimizerEntry]) -> None:
        """Make the blocks of detached layers whole on all workers, as edits need them."""
        for block, entry in detached.items():
            if block.local_layout is not None:
                self._unshard_block(block, entry.masters, entry.state)

    @contextmanager
    def unsharded(self, blocks: Mapping[Block, StateView]) -> Iterator[None]:
        """Make leased blocks whole on all workers in a block of code; then each keeps its shard."""
        with ExitStack() as back:
            for block, view in blocks.items():
                if block.in_bytes:
                    continue
                self._unshard_block(block, view.masters, view.state)
                back.callback(self._shard_block, block, view.masters, view.state)
                self._host.book("weights", "whole", block.nbytes)
                back.callback(self._host.release, "weights", "whole", block.nbytes)
            self._masters.book_state()
            yield

    def _shard_block(self, block: Block, params: Sequence[nn.Parameter], state: _StateMapping) -> None:
        layout, rank = self._group.shard_layout(block), self._group.rank
        part, start, stop = layout.shard(rank), layout.edges[rank], layout.edges[rank + 1]
        pieces = zip(block.layout.pieces, map(state.get, params), part.pieces, strict=True)
        states = [_reshard_state([(whole, old)], whole, piece) for whole, old, piece in pieces]
        if block.offloaded:  # its weights will be stored as a shard
            block.local_layout = part
            block.offload(params)
            _set_states(params, state, states)
            return
        shard = self._empty(part.numel).zero_()
        shard[: stop - start].copy_(block.values[start:stop])
        _set_block(block, part, shard, params, state, states)

    def _unshard_block(self, block: Block, params: Sequence[nn.Parameter], state: _StateMapping) -> None:
        layout, control = self._group.shard_layout(block), self._group.control
        values = self.gather_block(block, block.values)
        parts = [layout.shard(rank) for rank in range(self._group.count)]
        what = f"gather the optimizer state of {block.key}"
        by_worker = list(zip(parts, control.all_gather_object([*map(state.get, params)], what), strict=True))
        states = [
            _reshard_state([(part.pieces[i], own[i]) for part, own in by_worker], whole, whole)
            for i, whole in enumerate(block.layout.pieces)
        ]
        _set_block(block, None, values, params, state, states)

    @contextmanager
    def _rebooked(self, block: Block) -> Iterator[None]:
        """Replace the booked bytes of a block after the code in this context has changed it."""
        before = block.nbytes
        yield
        self._host.release("weights", block.key, before)
        self._host.book("weights", block.key, block.nbytes)


def _set_block(
    block: Block,
    local_layout: Layout | None,
    master: torch.Tensor,
    params: Sequence[nn.Parameter],
    state: _StateMapping,
    states: Sequence[MaybeParamState],
) -> None:
    """Replace the master, the layout and the optimizer state of a block."""
    block.set_local_master(local_layout, master, params)
    _set_states(params, state, states)


def _set_states(params: Sequence[nn.Parameter], state: _StateMapping, states: Sequence[MaybeParamState]) -> None:
    for param, param_state in zip(params, states, strict=True):
        state.pop(param, None)
        if param_state is not None:
            state[param] = dict(param_state)


def _reshard_state(old: Sequence[tuple[Piece, MaybeParamState]], whole: Piece, wanted: Piece) -> MaybeParamState:
    """Return the state of one piece of a parameter, from the states of other pieces."""
    sources = [(piece, state) for piece, state in old if state is not None]
    if not sources or is_absent(wanted, whole):
        return None
    if sources[0][0].size == wanted.size == whole.size:
        return sources[0][1]
    pieces = [piece for piece, _ in sources]

    def assemble(*leaves: Any) -> Any:
        shaped = all(isinstance(x, torch.Tensor) and x.shape == p.size for x, p in zip(leaves, pieces, strict=True))
        return assemble_new(wanted, whole, zip(pieces, leaves, strict=True)) if shaped else leaves[0]

    return pytree.tree_map(assemble, *(state for _, state in sources))
