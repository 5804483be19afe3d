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
from l2l_core.eps.blocks import Block, GradientPiece
from l2l_core.eps.formats import FORMATS
from l2l_core.eps.residuals import CATEGORY, Residuals
from l2l_core.rules import CHUNK, GROUP, PACKING_BYTES, packed_numel, spare_residuals


class Wire(Protocol):
    """Sends whole gradients of one step. `keep` and `unpack` are called on the EPS's thread."""

    def begin(self, blocks: Sequence[Block]) -> None:
        """Hear that the step begins.

        Raises:
            DeviceOutOfMemory: there is no room for what it needs.
        """

    def pack(self, block: Block, piece: GradientPiece) -> torch.Tensor:
        """Give what is to be sent of a gradient on the device: float32, (n,), in the gradient's own memory."""

    def unpack(self, piece: GradientPiece) -> None:
        """Make the gradient of what has come in the front of its buffer on the host."""

    def keep(self, block: Block) -> None:
        """Hear that a block's update is done, if perhaps to be taken back."""

    def finish(self, blocks: Sequence[Block]) -> None:
        """Hear that the step is done."""

    def undo(self, updated: Sequence[Block]) -> None:
        """Leave all as it was before the step, but for blocks that are updated all the same."""


def wire_of(config: RelayConfig, step: int, residuals: Residuals) -> Wire:
    """Make what sends the gradients of a step as the settings say."""
    if config.wire is None:
        return AsItIs(residuals)
    spares = spare_residuals(config.update, config.rollback)
    keeper = Feedback(residuals, spares) if config.wire.feedback else AtRandom(residuals, config.seed, step)
    return Packed(config.wire, keeper, residuals)


class _Forgetful:
    """Keeps nothing of a gradient; what settings before these have kept goes with the step."""

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals

    def begin(self, blocks: Sequence[Block]) -> None:
        pass

    def keep(self, block: Block) -> None:
        pass

    def finish(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._residuals.of(block).clear()  # of other settings

    def undo(self, updated: Sequence[Block]) -> None:
        pass


class AsItIs(_Forgetful):
    """Sends gradients in float32."""

    def pack(self, block: Block, piece: GradientPiece) -> torch.Tensor:
        return piece.flat

    def unpack(self, piece: GradientPiece) -> None:
        pass


class Keeper(Protocol):
    """Says what becomes of what compression leaves out."""

    def begin(self, blocks: Sequence[Block]) -> None: ...

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        """Give what was left out of a parameter's gradients before, (numel,), to be written; None if that is lost."""

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        """Give the seed of the random numbers of a chunk of a parameter's elements; None if it is rounded to nearest."""

    def keep(self, block: Block) -> None: ...

    def finish(self, blocks: Sequence[Block]) -> None: ...

    def undo(self, updated: Sequence[Block]) -> None: ...


class AtRandom(_Forgetful):
    """Loses what is left out; rounding at random sees to it that its mean is 0."""

    def __init__(self, residuals: Residuals, seed: int, step: int) -> None:
        super().__init__(residuals)
        self._stream = f"{seed}/{step}"

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        return None

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        return zlib.crc32(f"{self._stream}/{block.key}/{index}/{chunk}".encode())


class Feedback:
    """Keeps it on the device for the next step.

    Invariant: until a block's update is done for good there is a copy of the residuals that it had before the step.

    Args:
        residuals: makes and finds them.
        spares: for how many blocks room is booked for such copies; None: for all.
    """

    def __init__(self, residuals: Residuals, spares: int | None) -> None:
        self._residuals, self._spares = residuals, spares
        self._before: dict[Block, dict[int, torch.Tensor | None]] = {}  # None where there was none
        self._booked_bytes = 0

    def begin(self, blocks: Sequence[Block]) -> None:
        # The first residuals of a block need no copy: before them there was nothing
        sizes = [sum(residual.nbytes for residual in self._residuals.of(block).values()) for block in blocks]
        nbytes = sum(nlargest(len(sizes) if self._spares is None else self._spares, sizes))
        self._residuals.device.ledger.book(CATEGORY, "residuals before", nbytes)
        self._booked_bytes = nbytes

    def residual(self, block: Block, index: int, numel: int) -> torch.Tensor | None:
        before, held = self._before.setdefault(block, {}), self._residuals.of(block)
        if index not in held:
            before[index] = None
            return self._residuals.make(block, index, numel)
        before[index] = self._residuals.device.empty(numel).copy_(held[index])
        return held[index]

    def seed(self, block: Block, index: int, chunk: int) -> int | None:
        return None

    def keep(self, block: Block) -> None:
        if self._spares is not None:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        for copy in self._before.pop(block, {}).values():
            if copy is not None:
                self._residuals.device.recycle(copy)

    def finish(self, blocks: Sequence[Block]) -> None:
        for block in [*self._before]:
            self._forget(block)
        self._residuals.device.ledger.release(CATEGORY, "residuals before", self._booked_bytes)
        self._booked_bytes = 0

    def undo(self, updated: Sequence[Block]) -> None:
        for block, before in self._before.items():
            if block not in updated:
                self._residuals.put(block, before)
        self.finish(updated)


class Packed:
    """Sends gradients in fewer bits.

    Args:
        compress: how.
        keeper: what becomes of the rest.
        residuals: whose device packs.
    """

    def __init__(self, compress: Compress, keeper: Keeper, residuals: Residuals) -> None:
        self._name, self._format, self._keeper = compress.format, FORMATS[compress.format], keeper
        self._ledger, self._booked_bytes = residuals.device.ledger, 0

    def begin(self, blocks: Sequence[Block]) -> None:
        numels = [math.prod(place.size) for block in blocks for place in block.trained.layout.pieces]
        nbytes = PACKING_BYTES * min(CHUNK, max(numels, default=0) + GROUP)
        self._ledger.book(CATEGORY, "packing", nbytes)
        self._booked_bytes = nbytes
        self._keeper.begin(blocks)

    @torch.no_grad()
    def pack(self, block: Block, piece: GradientPiece) -> torch.Tensor:
        for spot in self._spots(piece):
            residual = self._keeper.residual(block, spot.index, spot.values.numel())
            scales = []
            for number, (start, stop) in enumerate(pairwise(_edges(spot.values.numel()))):
                values = spot.values[start:stop]
                if residual is not None:
                    values = values + residual[start:stop]
                codes, chunk_scales = self._format.encode(values, self._keeper.seed(block, spot.index, number))
                scales.append(chunk_scales)
                if residual is not None:
                    decoded = self._format.decode(codes, chunk_scales, stop - start)
                    torch.sub(values, decoded, out=residual[start:stop])
                first = self._format.code_bytes(start)
                spot.codes[first : first + codes.numel()] = codes
            spot.scales[:] = torch.cat(scales)
        return piece.flat[: _packed_numel(piece, self._name)]

    @torch.no_grad()
    def unpack(self, piece: GradientPiece) -> None:
        for spot in reversed([*self._spots(piece)]):
            numel, scales = spot.values.numel(), spot.scales.clone()
            for start, stop in reversed([*pairwise(_edges(numel))]):
                first, last = self._format.code_bytes(start), self._format.code_bytes(stop)
                codes, of_chunk = spot.codes[first:last], scales[start // GROUP : -(-stop // GROUP)]
                spot.values[start:stop] = self._format.decode(codes, of_chunk, stop - start)

    def keep(self, block: Block) -> None:
        self._keeper.keep(block)

    def finish(self, blocks: Sequence[Block]) -> None:
        self._keeper.finish(blocks)
        self._ledger.release(CATEGORY, "packing", self._booked_bytes)
        self._booked_bytes = 0

    def undo(self, updated: Sequence[Block]) -> None:
        self._keeper.undo(updated)
        self._ledger.release(CATEGORY, "packing", self._booked_bytes)
        self._booked_bytes = 0

    def _spots(self, piece: GradientPiece) -> Iterator[_Spot]:
        """Go through the parameters that have a gradient: where it is, and where it is packed."""
        start, trained = 0, piece.trained
        for index, place, has in zip(trained.indices, trained.layout.pieces, piece.covers, strict=True):
            numel = math.prod(place.size)
            stop = start + packed_numel(self._name, numel)
            if has and numel:
                packed = piece.flat[start:stop]
                scales = -(-numel // GROUP) if self._name != "bf16" else 0
                codes = packed[: len(packed) - scales].view(torch.uint8)
                yield _Spot(index, piece.flat[place.offset :][:numel], codes, packed[len(packed) - scales :])
            start = stop


class _Spot(NamedTuple):
    index: int  # of the parameter in its block
    values: torch.Tensor  # (numel,), as they lie in memory
    codes: torch.Tensor  # bytes
    scales: torch.Tensor  # (groups,)


def _packed_numel(piece: GradientPiece, name: str) -> int:
    return sum(packed_numel(name, math.prod(place.size)) for place in piece.trained.layout.pieces)


def _edges(numel: int) -> list[int]:
    return [*range(0, numel, CHUNK), numel]
