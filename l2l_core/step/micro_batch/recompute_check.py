"""Compares every recompute of a layer with its first run, by the sum of each output.

In host memory both sums add in the same order, so they must be equal to the bit. A GPU may add in any order, so there they
may differ by 1e-5 of the sum of the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Checksum = complex | torch.Tensor  # of all elements; on a GPU, with the sum of their sizes: (2,)


class RecomputeCheck:
    """Compares sums of outputs: at once where tensors are in host memory; on a GPU when the step is over, in one go.

    Invariant: it holds a few numbers per call, and no tensor of the model.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, torch.Tensor]] = []  # layer, whether it differed

    def compare(self, layer: str, before: Sequence[Checksum], outputs: Sequence[torch.Tensor]) -> None:
        """Compare the outputs of a recompute with the sums of the first run's.

        Raises:
            RuntimeError: they differ in number or in a sum.
        """
        if len(before) != len(outputs):
            raise RuntimeError(difference_message(layer))
        for old, new in zip(before, checksums_of(outputs), strict=True):
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                known = torch.isfinite(old[0]) & torch.isfinite(new[0])
                self._pending.append((layer, known & ((old[0] - new[0]).abs() > 1e-5 * new[1])))
            elif not (old == new or (old != old and new != new)):  # NaN is found elsewhere
                raise RuntimeError(difference_message(layer, f"; their sum was {old:.9g} and is {new:.9g}"))

    def check_pending(self) -> None:
        """Read, when the step is over, the results of comparisons on a GPU. Waits for it once.

        Raises:
            RuntimeError: a recompute differed; names the first such layer.
        """
        if self._pending:
            found = torch.stack([other for _, other in self._pending]).tolist()
            for (layer, _), is_other in zip(self._pending, found, strict=True):
                if is_other:
                    raise RuntimeError(difference_message(layer))
            self._pending.clear()


def checksums_of(tensors: Sequence[torch.Tensor]) -> list[Checksum]:
    """Return the sum of each tensor, by which a recompute is compared."""
    return [_checksum(tensor.detach()) for tensor in tensors]


def _checksum(tensor: torch.Tensor) -> Checksum:
    return _checksum_on_gpu(tensor) if tensor.is_cuda else torch.sum(tensor).item()


def _checksum_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.sum(tensor, dtype=torch.float64), torch.sum(tensor.abs(), dtype=torch.float64)])


def difference_message(layer: str, how: str = "") -> str:
    """Say what is wrong with a layer whose recompute gave something else; `how` tells rounding from another value."""
    return (
        f"layer {layer} gave other outputs when it was recomputed{how}: it depends on something besides its arguments, weights "
        "and buffers (an attribute that changes between calls, NumPy's random numbers, a counter). Pass it as an argument of the "
        "layer, or use torch's random numbers"
    )
