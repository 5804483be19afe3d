"""Numbers in few bits: what `Compress` calls a format, on the device when a gradient leaves and on the host when it has come.

Element by element, or group by group, in plain torch: the same on any device. What is not finite stays so, in the group that it
is in at least, so that whoever looks for it finds it.

Sources: one scale per group and whole numbers, as Dettmers et al. (arXiv 2110.02861) have them for optimizer state; rounding at
random, QSGD (Alistarh et al., arXiv 1610.02132).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn.functional import pad

from l2l_core.rounding import round_at_random
from l2l_core.schedule_rules import SCALE_GROUP

Encoded = tuple[torch.Tensor, torch.Tensor]  # bytes, and a float32 for each group


class Format(Protocol):
    """Says how some elements of a parameter are written; they begin with a group."""

    def encode(self, values: torch.Tensor, seed: int | None) -> Encoded:
        """Write float32 values, (n,), rounded to nearest; or at random, with random numbers from a seed."""

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, numel: int) -> torch.Tensor:
        """Read what `encode` has made of so many values: float32, (numel,)."""

    def code_bytes(self, numel: int) -> int:
        """Count the bytes of so many values, without scales."""


class BFloat16Format:
    """Is bfloat16."""

    def encode(self, values: torch.Tensor, seed: int | None) -> Encoded:
        if seed is not None:  # its arithmetic on bits would carry some NaN over to 0
            values = torch.where(values.isfinite(), round_at_random(values.clone(), seed), values)
        return values.to(torch.bfloat16).view(torch.uint8), values[:0]

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, numel: int) -> torch.Tensor:
        return codes.view(torch.bfloat16).to(torch.float32)

    def code_bytes(self, numel: int) -> int:
        return 2 * numel


class IntegerFormat:
    """Is whole numbers of few bits, each group in steps of its own.

    Args:
        bits: of a number, 8 or 4; the largest is 127 or 7.
    """

    def __init__(self, bits: int) -> None:
        self._bits, self._largest = bits, 2 ** (bits - 1) - 1

    def encode(self, values: torch.Tensor, seed: int | None) -> Encoded:
        groups = pad(values, (0, -values.numel() % SCALE_GROUP)).view(-1, SCALE_GROUP)
        steps = groups.abs().amax(1, keepdim=True).div_(self._largest)  # (groups, 1); of NaN it is NaN
        # A group of zeros has steps of 0. Beside an infinity no number counts: the step alone makes all of them NaN
        ratios = (groups / steps).nan_to_num_(0.0, 0.0, 0.0)
        numbers = _round_stochastically(ratios, seed) if seed is not None else ratios.round_()
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


FORMATS: Mapping[str, Format] = {"bf16": BFloat16Format(), "int8": IntegerFormat(8), "int4": IntegerFormat(4)}


def _round_stochastically(ratios: torch.Tensor, seed: int) -> torch.Tensor:
    """Round to a neighbour with the probability that makes the mean right; whole numbers stay."""
    generator = torch.Generator(ratios.device).manual_seed(seed)
    return ratios.add_(torch.rand(ratios.shape, generator=generator, device=ratios.device)).floor_()
