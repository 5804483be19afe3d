"""Whether every recompute gives what its forward gave: compared by the sum of each output, in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Sum = (
    complex | torch.Tensor
)  # of all elements; where sums are made in any order, with that of their sizes, (2,) on the GPU


Run = Callable[..., Any]


class Recomputes:
    """Compares sums of outputs: at once where tensors are in host memory; on a GPU when the step is over, in one go.

    Invariant: it holds a few numbers per call, and no tensor of the model.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str, torch.Tensor]] = []  # layer, whether it differed

    def compare(self, layer: str, before: Sequence[Sum], again: Sequence[Sum]) -> None:
        """Compare what a layer has given at first and when it was recomputed.

        Raises:
            RuntimeError: it gave something else.
        """
        if len(before) != len(again):
            raise RuntimeError(differs(layer))
        for old, new in zip(before, again, strict=True):
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                known = torch.isfinite(old[0]) & torch.isfinite(new[0])
                self._open.append((layer, known & ((old[0] - new[0]).abs() > 1e-5 * new[1])))
            elif not (old == new or (old != old and new != new)):  # NaN is found elsewhere
                raise RuntimeError(differs(layer, f"; their sum was {old:.9g} and is {new:.9g}"))

    def settle(self) -> None:
        """The step is over: read what was compared on a GPU. Waits for it once.

        Raises:
            RuntimeError: names the first layer that gave something else.
        """
        if self._open:
            found = torch.stack([other for _, other in self._open]).tolist()
            for (layer, _), is_other in zip(self._open, found, strict=True):
                if is_other:
                    raise RuntimeError(differs(layer))
            self._open.clear()


class Whole:
    """A run that computes all there is, and whose outputs are compared."""

    def around(self, real: Run) -> Run:
        """Wrap the layer's forward."""
        return real

    def made(self, nodes: Iterable[Any]) -> None:
        """Hear of what graph the run has made."""

    def sums(self, outputs: Sequence[torch.Tensor]) -> list[Sum]:
        """Return the sums of what the first run gave out."""
        return sums_of(outputs)

    def compared(self, before: list[Sum], outputs: Sequence[torch.Tensor]) -> tuple[list[Sum], list[Sum]]:
        """Return what tells whether a recompute gave the same: of the first run, which had the sums `before`, and of this one."""
        return before, sums_of(outputs)

    def close(self) -> None:
        """The run is over, and what it gave out is let go."""


WHOLE = Whole()


def sums_of(tensors: Sequence[torch.Tensor]) -> list[Sum]:
    """Return what tensors are compared by."""
    return [_sum(tensor.detach()) for tensor in tensors]


def _sum(tensor: torch.Tensor) -> Sum:
    return _sum_on_gpu(tensor) if tensor.is_cuda else torch.sum(tensor).item()


def _sum_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.sum(tensor, dtype=torch.float64), torch.sum(tensor.abs(), dtype=torch.float64)])


def differs(layer: str, how: str = "") -> str:
    """Say what is wrong with a layer whose recompute gave something else; `how` tells rounding from another value."""
    return (
        f"layer {layer} gave other outputs when it was recomputed{how}: it depends on something besides its arguments, weights "
        "and buffers (an attribute that changes between calls, NumPy's random numbers, a counter). Pass it as an argument of the "
        "layer, or use torch's random numbers"
    )
