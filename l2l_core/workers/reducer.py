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
from l2l_core.eps import Clock, Gradients, Masters, let_have
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.trace import Trace
from l2l_core.workers.channel import Meeting
from l2l_core.workers.crew import Crew
from l2l_core.workers.seen import note


class Exchanged:
    """Is the reducer of several workers.

    Args:
        crew: the workers.
        keeps_apart: whether the gradient of every micro-batch is sent by itself.
        wire: type in which gradients are sent.
    """

    def __init__(self, crew: Crew, keeps_apart: bool, wire: torch.dtype = torch.float32) -> None:
        self.keeps_apart, self._crew, self._wire = keeps_apart, crew, wire
        self._rounds, self._clock = 1, Clock(Trace())
        self._covered: dict[Block, list[bool]] = {}  # of the blocks reduced in this step: what has a gradient anywhere

    def begin(self, masters: Masters, config: RelayConfig, clock: Clock) -> None:
        self._clock = clock
        self._rounds = config.micro_batches if self.keeps_apart else 1
        self._covered = {}

    def due(self, masters: Masters, waiting: Sequence[Block]) -> Sequence[Block]:
        # Not those of which something waits here: others may have something of which nothing has come here
        return [block for block in masters.blocks if block not in self._covered]

    def reduce(self, block: Block, parts: Mapping[int, GradientPiece], gradients: Gradients) -> GradientPiece | None:
        trained = block.trained
        if not trained.indices:
            return None
        mine = dict(parts) if self.keeps_apart else self._summed(parts, gradients)
        cut, me, count, what = self._crew.cut_of(block), self._crew.rank, self._crew.count, f"reduce {block.key}"
        edges, own = cut.gradient_edges(trained), cut.gradient(trained, me)
        sizes = [stop - start for start, stop in pairwise(edges)]
        here = [piece.size != (0,) for piece in own.layout.pieces]
        come = [gradients.buffer(sizes[me] * count) for _ in range(self._rounds)]  # all of them before workers meet
        go = [mine[k].flat if k in mine else gradients.buffer(trained.numel) for k in range(self._rounds)]
        room = [
            torch.empty(n, dtype=self._wire) for n in (sizes[me] * count, trained.numel) if self._wire != torch.float32
        ]
        with self._clock.away():
            met, covers = self._meet(mine, len(trained.indices), what)
            came = [k for k in range(self._rounds) if bool(covers[:, k].any())]
            for k in came:
                self._exchange(come[k], go[k], room, edges, what)
            nbytes = self._wire.itemsize * sizes[me] * (count - 1) * len(came)
            note(self._clock.trace, "reduce", "exchange", block.key, met, nbytes)
        self._covered[block] = covers.flatten(0, 1).any(0).tolist()
        for buffer in go:
            gradients.release(buffer)
        total = GradientPiece(gradients.buffer(sizes[me]), own, (False,) * len(here))
        for rank in range(count):  # so in ascending micro-batch of the whole batch
            for k in came:
                has = tuple(bool(there) and held for there, held in zip(covers[rank, k], here, strict=True))
                total = total.plus(GradientPiece(come[k][rank * sizes[me] : (rank + 1) * sizes[me]], own, has))
        for buffer in (*come, *([] if came else [total.flat])):
            gradients.release(buffer)
        return total if came else None

    def _exchange(
        self, come: torch.Tensor, go: torch.Tensor, room: Sequence[torch.Tensor], edges: Sequence[int], what: str
    ) -> None:
        """Send every worker its range of `go`; theirs come side by side.

        Args:
            room: for both in the type in which they are sent, where that is another one.
            edges: where the ranges begin and end.
        """
        me, count, sizes = self._crew.rank, self._crew.count, [stop - start for start, stop in pairwise(edges)]
        if not room:
            self._crew.reduces.exchange(come, [sizes[me]] * count, go, sizes, what)
            return
        coming, going = room
        going.copy_(go)
        self._crew.reduces.exchange(coming, [sizes[me]] * count, going, sizes, what)
        come.copy_(coming)
        come[me * sizes[me] : (me + 1) * sizes[me]] = go[edges[me] : edges[me + 1]]  # what was not sent is not rounded

    def clip(self, masters: Masters, whole: Mapping[Block, GradientPiece], max_norm: float) -> None:
        """Scale gradients by the norm of all of them, which is found from whole ones, gathered block by block.

        A norm of norms of parts would be rounded otherwise than that of one worker.
        """
        norms: dict[nn.Parameter, torch.Tensor] = {}
        for block in [block for block, covered in self._covered.items() if any(covered)]:
            piece, trained = whole[block], block.trained
            edges = self._crew.cut_of(block).gradient_edges(trained)
            flat = torch.empty(trained.numel)
            with self._clock.away():
                met = self._crew.reduces.meet(f"clip {block.key}")
                self._crew.gather_ranges(self._crew.reduces, flat, edges, piece.flat, f"clip {block.key}")
                nbytes = flat.itemsize * (trained.numel - (edges[self._crew.rank + 1] - edges[self._crew.rank]))
                note(self._clock.trace, "reduce", "clip", block.key, met, nbytes)
            every = GradientPiece(flat, trained, tuple(self._covered[block])).views()
            norms |= {masters.params_of(block)[i]: torch.linalg.vector_norm(view) for i, view in every.items()}
            let_have(masters.params_of(block), piece)
        order = [norms[param] for param in masters.in_order() if param in norms]
        if order:
            total = torch.linalg.vector_norm(torch.stack(order))
            nn.utils.clip_grads_with_norm_(masters.in_order(), max_norm, total)

    def give_up(self, error: BaseException) -> None:
        self._crew.reduces_no_more(error)

    def finish(self) -> None:
        note(self._clock.trace, "reduce", "end", "", self._crew.control.meet("end the step"))

    def _summed(self, parts: Mapping[int, GradientPiece], gradients: Gradients) -> dict[int, GradientPiece]:
        total = gradients.sum_of(parts)
        return {} if total is None else {0: total}

    def _meet(self, mine: Mapping[int, GradientPiece], params: int, what: str) -> tuple[Meeting, torch.Tensor]:
        """Meet, and find out what has a gradient on any worker: (workers, rounds, parameters).

        That is the same for all in most models, which the notes of the meeting say; only where it differs it is sent.
        """
        none = (False,) * params
        here = torch.tensor([mine[k].covers if k in mine else none for k in range(self._rounds)], dtype=torch.uint8)
        reduces, shape = self._crew.reduces, (self._crew.count, *here.shape)
        met = reduces.meet(what, note=hashlib.sha256(here.numpy().tobytes()).digest()[:8])
        if len(set(met.notes)) == 1:
            return met, here.expand(shape)
        return met, reduces.tell(here.flatten(), what).view(shape)
