"""Copy of gradients to the host: in float32 or compressed, with or without error feedback.

    device   g ──▶ a = g + e ──▶ Q(a) ──push──▶ host   Q(a) ──▶ float32 ──▶ check, reduce, update
                       └──▶ e = a - Q(a)

Both ends work in place. On the device a gradient is packed into the front of its slot, in the order of its parameters and chunk
by chunk, so that writes never overtake reads. On the host it is unpacked in reverse order, from the front of the buffer that it
then fills. Neither side needs a second buffer, and the copy is a shorter float32 tensor.

Sources: 1-bit SGD with error feedback (Seide et al., Interspeech 2014); EF-SGD (Karimireddy et al., arXiv 1901.09847).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from l2l_core.config import Compress, RelayConfig
from l2l_core.eps.blocks import Block, BlockGradient
from l2l_core.eps.formats import FORMATS
from l2l_core.eps.residuals import CATEGORY, Residuals
from l2l_core.schedule_rules import PACK_CHUNK, PACKING_BYTES, SCALE_GROUP, packed_numel, residual_backups


class GradientCodec(Protocol):
    """Packs and unpacks the gradients of one step. `unpack` and `block_updated` are called on the EPS's thread."""

    def begin(self, blocks: Sequence[Block]) -> None:
        """Begin a step.

        Raises:
            DeviceOutOfMemory: there is no room for its buffers.
        """
        ...

    def pack(self, block: Block, gradient: BlockGradient) -> torch.Tensor:
        """Pack a gradient on the device, in its own memory; return the tensor to copy, float32, (n,)."""
        ...

    def unpack(self, gradient: BlockGradient) -> None:
        """Unpack a gradient on the host, from the front of its buffer, in place."""
        ...

    def block_updated(self, block: Block) -> None:
        """Note that a block is updated, though an undo may follow."""
        ...

    def finish(self, blocks: Sequence[Block]) -> None:
        """End the step."""
        ...

    def undo(self, updated: Sequence[Block]) -> None:
        """Restore the state before the step, except for blocks that stay updated."""
        ...


def make_codec(config: RelayConfig, step: int, residuals: Residuals) -> GradientCodec:
    """Return the codec for a step with these settings."""
    if config.wire is None:
        return Float32Codec(residuals)
    if config.wire.feedback:
        backups = residual_backups(config.update, config.rollback)
        return CompressedCodec(config.wire, ErrorFeedback(residuals, backups), residuals)
    return CompressedCodec(config.wire, StochasticRounding(residuals, config.seed, step), residuals)


class _NoResiduals:
    """Keeps no residuals; those of earlier settings are dropped after the step."""

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals

    def begin(self, blocks: Sequence[Block]) -> None:
        pass

    def block_updated(self, block: Block) -> None:
        pass

    def finish(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._residuals.for_block(block).clear()

    def undo(self, updated: Sequence[Block]) -> None:
        pass


class Float32Codec(_NoResiduals):
    """Copies gradients in float32."""

    def pack(self, block: Block, gradient: BlockGradient) -> torch.Tensor:
        return gradient.flat

    def unpack(self, gradient: BlockGradient) -> None:
        pass


class ResidualPolicy(Protocol):
    """Treatment of the error that compression makes."""

    def begin(self, blocks: Sequence[Block]) -> None: ...

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        """Return a parameter's residual, (numel,), to be added and overwritten; None if errors are dropped."""
        ...

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        """Return the seed for stochastic rounding of a chunk of a parameter; None to round to nearest."""
        ...

    def block_updated(self, block: Block) -> None: ...

    def finish(self, blocks: Sequence[Block]) -> None: ...

    def undo(self, updated: Sequence[Block]) -> None: ...


class StochasticRounding(_NoResiduals):
    """Drops the error, whose expected value is 0 because rounding is stochastic."""

    def __init__(self, residuals: Residuals, seed: int, step: int) -> None:
        super().__init__(residuals)
        self._stream = f"{seed}/{step}"

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        return None

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        return zlib.crc32(f"{self._stream}/{block.key}/{index}/{chunk}".encode())


class ErrorFeedback:
    """Keeps the error on the device and adds it to the next gradient.

    Invariant: until a block's update is final, a copy of its residuals from before the step exists.

    Args:
        residuals: the residuals by block.
        backups: number of blocks with memory booked for such copies; None: all.
    """

    def __init__(self, residuals: Residuals, backups: int | None) -> None:
        self._residuals, self._backups = residuals, backups
        self._saved: dict[Block, dict[int, torch.Tensor | None]] = {}  # None: there was no residual
        self._booked_bytes = 0

    def begin(self, blocks: Sequence[Block]) -> None:
        # The first residuals of a block need no copy
        sizes = [sum(residual.nbytes for residual in self._residuals.for_block(block).values()) for block in blocks]
        nbytes = sum(nlargest(len(sizes) if self._backups is None else self._backups, sizes))
        self._residuals.device.ledger.book(CATEGORY, "residuals before", nbytes)
        self._booked_bytes = nbytes

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        before, held = self._saved.setdefault(block, {}), self._residuals.for_block(block)
        if index not in held:
            before[index] = None
            return self._residuals.create(block, index, numel)
        before[index] = self._residuals.device.empty(numel).copy_(held[index])
        return held[index]

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        return None

    def block_updated(self, block: Block) -> None:
        if self._backups is not None:
            self._drop_backup(block)

    def _drop_backup(self, block: Block) -> None:
        for copy in self._saved.pop(block, {}).values():
            if copy is not None:
                self._residuals.device.recycle(copy)

    def finish(self, blocks: Sequence[Block]) -> None:
        for block in [*self._saved]:
            self._drop_backup(block)
        self._residuals.device.ledger.release(CATEGORY, "residuals before", self._booked_bytes)
        self._booked_bytes = 0

    def undo(self, updated: Sequence[Block]) -> None:
        for block, before in self._saved.items():
            if block not in updated:
                self._residuals.restore(block, before)
        self.finish(updated)


class CompressedCodec:
    """Compresses gradients; `policy` treats the error."""

    def __init__(self, compress: Compress, policy: ResidualPolicy, residuals: Residuals) -> None:
        self._name, self._format, self._policy = compress.format, FORMATS[compress.format], policy
        self._ledger, self._booked_bytes = residuals.device.ledger, 0

    def begin(self, blocks: Sequence[Block]) -> None:
        numels = [math.prod(place.size) for block in blocks for place in block.trained.layout.pieces]
        nbytes = PACKING_BYTES * min(PACK_CHUNK, max(numels, default=0) + SCALE_GROUP)
        self._ledger.book(CATEGORY, "packing", nbytes)
        self._booked_bytes = nbytes
        self._policy.begin(blocks)

    @torch.no_grad()
    def pack(self, block: Block, gradient: BlockGradient) -> torch.Tensor:
        for param in self._packed_params(gradient):
            residual = self._policy.residual(block, param.index, param.values.numel())
            scales = []
            for number, (start, stop) in enumerate(pairwise(_chunk_edges(param.values.numel()))):
                values = param.values[start:stop]
                if residual is not None:
                    values = values + residual[start:stop]
                codes, chunk_scales = self._format.encode(values, self._policy.seed(block, param.index, number))
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

    def block_updated(self, block: Block) -> None:
        self._policy.block_updated(block)

    def finish(self, blocks: Sequence[Block]) -> None:
        self._policy.finish(blocks)
        self._release_buffer()

    def undo(self, updated: Sequence[Block]) -> None:
        self._policy.undo(updated)
        self._release_buffer()

    def _release_buffer(self) -> None:
        self._ledger.release(CATEGORY, "packing", self._booked_bytes)
        self._booked_bytes = 0

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


class _PackedParam(NamedTuple):
    index: int  # of the parameter in its block
    values: torch.Tensor  # (numel,), in memory order
    codes: torch.Tensor  # bytes
    scales: torch.Tensor  # (groups,)


def _chunk_edges(numel: int) -> list[int]:
    return [*range(0, numel, PACK_CHUNK), numel]
