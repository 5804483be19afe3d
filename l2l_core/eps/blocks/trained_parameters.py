"""What of a block is trained: a gradient holds the parameters that require one, side by side, and nothing of the others.

Weights travel whole; gradients, their slots and buffers cost what is trained. A step takes note of what that is when it
begins, so a gradient says itself whose it is, whatever somebody does to `requires_grad` meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from l2l_core.eps.blocks.layout import Layout

_MAX_FLAT_NORM = (
    1 << 18
)  # elements: where there are many, sums of squares in float32 are better made parameter by parameter


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """Names the trained parameters of a block.

    Attributes:
        flags: of every parameter of the block, whether it is trained.
        indices: of those that are.
        layout: where the gradient of each of them lies in a flat buffer.
    """

    flags: tuple[bool, ...]
    indices: tuple[int, ...]
    layout: Layout

    @staticmethod
    def of(layout: Layout, flags: Sequence[bool]) -> TrainedParameters:
        """Say what is trained of a block whose parameters lie as `layout` says."""
        indices = tuple(i for i, trained in enumerate(flags) if trained)
        return TrainedParameters(tuple(flags), indices, layout.select(indices))

    @property
    def numel(self) -> int:
        """Elements of a buffer for the gradient, padding included."""
        return self.layout.numel


@dataclass(frozen=True)
class BlockGradient:
    """Holds the gradient of a block, or a part of it.

    Invariant: what is not covered is garbage.

    Attributes:
        flat: the buffer that holds it, (numel,).
        trained: whose gradients they are.
        covers: which of the trained parameters have one.
    """

    flat: torch.Tensor
    trained: TrainedParameters
    covers: tuple[bool, ...]

    def views(self) -> dict[int, torch.Tensor]:
        """Give the gradient by index of the parameter in its block, of those that have one."""
        return {i: view for (i, view), has in zip(self.all_views.items(), self.covers, strict=True) if has}

    @cached_property
    def all_views(self) -> dict[int, torch.Tensor]:
        """Where the gradient of every trained parameter is, or would be, by index in the block."""
        return dict(zip(self.trained.indices, self.trained.layout.views(self.flat), strict=True))

    def __reduce__(self) -> Any:
        return BlockGradient, (self.flat, self.trained, self.covers)  # a copy's views are of the copy

    def tensors(self) -> list[torch.Tensor]:
        """Give what covers the gradient and nothing else: a small buffer in one where no place in it is garbage."""
        is_full = self.trained.layout.used == self.flat.numel() <= _MAX_FLAT_NORM and all(self.covers)
        return [self.flat] if is_full else list(self.views().values())

    def add(self, other: BlockGradient) -> BlockGradient:
        """Add another gradient of the same block, in the buffer of this one."""
        mine, added = self.views(), other.views()
        for place, view in self.all_views.items():
            if place in added:
                # Not added to zero: what is not covered is garbage, and -0.0 + 0.0 is 0.0
                view.add_(added[place]) if place in mine else view.copy_(added[place])
        return BlockGradient(self.flat, self.trained, tuple(i in mine or i in added for i in self.trained.indices))

    def without(self, indices: Sequence[int]) -> BlockGradient:
        """Give the same gradient, in the same buffer, without the parameters of these indices."""
        mine = self.views()
        return BlockGradient(
            self.flat, self.trained, tuple(i in mine and i not in indices for i in self.trained.indices)
        )
