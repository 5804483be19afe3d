"""Gradients of a step: host buffers, and their reduction over micro-batches and workers.

A block's gradient arrives in one piece, already summed over micro-batches; or, if several visits contribute, in one piece per
visit and micro-batch. Those are kept apart and added in ascending k once all have arrived, the order of plain training, since
floating point addition is not associative.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from l2l_core._torch import foreach_norm
from l2l_core.config import RelayConfig
from l2l_core.devices import Ledger
from l2l_core.eps.blocks import Block, BlockGradient, Unit
from l2l_core.eps.masters import Masters
from l2l_core.eps.updater import EPSClock, set_grads
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS

_LARGE, _PIECES = 2**20, 64  # elements from which a norm is computed in pieces, and how many


class NonFiniteError(FloatingPointError):
    """A loss or gradient is infinite or NaN; the message names the layer that produced it first.

    Example:
        >>> from l2l_core import NonFiniteError
        >>> inputs, targets = batch
        >>> relay.config = RelayConfig(verify="never")  # else the loss is compared first, with a warning
        >>> try:
        ...     result = relay.step((inputs * float("nan"), targets))
        ... except NonFiniteError as error:
        ...     print(error)
        the loss of micro-batch 0 is nan; first produced by the batch or the code before the first layer. Nothing was updated
        >>> relay.steps  # nothing was trained
        0
    """


def check_finite(unit: Unit, block: Block, gradient: BlockGradient) -> float:
    """Return the norm of a gradient, which may be infinite by overflow; raise NonFiniteError if an element is not finite."""
    norm = joint_norm(gradient.tensors())
    if not math.isfinite(norm):
        names = [block.names[i] for i, view in gradient.views().items() if not torch.isfinite(view).all()]
        if not names:
            return norm
        raise NonFiniteError(
            f"the gradient of {unit.name} (layer {unit.key}) is not finite, the first in backward order; its weights were "
            f"not updated. Affected: {', '.join(names[:5])}. Lower the learning rate, clip with max_grad_norm and "
            "update='deferred', or check this layer's inputs"
        )
    return norm


def joint_norm(parts: Sequence[torch.Tensor]) -> float:
    """Return the norm of several tensors together; 0 for none."""
    if sum(part.numel() for part in parts) >= _LARGE:
        pieces = [norm for part in parts for norm in _norms_of_pieces(part)]
        return torch.linalg.vector_norm(torch.cat(pieces)).item()
    if len(parts) == 1:
        return torch.linalg.vector_norm(parts[0]).item()
    return torch.linalg.vector_norm(torch.stack(foreach_norm(list(parts)))).item() if parts else 0.0


def _norms_of_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield norms of pieces of a tensor, computed on several cores; PyTorch computes a whole tensor's on one."""
    flat = tensor.reshape(-1)
    in_rows = len(flat) - len(flat) % _PIECES
    yield torch.linalg.vector_norm(flat[:in_rows].view(_PIECES, -1), dim=1)
    yield torch.linalg.vector_norm(flat[in_rows:], keepdim=True)


class GradientBuffers:
    """Host buffers for gradients, reused from step to step; `empty` returns a new float32 one with a number of elements.

    Attributes:
        complete: gradients ready for an update, by block.
        parts: gradients by block and micro-batch that wait for their sum.
    """

    def __init__(self, host: Ledger, empty: Callable[[int], torch.Tensor]) -> None:
        self._host, self._empty = host, empty
        self._changed = threading.Condition()
        self._in_flight: set[int] = set()
        self._free: dict[int, list[torch.Tensor]] = {}
        self.begin(bounded=False)

    def begin(self, bounded: bool) -> None:
        """Begin a step; `bounded` if gradients are used as they arrive, so that `acquire` may wait for a free buffer."""
        self.complete: dict[Block, BlockGradient] = {}
        self.parts: dict[Block, dict[int, BlockGradient]] = {}
        self._bounded, self._aborted = bounded, False

    def acquire(self, numel: int, bounded: bool = False) -> torch.Tensor:
        """Return a host buffer for one gradient, shape (numel,), until `release`.

        With `bounded`, waits while many gradients are pending, so that a slow EPS slows backward down instead of filling the
        host.
        """
        with self._changed:
            if bounded and self._bounded:
                self._changed.wait_for(lambda: len(self._in_flight) < MAX_PENDING_GRADIENTS or self._aborted)
            if free := self._free.setdefault(numel, []):
                buffer = free.pop()
            else:
                buffer = self._empty(numel)
                self._host.book("gradients", "buffers", buffer.nbytes)
                weakref.finalize(buffer, self._host.release, "gradients", "buffers", buffer.nbytes)
            if bounded:
                self._in_flight.add(id(buffer))
            return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Return the buffer of a used gradient."""
        with self._changed:
            self._in_flight.discard(id(buffer))
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._changed.notify_all()

    def add_part(self, block: Block, k: int, gradient: BlockGradient) -> None:
        """Add one visit's gradient of micro-batch `k` to the others of the same micro-batch."""
        parts = self.parts.setdefault(block, {})
        parts[k] = self._add(parts.get(k), gradient)

    def take_part(self, block: Block, k: int, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """Remove the gradients of some of the block's parameters from micro-batch `k`; return copies by index."""
        part = self.parts[block][k]
        # Copies, since the buffer is reused; removed, since the next part contains them again
        taken = {i: view.clone() for i, view in part.views().items() if i in wanted}
        self.parts[block][k] = part.without(list(taken))
        return taken

    def sum_parts(self, parts: Mapping[int, BlockGradient]) -> BlockGradient | None:
        """Return the sum of a block's parts in ascending k, in the buffer of the first; None without parts."""
        total: BlockGradient | None = None
        for k in sorted(parts):
            total = self._add(total, parts[k])
        return total

    def _add(self, total: BlockGradient | None, gradient: BlockGradient) -> BlockGradient:
        if total is None:
            return gradient
        new = total.add(gradient)
        self.release(gradient.flat)
        return new

    def abort(self) -> None:
        """End waits for buffers after the step has failed."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop all buffers, and the gradients of a failed step."""
        self._free.clear()
        self._in_flight.clear()


class Reducer:
    """Reduces the gradients of all micro-batches and workers to one; this class, those of a single worker.

    One step lasts from `begin` to `finish`. `reduce` and `clip` are called on the EPS's thread, one after another and in the same
    order on every worker; the others on the training thread.

    Attributes:
        per_micro_batch: whether it needs per-micro-batch gradients of all blocks.
    """

    per_micro_batch = False

    def begin(self, masters: Masters, config: RelayConfig, clock: EPSClock) -> None:
        """Begin a step; `clock` times the EPS's thread and must be paused while that waits for other workers."""

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        """Return the blocks to reduce once all gradients have arrived, given those with local parts."""
        return with_parts

    def reduce(
        self, block: Block, parts: Mapping[int, BlockGradient], gradients: GradientBuffers
    ) -> BlockGradient | None:
        """Return the gradient for a block's update; None if it has none in this step.

        `parts` are this worker's gradients by micro-batch, or a single sum. Their buffers are released to `gradients`, except one
        that may hold the result.
        """
        return gradients.sum_parts(parts)

    def clip(self, masters: Masters, complete: Mapping[Block, BlockGradient], max_norm: float) -> float:
        """Scale all gradients by their joint norm, as `torch.nn.utils.clip_grad_norm_` does in the model's order; return it."""
        for block, piece in complete.items():
            set_grads(masters.params_of(block), piece)
        total = nn.utils.clip_grad_norm_(
            masters.params_in_model_order(), max_norm
        )  # in place, in the buffers of updates
        return total.item()

    def abort(self, error: BaseException) -> None:
        """Abort the step after an error of the EPS; called on its thread."""

    def finish(self) -> None:
        """Wait until the updates of the step are done on all workers; they are done on this one."""


class PerMicroBatchReducer(Reducer):
    """Reducer of one worker that keeps all gradients apart by micro-batch, as reducers of several workers may."""

    per_micro_batch = True

    def blocks_to_reduce(self, masters: Masters, with_parts: Sequence[Block]) -> Sequence[Block]:
        return [block for block in masters.blocks if block in with_parts]  # the same order on every worker
