"""What has come of a step's gradients, in buffers of the host: whole ones, and parts that wait for their sum.

A block's gradient comes in one piece, already summed over micro-batches; or, where several visits contribute, in one
piece per visit and micro-batch. Those are kept apart and added in ascending k when all have come: floating point is not
associative, and that is the order of plain training.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from l2l_core.devices import Ledger
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS


class GradientBuffers:
    """Holds the gradients of one step after the other.

    Args:
        host: gets the bytes of buffers booked.
        empty: makes a float32 host buffer of so many elements; a device's `host_empty` copies fast.

    Attributes:
        whole: by block, what an update may use.
    """

    def __init__(self, host: Ledger, empty: Callable[[int], torch.Tensor]) -> None:
        self._host, self._empty = host, empty
        self._changed = threading.Condition()
        self._in_flight: set[int] = set()
        self._free: dict[int, list[torch.Tensor]] = {}
        self.begin(bounded=False)

    def begin(self, bounded: bool) -> None:
        """Open a step.

        Args:
            bounded: whether gradients are used as they come, so that whoever brings one may wait for room.
        """
        self.complete: dict[Block, BlockGradient] = {}
        self._per_micro_batch: dict[Block, dict[int, BlockGradient]] = {}
        self._bounded, self._aborted = bounded, False

    def acquire(self, numel: int, bounded: bool = False) -> torch.Tensor:
        """Hand out a host buffer for one gradient, shape (numel,), until `release`.

        A `bounded` buffer is handed out only while few gradients are under way, so that the EPS falling behind slows
        backward down instead of filling the host.
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
        """Take back the buffer of a gradient that has been used."""
        with self._changed:
            self._in_flight.discard(id(buffer))
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._changed.notify_all()

    def add_part(self, block: Block, k: int, gradient: BlockGradient) -> None:
        """Add one visit's gradient of micro-batch `k` to those of the same micro-batch."""
        parts = self._per_micro_batch.setdefault(block, {})
        parts[k] = self._add(parts.get(k), gradient)

    def take_part(self, block: Block, k: int, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """Take out copies of what has come of micro-batch `k` for some of the block's parameters, by index."""
        piece = self._per_micro_batch[block][k]
        # Copies, since the buffer goes back; and taken out, since what is lent returns within the next part
        taken = {i: view.clone() for i, view in piece.views().items() if i in wanted}
        self._per_micro_batch[block][k] = piece.without(list(taken))
        return taken

    @property
    def blocks_with_parts(self) -> list[Block]:
        """Blocks whose parts wait."""
        return list(self._per_micro_batch)

    def take_parts(self, block: Block) -> dict[int, BlockGradient]:
        """Take out what has come of a block, by micro-batch."""
        return self._per_micro_batch.pop(block, {})

    def sum_parts(self, parts: Mapping[int, BlockGradient]) -> BlockGradient | None:
        """Add up parts of a block in ascending k, in the buffer of the first one; None if there are none."""
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
        """Let whoever waits for room go on, since the step has failed."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Let go of gradients under way, which are lost with their step, and of all buffers."""
        self._free.clear()
        self._in_flight.clear()
