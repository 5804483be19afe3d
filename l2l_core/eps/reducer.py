"""What happens to a gradient before its update where several workers have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.eps.clock import Clock
from l2l_core.eps.gradients import Gradients
from l2l_core.eps.masters import Masters
from l2l_core.eps.updates import let_have

Parts = Mapping[int, GradientPiece]


class Reducer(Protocol):
    """Makes one gradient of those of all micro-batches and workers. Between `begin` and `finish` is one step.

    `reduce` and `clip` are called on the EPS's thread, one after another and in one order everywhere, the others on the
    thread that trains.

    Attributes:
        keeps_apart: whether it needs the gradient of every micro-batch by itself, of all blocks.
    """

    keeps_apart: bool

    def begin(self, masters: Masters, config: RelayConfig, clock: Clock) -> None:
        """Hear that a step begins; `clock` times the EPS's thread, and shall not while that waits for others."""

    def due(self, masters: Masters, waiting: Sequence[Block]) -> Sequence[Block]:
        """Say which blocks are reduced when all gradients of the step have come, given those of which parts wait here."""

    def reduce(self, block: Block, parts: Parts, gradients: Gradients) -> GradientPiece | None:
        """Give the gradient to update a block with; None if it has none in this step.

        Args:
            block: what the gradient is of.
            parts: this worker's own, by micro-batch, or one that is their sum already. Their buffers go back to `gradients`,
                except for one in which the result may be.
            gradients: makes and takes back buffers.
        """

    def clip(self, masters: Masters, whole: Mapping[Block, GradientPiece], max_norm: float) -> None:
        """Scale all gradients by their norm together, as `torch.nn.utils.clip_grad_norm_` does in the model's order."""

    def give_up(self, error: BaseException) -> None:
        """Hear that the EPS's work has failed, on its thread: nothing more of this step will be reduced."""

    def finish(self) -> None:
        """Hear that all updates of the step are done here; returns when they are done everywhere."""


class Alone:
    """Is the reducer of one worker: its micro-batches' gradients are added in ascending k, and that is all."""

    keeps_apart = False

    def begin(self, masters: Masters, config: RelayConfig, clock: Clock) -> None:
        pass

    def due(self, masters: Masters, waiting: Sequence[Block]) -> Sequence[Block]:
        return waiting

    def reduce(self, block: Block, parts: Parts, gradients: Gradients) -> GradientPiece | None:
        return gradients.sum_of(parts)

    def clip(self, masters: Masters, whole: Mapping[Block, GradientPiece], max_norm: float) -> None:
        for block, piece in whole.items():
            let_have(masters.params_of(block), piece)
        nn.utils.clip_grad_norm_(masters.in_order(), max_norm)  # in place, so in the buffers that updates will use

    def give_up(self, error: BaseException) -> None:
        pass

    def finish(self) -> None:
        pass


class AloneApart(Alone):
    """Is the same where the gradient of every micro-batch comes by itself, as those of several workers may have to."""

    keeps_apart = True

    def due(self, masters: Masters, waiting: Sequence[Block]) -> Sequence[Block]:
        return [block for block in masters.blocks if block in waiting]  # in the order that all of them have
