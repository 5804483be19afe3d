"""Check that each recompute of a layer gives the outputs of its first run, by the sum of each output.

In host memory both sums add in the same order, so they must be equal to the bit. A GPU may add in any order, so there they
may differ by 1e-5 times the sum of absolute values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from l2l_core.devices import NoTorchModes

Checksum = complex | torch.Tensor  # sum of the elements; on a GPU also the sum of their absolute values: (2,)


class RecomputeCheck:
    """Compares checksums: at once in host memory; on a GPU all together at the end of the step.

    Invariant: it holds a few numbers per call, and no tensor of the model.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, torch.Tensor]] = []  # layer, whether it differed

    def compare(self, layer: str, before: Sequence[Checksum], outputs: Sequence[torch.Tensor]) -> None:
        """Compare the outputs of a recompute with the checksums of the first run; raise RuntimeError if they differ."""
        if len(before) != len(outputs):
            raise RuntimeError(difference_message(layer))
        for old, new in zip(before, checksums_of(outputs), strict=True):
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                self._pending.append((layer, _differ_on_gpu(old, new)))
            elif not (old == new or (old != old and new != new)):  # NaN is reported elsewhere
                raise RuntimeError(difference_message(layer, f"; their sum was {old:.9g} and is {new:.9g}"))

    def check_pending(self) -> None:
        """Raise RuntimeError for the first layer that differed on a GPU; waits for the device once, after the step."""
        if self._pending:
            results = torch.stack([differs for _, differs in self._pending]).tolist()
            for (layer, _), differs in zip(self._pending, results, strict=True):
                if differs:
                    raise RuntimeError(difference_message(layer))
            self._pending.clear()


def checksums_of(tensors: Sequence[torch.Tensor]) -> list[Checksum]:
    """Return the checksum of each tensor."""
    return [_checksum(tensor.detach()) for tensor in tensors]


def _checksum(tensor: torch.Tensor) -> Checksum:
    return _checksum_on_gpu(tensor) if tensor.is_cuda else torch.sum(tensor).item()


def _checksum_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    with NoTorchModes():  # under the stash mode, these numbers would be offloaded with the stash
        parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        return torch.stack([torch.sum(parts, dtype=torch.float64), torch.sum(parts.abs(), dtype=torch.float64)])


def _differ_on_gpu(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    with NoTorchModes():
        finite = torch.isfinite(old[0]) & torch.isfinite(new[0])
        return finite & ((old[0] - new[0]).abs() > 1e-5 * new[1])


def difference_message(layer: str, details: str = "") -> str:
    """Return the error message for a recompute with other outputs than the first run."""
    return (
        f"layer {layer} gave other outputs when it was recomputed{details}: it depends on something besides its arguments, "
        "weights and buffers (an attribute that changes between calls, NumPy's random numbers, a counter). Pass it as an "
        "argument of the layer, or use torch's global random numbers, not a separate generator"
    )
