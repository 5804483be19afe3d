"""How a whole gradient gets from the device to the host: as it is, or in fewer bits, with what that leaves out kept or not.

    device   g ──▶ a = g + e ──▶ Q(a) ──push──▶ host   Q(a) ──▶ float32 ──▶ check, reduce, update
                       └──▶ e = a - Q(a)

Both ends work in place. On the device a gradient is packed into the front of its own slot, in the order of its parameters and
chunk by chunk, and what is written never overtakes what is read; on the host it is unpacked in the order reversed, from the front
of the buffer that it then fills. So neither has a second buffer, and the link sees a shorter float32 tensor.

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
    """Sends whole gradients of one step. `keep` and `unpack` are called on the EPS's thread."""

    def begin(self, blocks: Sequence[Block]) -> None:
        """Hear that the step begins.

        Raises:
            DeviceOutOfMemory: there is no room for what it needs.
        """

    def pack(self, block: Block, gradient: BlockGradient) -> torch.Tensor:
        """Give what is to be sent of a gradient on the device: float32, (n,), in the gradient's own memory."""

    def unpack(self, gradient: BlockGradient) -> None:
        """Make the gradient of what has come in the front of its buffer on the host."""

    def block_updated(self, block: Block) -> None:
        """Hear that a block's update is done, if perhaps to be taken back."""

    def finish(self, blocks: Sequence[Block]) -> None:
        """Hear that the step is done."""

    def undo(self, updated: Sequence[Block]) -> None:
        """Leave all as it was before the step, but for blocks that are updated all the same."""


def make_codec(config: RelayConfig, step: int, residuals: Residuals) -> GradientCodec:
    """Make what sends the gradients of a step as the settings say."""
    if config.wire is None:
        return Float32Codec(residuals)
    spares = residual_backups(config.update, config.rollback)
    keeper = (
        ErrorFeedback(residuals, spares) if config.wire.feedback else StochasticRounding(residuals, config.seed, step)
    )
    return CompressedCodec(config.wire, keeper, residuals)


class _NoResiduals:
    """Keeps nothing of a gradient; what settings before these have kept goes with the step."""

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals

    def begin(self, blocks: Sequence[Block]) -> None:
        pass

    def block_updated(self, block: Block) -> None:
        pass

    def finish(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._residuals.for_block(block).clear()  # of other settings

    def undo(self, updated: Sequence[Block]) -> None:
        pass


class Float32Codec(_NoResiduals):
    """Sends gradients in float32."""

    def pack(self, block: Block, gradient: BlockGradient) -> torch.Tensor:
        return gradient.flat

    def unpack(self, gradient: BlockGradient) -> None:
        pass


class ResidualPolicy(Protocol):
    """Says what becomes of what compression leaves out."""

    def begin(self, blocks: Sequence[Block]) -> None: ...

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        """Give what was left out of a parameter's gradients before, (numel,), to be written; None if that is lost."""

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        """Give the seed of the random numbers of a chunk of a parameter's elements; None if it is rounded to nearest."""

    def block_updated(self, block: Block) -> None: ...

    def finish(self, blocks: Sequence[Block]) -> None: ...

    def undo(self, updated: Sequence[Block]) -> None: ...


class StochasticRounding(_NoResiduals):
    """Loses what is left out; rounding at random sees to it that its mean is 0."""

    def __init__(self, residuals: Residuals, seed: int, step: int) -> None:
        super().__init__(residuals)
        self._stream = f"{seed}/{step}"

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        return None

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        return zlib.crc32(f"{self._stream}/{block.key}/{index}/{chunk}".encode())


class ErrorFeedback:
    """Keeps it on the device for the next step.

    Invariant: until a block's update is done for good there is a copy of the residuals that it had before the step.

    Args:
        residuals: makes and finds them.
        spares: for how many blocks room is booked for such copies; None: for all.
    """

    def __init__(self, residuals: Residuals, backups: int | None) -> None:
        self._residuals, self._backups = residuals, backups
        self._saved: dict[Block, dict[int, torch.Tensor | None]] = {}  # None where there was none
        self._booked_bytes = 0

    def begin(self, blocks: Sequence[Block]) -> None:
        # The first residuals of a block need no copy: before them there was nothing
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
    """Sends gradients in fewer bits.

    Args:
        compress: how.
        keeper: what becomes of the rest.
        residuals: whose device packs.
    """

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
        for spot in self._packed_params(gradient):
            residual = self._policy.residual(block, spot.index, spot.values.numel())
            scales = []
            for number, (start, stop) in enumerate(pairwise(_chunk_edges(spot.values.numel()))):
                values = spot.values[start:stop]
                if residual is not None:
                    values = values + residual[start:stop]
                codes, chunk_scales = self._format.encode(values, self._policy.seed(block, spot.index, number))
                scales.append(chunk_scales)
                if residual is not None:
                    decoded = self._format.decode(codes, chunk_scales, stop - start)
                    torch.sub(values, decoded, out=residual[start:stop])
                first = self._format.code_bytes(start)
                spot.codes[first : first + codes.numel()] = codes
            spot.scales[:] = torch.cat(scales)
        return gradient.flat[: _packed_numel(gradient, self._name)]

    @torch.no_grad()
    def unpack(self, gradient: BlockGradient) -> None:
        for spot in reversed([*self._packed_params(gradient)]):
            numel, scales = spot.values.numel(), spot.scales.clone()
            for start, stop in reversed([*pairwise(_chunk_edges(numel))]):
                first, last = self._format.code_bytes(start), self._format.code_bytes(stop)
                codes, of_chunk = spot.codes[first:last], scales[start // SCALE_GROUP : -(-stop // SCALE_GROUP)]
                spot.values[start:stop] = self._format.decode(codes, of_chunk, stop - start)

    def block_updated(self, block: Block) -> None:
        self._policy.block_updated(block)

    def finish(self, blocks: Sequence[Block]) -> None:
        self._policy.finish(blocks)
        self._ledger.release(CATEGORY, "packing", self._booked_bytes)
        self._booked_bytes = 0

    def undo(self, updated: Sequence[Block]) -> None:
        self._policy.undo(updated)
        self._ledger.release(CATEGORY, "packing", self._booked_bytes)
        self._booked_bytes = 0

    def _packed_params(self, gradient: BlockGradient) -> Iterator[_PackedParam]:
        """Go through the parameters that have a gradient: where it is, and where it is packed."""
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
    values: torch.Tensor  # (numel,), as they lie in memory
    codes: torch.Tensor  # bytes
    scales: torch.Tensor  # (groups,)


def _packed_numel(gradient: BlockGradient, name: str) -> int:
    return sum(packed_numel(name, math.prod(place.size)) for place in gradient.trained.layout.pieces)


def _chunk_edges(numel: int) -> list[int]:
    return [*range(0, numel, PACK_CHUNK), numel]
