"""Copy of gradients to the host: in float32 or compressed, with or without error feedback.

    device   g ──▶ a = g + e ──▶ Q(a) ──push──▶ host   Q(a) ──▶ float32 ──▶ check, reduce, update
                       └──▶ e = a - Q(a)

Both ends work in place. On the device a gradient is packed into the front of its slot, in the order of its parameters and chunk
by chunk, so that writes never overtake reads. On the host it is unpacked in reverse order, from the front of the buffer that it
then fills. Neither side needs a second buffer, and the copy is a shorter float32 tensor.

A residual, the error e, stays on the device for the next gradient of the same parameter. It belongs to its block: a layer that is
dropped and restored keeps it, a new layer has none.

Sources: 1-bit SGD with error feedback (Seide et al., Interspeech 2014); EF-SGD (Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import pairwise
from typing import NamedTuple

import torch

from l2l_core.config import Compress, RelayConfig
from l2l_core.devices import Device
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.eps.formats import FORMATS
from l2l_core.schedule_rules import PACK_CHUNK, PACKING_BYTES, SCALE_GROUP, packed_numel, residual_backups

CATEGORY, OWNER = "gradients", "residuals"


class Residuals:
    """The residuals of a relay, on `device`.

    Invariant: the residuals of all blocks are booked in the device's ledger as gradients of the owner "residuals".
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def for_block(self, block: Block) -> dict[int, torch.Tensor]:
        """Return the residuals of a block, each (numel,), by index of the parameter; the mapping may be changed."""
        return block.residuals

    def create(self, block: Block, index: int, numel: int) -> torch.Tensor:
        """Add a residual of zeros and return it.

        Raises:
            DeviceOutOfMemory: there is no room for it.
        """
        ledger, nbytes = self.device.ledger, 4 * numel
        ledger.book(CATEGORY, OWNER, nbytes)
        residual = self.device.empty(numel).zero_()
        weakref.finalize(residual, ledger.release, CATEGORY, OWNER, nbytes)  # freed with its block
        self.for_block(block)[index] = residual
        return residual

    def snapshot(self, blocks: Iterable[Block]) -> Callable[[], None]:
        """Copy the residuals of some blocks; call the result to restore them."""
        saved = {block: {i: residual.clone() for i, residual in self.for_block(block).items()} for block in blocks}

        def undo() -> None:
            for block, old in saved.items():
                self.restore(block, dict.fromkeys(self.for_block(block)) | old)

        return undo

    def restore(self, block: Block, values: Mapping[int, torch.Tensor | None]) -> None:
        """Set residuals of a block, by index; None removes one."""
        held = self.for_block(block)
        for index, value in values.items():
            if value is None:
                held.pop(index, None)
            else:
                (held[index] if index in held else self.create(block, index, value.numel())).copy_(value)


def make_codec(config: RelayConfig, step: int, residuals: Residuals) -> GradientCodec:
    """Return the codec for a step with these settings."""
    if config.wire is None:
        return GradientCodec(residuals)
    if config.wire.feedback:
        return FeedbackCodec(residuals, config.wire, residual_backups(config.update, config.rollback))
    return CompressedCodec(residuals, config.wire, f"{config.seed}/{step}")


class GradientCodec:
    """Packs and unpacks the gradients of one step; this class copies them in float32, and others compress.

    `unpack` and `block_updated` are called on the EPS's thread.
    """

    def __init__(self, residuals: Residuals) -> None:
        self._residuals, self._ledger = residuals, residuals.device.ledger

    def begin(self, blocks: Sequence[Block]) -> None:
        """Begin a step.

        Raises:
            DeviceOutOfMemory: there is no room for its buffers.
        """

    def pack(self, block: Block, gradient: BlockGradient) -> torch.Tensor:
        """Pack a gradient on the device, in its own memory; return the tensor to copy, float32, (n,)."""
        return gradient.flat

    def unpack(self, gradient: BlockGradient) -> None:
        """Unpack a gradient on the host, from the front of its buffer, in place."""

    def block_updated(self, block: Block) -> None:
        """Note that a block is updated, though an undo may follow."""

    def finish(self, blocks: Sequence[Block]) -> None:
        """End the step. Residuals of earlier settings are dropped."""
        for block in blocks:
            self._residuals.for_block(block).clear()

    def undo(self, updated: Sequence[Block]) -> None:
        """Restore the state before the step, except for blocks that stay updated."""


class CompressedCodec(GradientCodec):
    """Compresses gradients and drops the error, whose expected value is 0 because rounding is stochastic."""

    def __init__(self, residuals: Residuals, compress: Compress, stream: str) -> None:
        super().__init__(residuals)
        self._name, self._format, self._stream = compress.format, FORMATS[compress.format], stream
        self._packing_bytes = 0  # booked

    def begin(self, blocks: Sequence[Block]) -> None:
        numels = [math.prod(place.size) for block in blocks for place in block.trained.layout.pieces]
        nbytes = PACKING_BYTES * min(PACK_CHUNK, max(numels, default=0) + SCALE_GROUP)
        self._ledger.book(CATEGORY, "packing", nbytes)
        self._packing_bytes = nbytes

    @torch.no_grad()
    def pack(self, block: Block, gradient: BlockGradient) -> torch.Tensor:
        for param in self._packed_params(gradient):
            residual = self._residual(block, param.index, param.values.numel())
            scales = []
            for number, (start, stop) in enumerate(pairwise(_chunk_edges(param.values.numel()))):
                values = param.values[start:stop]
                if residual is not None:
                    values = values + residual[start:stop]
                codes, chunk_scales = self._format.encode(values, self._seed(block, param.index, number))
                scales.append(chunk_scales)
                if residual is not None:
                    decoded = self._format.decode(codes, chunk_scales, stop - start)
                    torch.sub(values, decoded, out=residual[start:stop])
                first = self._format.code_bytes(start)
                param.codes[first : first + codes.numel()] = codes
            param.scales[:] = torch.cat(scales)
        numels = (math.prod(place.size) for place in gradient.trained.layout.pieces)
        return gradient.flat[: sum(packed_numel(self._name, numel) for numel in numels)]

    @torch.no_grad()
    def unpack(self, gradient: BlockGradient) -> None:
        for param in reversed([*self._packed_params(gradient)]):
            numel, scales = param.values.numel(), param.scales.clone()
            for start, stop in reversed([*pairwise(_chunk_edges(numel))]):
                first, last = self._format.code_bytes(start), self._format.code_bytes(stop)
                codes, chunk_scales = param.codes[first:last], scales[start // SCALE_GROUP : -(-stop // SCALE_GROUP)]
                param.values[start:stop] = self._format.decode(codes, chunk_scales, stop - start)

    def finish(self, blocks: Sequence[Block]) -> None:
        super().finish(blocks)
        self._release()

    def undo(self, updated: Sequence[Block]) -> None:
        self._release()

    def _release(self) -> None:
        self._ledger.release(CATEGORY, "packing", self._packing_bytes)
        self._packing_bytes = 0

    def _residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        """Return a parameter's residual, (numel,), to be added and overwritten; None if errors are dropped."""
        return None

    def _seed(self, block: Block, index: int, chunk: int) -> int | None:
        """Return the seed for stochastic rounding of a chunk of a parameter; None to round to nearest."""
        return zlib.crc32(f"{self._stream}/{block.key}/{index}/{chunk}".encode())

    def _packed_params(self, gradient: BlockGradient) -> Iterator[_PackedParam]:
        """Yield the parameters that have a gradient, with the places of the gradient and of its codes."""
        start, trained = 0, gradient.trained
        for index, place, has in zip(trained.indices, trained.layout.pieces, gradient.covers, strict=True):
            numel = math.prod(place.size)
            stop = start + packed_numel(self._name, numel)
            if has and numel:
                packed = gradient.flat[start:stop]
                scales = -(-numel // SCALE_GROUP) if self._name != "bf16" else 0
                codes = packed[: len(packed) - scales].view(torch.uint8)
                yield _PackedParam(index, gradient.flat[place.offset :][:numel], codes, packed[len(packed) - scales :])
            start = stop


class FeedbackCodec(CompressedCodec):
    """Keeps the error on the device and adds it to the next gradient.

    Invariant: until a block's update is final, a copy of its residuals from before the step exists. Memory is booked for the
    copies of `backups` blocks, or of all.
    """

    def __init__(self, residuals: Residuals, compress: Compress, backups: int | None) -> None:
        super().__init__(residuals, compress, "")
        self._backups = backups
        self._saved: dict[Block, dict[int, torch.Tensor | None]] = {}  # None: there was no residual
        self._backup_bytes = 0  # booked

    def begin(self, blocks: Sequence[Block]) -> None:
        super().begin(blocks)
        # The first residuals of a block need no copy
        sizes = [sum(residual.nbytes for residual in self._residuals.for_block(block).values()) for block in blocks]
        nbytes = sum(nlargest(len(sizes) if self._backups is None else self._backups, sizes))
        self._ledger.book(CATEGORY, "residuals before", nbytes)
        self._backup_bytes = nbytes

    def _residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        before, held = self._saved.setdefault(block, {}), self._residuals.for_block(block)
        if index not in held:
            before[index] = None
            return self._residuals.create(block, index, numel)
        before[index] = self._residuals.device.empty(numel).copy_(held[index])
        return held[index]

    def _seed(self, block: Block, index: int, chunk: int) -> int | None:
        return None

    def block_updated(self, block: Block) -> None:
        if self._backups is not None:
            self._drop_backup(block)

    def _drop_backup(self, block: Block) -> None:
        for copy in self._saved.pop(block, {}).values():
            if copy is not None:
                self._residuals.device.recycle(copy)

    def finish(self, blocks: Sequence[Block]) -> None:
        self._release()

    def undo(self, updated: Sequence[Block]) -> None:
        for block, before in self._saved.items():
            if block not in updated:
                self._residuals.restore(block, before)
        self._release()

    def _release(self) -> None:
        for block in [*self._saved]:
            self._drop_backup(block)
        self._ledger.release(CATEGORY, "residuals before", self._backup_bytes)
        self._backup_bytes = 0
        super()._release()


class _PackedParam(NamedTuple):
    index: int  # of the parameter in its block
    values: torch.Tensor  # (numel,), in memory order
    codes: torch.Tensor  # bytes
    scales: torch.Tensor  # (groups,)


def _chunk_edges(numel: int) -> list[int]:
    return [*range(0, numel, PACK_CHUNK), numel]
