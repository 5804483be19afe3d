"""Reduction of gradients over micro-batches and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.eps.eps_clock import EPSClock
from l2l_core.eps.gradient_buffers import GradientBuffers
from l2l_core.eps.masters import Masters
from l2l_core.eps.updater import set_grads

GradientParts = Mapping[int, BlockGradient]


class Reducer(Protocol):
    """Reduces the gradients of all micro-batches and workers to one. One step lasts from `begin` to `finish`.

    `reduce` and `clip` are called on the EPS's thread, one after another and in the same order on every worker; the others on the
    training thread.

    Attributes:
        per_micro_batch: whether it needs per-micro-batch gradients of all blocks.
    """

    per_micro_batch: bool

    def begin(self, masters: Masters, config: RelayConfig, clock: EPSClock) -> None:
        """Begin a step; `clock` times the EPS's thread and must be paused while that waits for other workers."""
        ...

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        """Return the blocks to reduce once all gradients have arrived, given those with local parts."""
        ...

    def reduce(self, block: Block, parts: GradientParts, gradients: GradientBuffers) -> BlockGradient | None:
        """Return the gradient for a block's update; None if it has none in this step.

        Args:
            block: the block of the gradient.
            parts: this worker's gradients by micro-batch, or a single sum. Their buffers are released to `gradients`, except one
                that may hold the result.
            gradients: buffers.
        """
        ...

    def clip(self, masters: Masters, complete: Mapping[Block, BlockGradient], max_norm: float) -> None:
        """Scale all gradients by their joint norm, as `torch.nn.utils.clip_grad_norm_` does in the model's order."""
        ...

    def abort(self, error: BaseException) -> None:
        """Abort the step after an error of the EPS; called on its thread."""
        ...

    def finish(self) -> None:
        """Wait until the updates of the step are done on all workers; they are done on this one."""
        ...


class LocalReducer:
    """Reducer of a single worker: adds the micro-batches' gradients in ascending k."""

    per_micro_batch = False

    def begin(self, masters: Masters, config: RelayConfig, clock: EPSClock) -> None:
        pass

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        return with_parts

    def reduce(self, block: Block, parts: GradientParts, gradients: GradientBuffers) -> BlockGradient | None:
        return gradients.sum_parts(parts)

    def clip(self, masters: Masters, complete: Mapping[Block, BlockGradient], max_norm: float) -> None:
        for block, piece in complete.items():
            set_grads(masters.params_of(block), piece)
        nn.utils.clip_grad_norm_(masters.params_in_model_order(), max_norm)  # in place, in the buffers of updates

    def abort(self, error: BaseException) -> None:
        pass

    def finish(self) -> None:
        pass


class PerMicroBatchReducer(LocalReducer):
    """Local reducer that keeps all gradients apart by micro-batch, as reducers of several workers may."""

    per_micro_batch = True

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        return [block for block in masters.blocks if block in with_parts]  # the same order on every worker
