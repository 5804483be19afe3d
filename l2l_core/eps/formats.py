"""Number formats for compressed gradients: bfloat16, and 8- and 4-bit integers with a scale per group.

Plain torch operations, so the results are the same on every device. Non-finite values stay non-finite, at least within their
group, so that checks find them.

Sources: integers with one scale per group, as for optimizer state in Dettmers et al. (arXiv 2110.02861); stochastic rounding,
QSGD (Alistarh et al., arXiv 1610.02132).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from l2l_core.rounding import round_at_random
from l2l_core.schedule_rules import SCALE_GROUP

Encoded = tuple[torch.Tensor, torch.Tensor]  # bytes, and a float32 for each group


class BFloat16Format:
    """Values in bfloat16, without scales.

    Encodes consecutive elements of a parameter, starting at the beginning of a group.
    """

    def encode(self, values: torch.Tensor, seed: int | None) -> Encoded:
        """Encode float32 values, (n,), rounded to nearest, or stochastically with a seed."""
        if seed is not None:  # its bit arithmetic would turn some NaN into 0
            values = torch.where(values.isfinite(), round_at_random(values.clone(), seed), values)
        return values.to(torch.bfloat16).view(torch.uint8), values[:0]

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, numel: int) -> torch.Tensor:
        """Decode the result of `encode` to float32, (numel,)."""
        return codes.view(torch.bfloat16).to(torch.float32)

    def code_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` codes, without scales."""
        return 2 * numel


class IntegerFormat:
    """Signed integers of 8 bits (up to 127) or 4 bits (up to 7), with one scale per group."""

    def __init__(self, bits: int) -> None:
        self._bits, self._largest = bits, 2 ** (bits - 1) - 1

    def encode(self, values: torch.Tensor, seed: int | None) -> Encoded:
        groups = pad(values, (0, -values.numel() % SCALE_GROUP)).view(-1, SCALE_GROUP)
        steps = groups.abs().amax(1, keepdim=True).div_(self._largest)  # (groups, 1); NaN propagates
        # A group of zeros has a step of 0; with an infinity, the step alone turns the whole group into NaN
        ratios = (groups / steps).nan_to_num_(0.0, 0.0, 0.0)
        if seed is None:
            numbers = ratios.round_()
        else:
            generator = torch.Generator(ratios.device).manual_seed(seed)
            numbers = ratios.add_(torch.rand(ratios.shape, generator=generator, device=ratios.device)).floor_()
        numbers.clamp_(-self._largest, self._largest)
        return self._pack(numbers.view(-1)[: values.numel()]), steps.view(-1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, numel: int) -> torch.Tensor:
        numbers = pad(self._unpack(codes)[:numel], (0, -numel % SCALE_GROUP)).view(-1, SCALE_GROUP)
        return numbers.mul_(scales.view(-1, 1)).view(-1)[:numel]

    def code_bytes(self, numel: int) -> int:
        return -(-numel * self._bits // 8)

    def _pack(self, numbers: torch.Tensor) -> torch.Tensor:
        if self._bits == 8:
            return numbers.to(torch.int8).view(torch.uint8)
        halves = pad(numbers + 8, (0, numbers.numel() % 2)).to(torch.uint8)  # from 1 to 15
        return halves[0::2] | (halves[1::2] << 4)

    def _unpack(self, codes: torch.Tensor) -> torch.Tensor:
        if self._bits == 8:
            return codes.view(torch.int8).to(torch.float32)
        return torch.stack((codes & 15, codes >> 4), 1).view(-1).to(torch.float32).sub_(8)


FORMATS: Mapping[str, BFloat16Format | IntegerFormat] = {
    "bf16": BFloat16Format(),
    "int8": IntegerFormat(8),
    "int4": IntegerFormat(4),
}
