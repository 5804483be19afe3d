"""Reduction of gradients between workers: each worker receives all gradients of its shard of a block and adds them up.

The bytes sent equal those of a reduce-scatter over a ring, but the owner of a shard adds in a fixed order: ascending micro-batch
of the whole batch, worker 0 first. ``"ordered"`` sends the gradient of every micro-batch, so the sum equals that of one worker
with all micro-batches to the bit. ``"sum"`` sends the sum of each worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.eps import EPSClock, GradientBuffers, Masters, Reducer, set_grads
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.trace import Trace
from l2l_core.workers.channel import Handshake, record_collective
from l2l_core.workers.worker_group import WorkerGroup


class DistributedReducer(Reducer):
    """Reducer of several workers, which may send the gradient of every micro-batch separately."""

    def __init__(
        self, group: WorkerGroup, per_micro_batch: bool, wire: torch.dtype = torch.float32, has_batch_loss: bool = False
    ) -> None:
        self.per_micro_batch, self._group, self._wire, self._has_batch_loss = (
            per_micro_batch,
            group,
            wire,
            has_batch_loss,
        )
        self._numbers, self._clock = range(1), EPSClock(Trace())  # of the parts of a gradient
        self._covered: dict[Block, list[bool]] = {}  # reduced blocks: has a parameter a gradient anywhere

    def begin(self, masters: Masters, config: RelayConfig, clock: EPSClock) -> None:
        self._clock = clock
        # -1 is the part of a loss of the whole batch.
        self._numbers = range(-self._has_batch_loss, config.micro_batches) if self.per_micro_batch else range(1)
        self._covered = {}

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        # All that are left, not only those with a gradient here: other workers may have one
        return [block for block in masters.blocks if block not in self._covered]

    def reduce(
        self, block: Block, parts: Mapping[int, BlockGradient], gradients: GradientBuffers
    ) -> BlockGradient | None:
        trained = block.trained
        if not trained.indices:
            return None
        own = dict(parts)
        if not self.per_micro_batch:
            summed = gradients.sum_parts(parts)
            own = {} if summed is None else {0: summed}
        layout, rank, count = self._group.shard_layout(block), self._group.rank, self._group.count
        what = f"reduce {block.key}"
        edges, shard = layout.gradient_edges(trained), layout.gradient_shard(trained, rank)
        numel = edges[rank + 1] - edges[rank]
        present = [piece.size != (0,) for piece in shard.layout.pieces]
        # All buffers are acquired before the handshake, after which nothing may fail
        received = [gradients.acquire(numel * count) for _ in self._numbers]
        sent = [own[k].flat if k in own else gradients.acquire(trained.numel) for k in self._numbers]
        wire_sizes = (numel * count, trained.numel) if self._wire != torch.float32 else ()
        wire_buffers = [torch.empty(size, dtype=self._wire) for size in wire_sizes]
        with self._clock.paused():
            handshake, covers = self._handshake(own, len(trained.indices), what)
            rounds = [i for i in range(len(self._numbers)) if bool(covers[:, i].any())]
            for i in rounds:
                self._all_to_all(received[i], sent[i], wire_buffers, edges, what)
            nbytes = self._wire.itemsize * numel * (count - 1) * len(rounds)
            record_collective(self._clock.trace, "reduce", "exchange", block.key, handshake, nbytes)
        self._covered[block] = covers.flatten(0, 1).any(0).tolist()
        for buffer in sent:
            gradients.release(buffer)
        total = BlockGradient(gradients.acquire(numel), shard, (False,) * len(present))
        for other in range(count):  # ascending micro-batch of the whole batch
            for i in rounds:
                has = tuple(bool(covered) and here for covered, here in zip(covers[other, i], present, strict=True))
                total = total.add(BlockGradient(received[i][other * numel : (other + 1) * numel], shard, has))
        for buffer in (*received, *([] if rounds else [total.flat])):
            gradients.release(buffer)
        return total if rounds else None

    def _all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        wire_buffers: Sequence[torch.Tensor],
        edges: Sequence[int],
        what: str,
    ) -> None:
        """Send each worker its range of `sent`, (numel,); receive this worker's ranges, (count * n,).

        `wire_buffers` are for `received` and `sent` in the type of the wire; none if that is float32, as theirs.
        """
        rank, count, sizes = self._group.rank, self._group.count, [stop - start for start, stop in pairwise(edges)]
        numel = sizes[rank]
        if not wire_buffers:
            self._group.reduces.all_to_all(received, [numel] * count, sent, sizes, what)
            return
        wire_received, wire_sent = wire_buffers
        wire_sent.copy_(sent)
        self._group.reduces.all_to_all(wire_received, [numel] * count, wire_sent, sizes, what)
        received.copy_(wire_received)
        received[rank * numel : (rank + 1) * numel] = sent[edges[rank] : edges[rank + 1]]  # own range: not rounded

    def clip(self, masters: Masters, complete: Mapping[Block, BlockGradient], max_norm: float) -> float:
        """Clip gradients by their total norm and return it, computed from whole gradients that are gathered block by block.

        A norm of the norms of shards would round differently from the norm that one worker computes.
        """
        norms: dict[nn.Parameter, torch.Tensor] = {}
        for block in [block for block, covered in self._covered.items() if any(covered)]:
            piece, trained = complete[block], block.trained
            edges = self._group.shard_layout(block).gradient_edges(trained)
            flat = torch.empty(trained.numel)
            with self._clock.paused():
                handshake = self._group.reduces.handshake(f"clip {block.key}")
                self._group.gather_ranges(self._group.reduces, flat, edges, piece.flat, f"clip {block.key}")
                nbytes = flat.itemsize * (trained.numel - (edges[self._group.rank + 1] - edges[self._group.rank]))
                record_collective(self._clock.trace, "reduce", "clip", block.key, handshake, nbytes)
            views = BlockGradient(flat, trained, tuple(self._covered[block])).views()
            norms |= {masters.params_of(block)[i]: torch.linalg.vector_norm(view) for i, view in views.items()}
            set_grads(masters.params_of(block), piece)
        order = [norms[param] for param in masters.params_in_model_order() if param in norms]
        if not order:
            return 0.0
        total = torch.linalg.vector_norm(torch.stack(order))
        nn.utils.clip_grads_with_norm_(masters.params_in_model_order(), max_norm, total)
        return total.item()

    def abort(self, error: BaseException) -> None:
        self._group.stop_reducing(error)

    def finish(self) -> None:
        record_collective(self._clock.trace, "reduce", "end", "", self._group.control.handshake("end the step"))

    def _handshake(self, own: Mapping[int, BlockGradient], params: int, what: str) -> tuple[Handshake, torch.Tensor]:
        """Return which parameters have a gradient, by worker and round: uint8, (workers, rounds, parameters).

        The workers' masks are equal in most models, which the notes of the handshake show; only otherwise are masks sent.
        """
        none = (False,) * params
        masks = torch.tensor([own[k].covers if k in own else none for k in self._numbers], dtype=torch.uint8)
        reduces, shape = self._group.reduces, (self._group.count, *masks.shape)
        handshake = reduces.handshake(what, note=hashlib.sha256(masks.numpy().tobytes()).digest()[:8])
        if len(set(handshake.notes)) == 1:
            return handshake, masks.expand(shape)
        return handshake, reduces.all_gather_small(masks.flatten(), what).view(shape)
