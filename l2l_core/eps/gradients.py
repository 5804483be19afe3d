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
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.rules import MAX_UNDER_WAY


class Gradients:
    """Holds the gradients of one step after the other.

    Args:
        host: gets the bytes of buffers booked.
        empty: makes a float32 host buffer of so many elements; a device's `host_empty` copies fast.

    Attributes:
        whole: by block, what an update may use.
    """

    def __init__(self, host: Ledger, empty: Callable[[int], torch.Tensor]) -> None:
        self._host, self._empty = host, empty
        self._room = threading.Condition()
        self._under_way: set[int] = set()
        self._free: dict[int, list[torch.Tensor]] = {}
        self.begin(bounded=False)

    def begin(self, bounded: bool) -> None:
        """Open a step.

        Args:
            bounded: whether gradients are used as they come, so that whoever brings one may wait for room.
        """
        self.whole: dict[Block, GradientPiece] = {}
        self._apart: dict[Block, dict[int, GradientPiece]] = {}
        self._bounded, self._gives_up = bounded, False

    def buffer(self, numel: int, bounded: bool = False) -> torch.Tensor:
        """Hand out a host buffer for one gradient, shape (numel,), until `release`.

        A `bounded` buffer is handed out only while few gradients are under way, so that the EPS falling behind slows
        backward down instead of filling the host.
        """
        with self._room:
            if bounded and self._bounded:
                self._room.wait_for(lambda: len(self._under_way) < MAX_UNDER_WAY or self._gives_up)
            free = self._free.setdefault(numel, [])
            buffer = free.pop() if free else self._new(numel)
            if bounded:
                self._under_way.add(id(buffer))
            return buffer

    def _new(self, numel: int) -> torch.Tensor:
        buffer = self._empty(numel)
        self._host.book("gradients", "buffers", buffer.nbytes)
        weakref.finalize(buffer, self._host.release, "gradients", "buffers", buffer.nbytes)
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Take back the buffer of a gradient that has been used."""
        with self._room:
            self._under_way.discard(id(buffer))
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._room.notify_all()

    def add_part(self, block: Block, k: int, piece: GradientPiece) -> None:
        """Add one visit's gradient of micro-batch `k` to those of the same micro-batch."""
        parts = self._apart.setdefault(block, {})
        parts[k] = self._add(parts.get(k), piece)

    def take_part(self, block: Block, k: int, wanted: Sequence[int]) -> dict[int, torch.Tensor]:
        """Take out copies of what has come of micro-batch `k` for some of the block's parameters, by index."""
        piece = self._apart[block][k]
        # Copies, since the buffer goes back; and taken out, since what is lent returns within the next part
        taken = {i: view.clone() for i, view in piece.views().items() if i in wanted}
        self._apart[block][k] = piece.without(list(taken))
        return taken

    @property
    def unfolded(self) -> list[Block]:
        """Blocks whose parts wait."""
        return list(self._apart)

    def take_parts(self, block: Block) -> dict[int, GradientPiece]:
        """Take out what has come of a block, by micro-batch."""
        return self._apart.pop(block, {})

    def sum_of(self, parts: Mapping[int, GradientPiece]) -> GradientPiece | None:
        """Add up parts of a block in ascending k, in the buffer of the first one; None if there are none."""
        total: GradientPiece | None = None
        for k in sorted(parts):
            total = self._add(total, parts[k])
        return total

    def _add(self, total: GradientPiece | None, piece: GradientPiece) -> GradientPiece:
        if total is None:
            return piece
        new = total.plus(piece)
        self.release(piece.flat)
        return new

    def give_up(self) -> None:
        """Let whoever waits for room go on, since the step has failed."""
        with self._room:
            self._gives_up = True
            self._room.notify_all()

    def forget(self) -> None:
        """Let go of gradients under way, which are lost with their step, and of all buffers."""
        self._free.clear()
        self._under_way.clear()
