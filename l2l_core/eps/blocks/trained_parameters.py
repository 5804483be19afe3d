"""Trained parameters of a block, and gradients that contain only these.

Weights travel whole; gradients and their buffers contain only trained parameters. A step fixes these at its beginning, so a later
change of `requires_grad` does not affect its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from l2l_core.eps.blocks.layout import Layout

_MAX_FLAT_NORM = 1 << 18  # elements; in larger buffers, sums of squares in float32 are more accurate by parameter


@dataclass(frozen=True, slots=True)
class TrainedParameters:
    """The trained parameters of a block.

    Attributes:
        flags: for every parameter of the block, True if it is trained.
        indices: of the trained parameters.
        layout: places of their gradients in a flat buffer.
    """

    flags: tuple[bool, ...]
    indices: tuple[int, ...]
    layout: Layout

    @staticmethod
    def of(layout: Layout, flags: Sequence[bool]) -> TrainedParameters:
        """Return the trained parameters of a block with this layout."""
        indices = tuple(i for i, trained in enumerate(flags) if trained)
        return TrainedParameters(tuple(flags), indices, layout.select(indices))

    @property
    def numel(self) -> int:
        """Elements of a gradient buffer, padding included."""
        return self.layout.numel


@dataclass(frozen=True)
class BlockGradient:
    """Gradient of a block, or a part of it.

    Invariant: elements that are not covered are garbage.

    Attributes:
        flat: buffer of the gradient, (numel,).
        trained: parameters with a place in the buffer.
        covers: for each of these, True if the gradient is present.
    """

    flat: torch.Tensor
    trained: TrainedParameters
    covers: tuple[bool, ...]

    def views(self) -> dict[int, torch.Tensor]:
        """Return the gradients that are present, by index of the parameter in the block."""
        return {i: view for (i, view), has in zip(self.all_views.items(), self.covers, strict=True) if has}

    @cached_property
    def all_views(self) -> dict[int, torch.Tensor]:
        """The place of every trained parameter's gradient, present or not, by index in the block."""
        return dict(zip(self.trained.indices, self.trained.layout.views(self.flat), strict=True))

    def __reduce__(self) -> Any:
        return BlockGradient, (self.flat, self.trained, self.covers)  # without the cached views of this buffer

    def tensors(self) -> list[torch.Tensor]:
        """Return the gradient without garbage: a small full buffer in one tensor, others by parameter."""
        is_full = self.trained.layout.used == self.flat.numel() <= _MAX_FLAT_NORM and all(self.covers)
        return [self.flat] if is_full else list(self.views().values())

    def add(self, other: BlockGradient) -> BlockGradient:
        """Add another gradient of the same block in place; return the sum."""
        mine, added = self.views(), other.views()
        for place, view in self.all_views.items():
            if place in added:
                # A copy, not an addition to zero: -0.0 + 0.0 is 0.0
                view.add_(added[place]) if place in mine else view.copy_(added[place])
        return BlockGradient(self.flat, self.trained, tuple(i in mine or i in added for i in self.trained.indices))

    def without(self, indices: Sequence[int]) -> BlockGradient:
        """Return the gradient without the parameters of these indices, in the same buffer."""
        mine = self.views()
        return BlockGradient(
            self.flat, self.trained, tuple(i in mine and i not in indices for i in self.trained.indices)
        )
