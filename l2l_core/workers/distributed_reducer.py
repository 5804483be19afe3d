"""Gradients of all workers become one: each worker gets everybody's gradients of its own part of a block, and adds them up.

What is sent is the same bytes as in a reduce-scatter over a ring, but the owner adds by itself, in an order that is known:
in ascending micro-batch of the whole batch, worker 0's first. ``"ordered"`` sends the gradient of every micro-batch, so the
sum is to the bit that of one worker with all micro-batches; it costs as many times the bytes as there are micro-batches.
``"sum"`` sends each worker's sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.eps import EPSClock, GradientBuffers, Masters, set_grads
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.trace import Trace
from l2l_core.workers.channel import Handshake
from l2l_core.workers.seen import record_collective
from l2l_core.workers.worker_group import WorkerGroup


class DistributedReducer:
    """Is the reducer of several workers.

    Args:
        crew: the workers.
        keeps_apart: whether the gradient of every micro-batch is sent by itself.
        wire: type in which gradients are sent.
    """

    def __init__(self, group: WorkerGroup, per_micro_batch: bool, wire: torch.dtype = torch.float32) -> None:
        self.per_micro_batch, self._group, self._wire = per_micro_batch, group, wire
        self._rounds, self._clock = 1, EPSClock(Trace())
        self._covered: dict[Block, list[bool]] = {}  # of the blocks reduced in this step: what has a gradient anywhere

    def begin(self, masters: Masters, config: RelayConfig, clock: EPSClock) -> None:
        self._clock = clock
        self._rounds = config.micro_batches if self.per_micro_batch else 1
        self._covered = {}

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        # Not those of which something waits here: others may have something of which nothing has come here
        return [block for block in masters.blocks if block not in self._covered]

    def reduce(
        self, block: Block, parts: Mapping[int, BlockGradient], gradients: GradientBuffers
    ) -> BlockGradient | None:
        trained = block.trained
        if not trained.indices:
            return None
        mine = dict(parts) if self.per_micro_batch else self._sum_own(parts, gradients)
        cut, me, count, what = (
            self._group.shard_layout(block),
            self._group.rank,
            self._group.count,
            f"reduce {block.key}",
        )
        edges, own = cut.gradient_edges(trained), cut.gradient_shard(trained, me)
        sizes = [stop - start for start, stop in pairwise(edges)]
        here = [piece.size != (0,) for piece in own.layout.pieces]
        come = [gradients.acquire(sizes[me] * count) for _ in range(self._rounds)]  # all of them before workers meet
        go = [mine[k].flat if k in mine else gradients.acquire(trained.numel) for k in range(self._rounds)]
        room = [
            torch.empty(n, dtype=self._wire) for n in (sizes[me] * count, trained.numel) if self._wire != torch.float32
        ]
        with self._clock.paused():
            met, covers = self._handshake(mine, len(trained.indices), what)
            came = [k for k in range(self._rounds) if bool(covers[:, k].any())]
            for k in came:
                self._all_to_all(come[k], go[k], room, edges, what)
            nbytes = self._wire.itemsize * sizes[me] * (count - 1) * len(came)
            record_collective(self._clock.trace, "reduce", "exchange", block.key, met, nbytes)
        self._covered[block] = covers.flatten(0, 1).any(0).tolist()
        for buffer in go:
            gradients.release(buffer)
        total = BlockGradient(gradients.acquire(sizes[me]), own, (False,) * len(here))
        for rank in range(count):  # so in ascending micro-batch of the whole batch
            for k in came:
                has = tuple(bool(there) and held for there, held in zip(covers[rank, k], here, strict=True))
                total = total.add(BlockGradient(come[k][rank * sizes[me] : (rank + 1) * sizes[me]], own, has))
        for buffer in (*come, *([] if came else [total.flat])):
            gradients.release(buffer)
        return total if came else None

    def _all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        wire_buffers: Sequence[torch.Tensor],
        edges: Sequence[int],
        what: str,
    ) -> None:
        """Send every worker its range of `go`; theirs come side by side.

        Args:
            room: for both in the type in which they are sent, where that is another one.
            edges: where the ranges begin and end.
        """
        me, count, sizes = self._group.rank, self._group.count, [stop - start for start, stop in pairwise(edges)]
        if not wire_buffers:
            self._group.reduces.all_to_all(received, [sizes[me]] * count, sent, sizes, what)
            return
        coming, going = wire_buffers
        going.copy_(sent)
        self._group.reduces.all_to_all(coming, [sizes[me]] * count, going, sizes, what)
        received.copy_(coming)
        received[me * sizes[me] : (me + 1) * sizes[me]] = sent[
            edges[me] : edges[me + 1]
        ]  # what was not sent is not rounded

    def clip(self, masters: Masters, complete: Mapping[Block, BlockGradient], max_norm: float) -> None:
        """Scale gradients by the norm of all of them, which is found from whole ones, gathered block by block.

        A norm of norms of parts would be rounded otherwise than that of one worker.
        """
        norms: dict[nn.Parameter, torch.Tensor] = {}
        for block in [block for block, covered in self._covered.items() if any(covered)]:
            piece, trained = complete[block], block.trained
            edges = self._group.shard_layout(block).gradient_edges(trained)
            flat = torch.empty(trained.numel)
            with self._clock.paused():
                met = self._group.reduces.handshake(f"clip {block.key}")
                self._group.gather_ranges(self._group.reduces, flat, edges, piece.flat, f"clip {block.key}")
                nbytes = flat.itemsize * (trained.numel - (edges[self._group.rank + 1] - edges[self._group.rank]))
                record_collective(self._clock.trace, "reduce", "clip", block.key, met, nbytes)
            every = BlockGradient(flat, trained, tuple(self._covered[block])).views()
            norms |= {masters.params_of(block)[i]: torch.linalg.vector_norm(view) for i, view in every.items()}
            set_grads(masters.params_of(block), piece)
        order = [norms[param] for param in masters.params_in_model_order() if param in norms]
        if order:
            total = torch.linalg.vector_norm(torch.stack(order))
            nn.utils.clip_grads_with_norm_(masters.params_in_model_order(), max_norm, total)

    def abort(self, error: BaseException) -> None:
        self._group.stop_reducing(error)

    def finish(self) -> None:
        record_collective(self._clock.trace, "reduce", "end", "", self._group.control.handshake("end the step"))

    def _sum_own(self, parts: Mapping[int, BlockGradient], gradients: GradientBuffers) -> dict[int, BlockGradient]:
        total = gradients.sum_parts(parts)
        return {} if total is None else {0: total}

    def _handshake(self, mine: Mapping[int, BlockGradient], params: int, what: str) -> tuple[Handshake, torch.Tensor]:
        """Meet, and find out what has a gradient on any worker: (workers, rounds, parameters).

        That is the same for all in most models, which the notes of the meeting say; only where it differs it is sent.
        """
        none = (False,) * params
        here = torch.tensor([mine[k].covers if k in mine else none for k in range(self._rounds)], dtype=torch.uint8)
        reduces, shape = self._group.reduces, (self._group.count, *here.shape)
        met = reduces.handshake(what, note=hashlib.sha256(here.numpy().tobytes()).digest()[:8])
        if len(set(met.notes)) == 1:
            return met, here.expand(shape)
        return met, reduces.all_gather_small(here.flatten(), what).view(shape)
