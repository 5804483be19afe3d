"""What happens to a gradient before its update where several workers have one."""

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
    """Makes one gradient of those of all micro-batches and workers. Between `begin` and `finish` is one step.

    `reduce` and `clip` are called on the EPS's thread, one after another and in one order everywhere, the others on the
    thread that trains.

    Attributes:
        keeps_apart: whether it needs the gradient of every micro-batch by itself, of all blocks.
    """

    per_micro_batch: bool

    def begin(self, masters: Masters, config: RelayConfig, clock: EPSClock) -> None:
        """Hear that a step begins; `clock` times the EPS's thread, and shall not while that waits for others."""

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        """Say which blocks are reduced when all gradients of the step have come, given those of which parts wait here."""

    def reduce(self, block: Block, parts: GradientParts, gradients: GradientBuffers) -> BlockGradient | None:
        """Give the gradient to update a block with; None if it has none in this step.

        Args:
            block: what the gradient is of.
            parts: this worker's own, by micro-batch, or one that is their sum already. Their buffers go back to `gradients`,
                except for one in which the result may be.
            gradients: makes and takes back buffers.
        """

    def clip(self, masters: Masters, complete: Mapping[Block, BlockGradient], max_norm: float) -> None:
        """Scale all gradients by their norm together, as `torch.nn.utils.clip_grad_norm_` does in the model's order."""

    def abort(self, error: BaseException) -> None:
        """Hear that the EPS's work has failed, on its thread: nothing more of this step will be reduced."""

    def finish(self) -> None:
        """Hear that all updates of the step are done here; returns when they are done everywhere."""


class LocalReducer:
    """Is the reducer of one worker: its micro-batches' gradients are added in ascending k, and that is all."""

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
        nn.utils.clip_grad_norm_(
            masters.params_in_model_order(), max_norm
        )  # in place, so in the buffers that updates will use

    def abort(self, error: BaseException) -> None:
        pass

    def finish(self) -> None:
        pass


class PerMicroBatchReducer(LocalReducer):
    """Is the same where the gradient of every micro-batch comes by itself, as those of several workers may have to."""

    per_micro_batch = True

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        return [block for block in masters.blocks if block in with_parts]  # in the order that all of them have
