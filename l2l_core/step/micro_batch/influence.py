"""Influence of layers: how much each layer changes its hidden state, measured while layers run.

The *influence* of a layer is 1 minus the mean cosine between the hidden state of a token before and after the layer: 0 for a
layer that changes nothing. It is the Block Influence of ShortGPT (Men et al., arXiv 2403.03853), which averages over all tokens;
here an evenly spaced sample of the first calls is used, until there are enough tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from l2l_core._torch import is_functorch_wrapped_tensor
from l2l_core.eps.blocks import Unit
from l2l_core.step.micro_batch.fast_pytree import flatten

_MAX_SAMPLED = 256  # tokens of one call
_MIN_TOKENS = 128  # of one layer; later calls are skipped


class Influence:
    """Sums the influence of layers over the calls of a step.

    Invariant: it holds one number per layer on the device, and no tensor of the model.
    """

    def __init__(self) -> None:
        self._sums: dict[Unit, torch.Tensor] = {}  # of cosines times tokens; () float64
        self._tokens: Counter[Unit] = Counter()

    def record(self, unit: Unit, inputs: Sequence[torch.Tensor], outputs: Any) -> None:
        """Add a call of a layer. `outputs` is any tree; the last dimension of tensors is that of features."""
        if self._tokens[unit] >= _MIN_TOKENS or (pair := hidden_states(inputs, flatten(outputs)[0])) is None:
            return
        shape = pair[0].shape
        features, tokens = shape[-1], pair[0].numel() // shape[-1]
        stride = _sample_stride(tokens, shape)
        cosines = cosine_similarity(*(t.detach().reshape(-1, features)[::stride].float() for t in pair), dim=-1)
        sum_ = cosines.mean(dtype=torch.float64) * tokens
        self._sums[unit] = self._sums[unit] + sum_ if unit in self._sums else sum_
        self._tokens[unit] += tokens

    def write_stats(self) -> None:
        """Write the influence into the layers' statistics at the end of the step; waits for the device once."""
        if self._sums:
            for unit, sum_ in zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True):
                unit.stats["influence"] = max(0.0, 1 - sum_ / self._tokens[unit])  # below 0 by rounding alone


def hidden_states(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the first floating-point output, preceded by the first input of its shape; None if there is no such pair."""
    after = next((t for t in outputs if _is_floating(t)), None)
    before = next((t for t in inputs if after is not None and _is_floating(t) and t.shape == after.shape), None)
    return None if after is None or before is None or not after.ndim or not after.numel() else (before, after)


def _is_floating(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or is_functorch_wrapped_tensor(leaf):
        return False  # a tensor made under vmap is invalid after it
    return leaf.is_floating_point() and leaf.layout is torch.strided


def _sample_stride(tokens: int, shape: Sequence[int]) -> int:
    """Return the distance between sampled tokens, coprime to the sequence length, as the first token is special."""
    stride, length = -(-tokens // _MAX_SAMPLED), math.prod(shape[1:-1])
    while stride > 1 and math.gcd(stride, length) > 1:
        stride += 1
    return stride
