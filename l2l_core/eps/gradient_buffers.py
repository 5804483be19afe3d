"""Gradients of a step in host buffers: complete ones, and per-micro-batch parts that wait for their sum.

A block's gradient arrives in one piece, already summed over micro-batches; or, if several visits contribute, in one piece per
visit and micro-batch. Those are kept apart and added in ascending k once all have arrived, the order of plain training, since
floating point addition is not associative.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from l2l_core._torch import foreach_norm
from l2l_core.devices import Ledger
from l2l_core.eps.blocks import Block, BlockGradient, Unit
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS


class NonFiniteError(FloatingPointError):
    """A loss or gradient is infinite or NaN; the message names the layer that produced it first."""


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
    if len(parts) == 1:
        return torch.linalg.vector_norm(parts[0]).item()
    return torch.linalg.vector_norm(torch.stack(foreach_norm(list(parts)))).item() if parts else 0.0


class GradientBuffers:
    """Host buffers for gradients, reused from step to step.

    Args:
        host: ledger for the bytes of buffers.
        empty: returns a float32 host buffer with a number of elements.

    Attributes:
        complete: gradients ready for an update, by block.
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
        self._per_micro_batch: dict[Block, dict[int, BlockGradient]] = {}
        self._bounded, self._aborted = bounded, False

    def acquire(self, numel: int, bounded: bool = False) -> torch.Tensor:
        """Return a host buffer for one gradient, shape (numel,), until `release`.

        With `bounded`, waits while many gradients are pending, so that a slow EPS slows backward down instead of filling the
        host.
        """
        with self._changed:
            if bounded and self._bounded:
                self._changed.wait_for(lambda: len(self._in_flight) < MAX_PENDING_GRADIENTS or self._aborted)
            free = self._free.setdefault(numel, [])
            buffer = free.pop() if free else self._new(numel)
            if bounded:
                self._in_flight.add(id(buffer))
            return buffer

    def _new(self, numel: int) -> torch.Tensor:
        buffer = self._empty(numel)
        self._host.book("gradients", "buffers", buffer.nbytes)
        weakref.finalize(buffer, self._host.release, "gradients", "buffers", buffer.nbytes)
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Return the buffer of a used gradient."""
        with self._changed:
            self._in_flight.discard(id(buffer))
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._changed.notify_all()

    def add_part(self, block: Block, k: int, gradient: BlockGradient) -> None:
        """Add one visit's gradient of micro-batch `k` to the others of the same micro-batch."""
        parts = self._per_micro_batch.setdefault(block, {})
        parts[k] = self._add(parts.get(k), gradient)

    def take_part(self, block: Block, k: int, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """Remove the gradients of some of the block's parameters from micro-batch `k`; return copies by index."""
        part = self._per_micro_batch[block][k]
        # Copies, since the buffer is reused; removed, since the next part contains them again
        taken = {i: view.clone() for i, view in part.views().items() if i in wanted}
        self._per_micro_batch[block][k] = part.without(list(taken))
        return taken

    @property
    def blocks_with_parts(self) -> list[Block]:
        """Blocks with parts that wait for their sum."""
        return list(self._per_micro_batch)

    def take_parts(self, block: Block) -> dict[int, BlockGradient]:
        """Remove and return the parts of a block, by micro-batch."""
        return self._per_micro_batch.pop(block, {})

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
