"""How much each layer changes its hidden state, gathered as layers run: no pass of its own, nothing kept, nothing waited for.

The *influence* of a layer is 1 minus the mean cosine between the hidden state that a token enters with and the one that it
leaves with: 0 for a layer that passes everything on. It is the Block Influence of ShortGPT (Men et al., arXiv 2403.03853),
there of all tokens, here of an evenly spaced sample of the first calls, until enough tokens have been looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from l2l_core._torch import is_functorch_wrapped_tensor
from l2l_core.eps.blocks import Unit
from l2l_core.step.micro_batch.fast_pytree import flatten

_MAX_SAMPLED = 256  # tokens of a call, at most
_MIN_TOKENS = 128  # of a layer: after so many no further call is looked at


class Influence:
    """Adds up over the calls of a step.

    Invariant: it holds one number per layer on the device, and no tensor of the model.
    """

    def __init__(self) -> None:
        self._sums: dict[Unit, torch.Tensor] = {}  # of cosines, each call weighted with its tokens; () float64
        self._tokens: dict[Unit, int] = {}

    def record(self, unit: Unit, inputs: Sequence[torch.Tensor], outputs: Any) -> None:
        """Note that a layer made `outputs` of `inputs`: any tree, any shapes; the last dimension is the features'."""
        if self._tokens.get(unit, 0) < _MIN_TOKENS:
            self._add(unit, inputs, outputs)

    def _add(self, unit: Unit, inputs: Sequence[torch.Tensor], outputs: Any) -> None:
        pair = hidden_states(inputs, flatten(outputs)[0])
        if pair is None:
            return
        came, left = pair
        tokens, features = came.numel() // came.shape[-1], came.shape[-1]
        every = _spacing(tokens, came.shape)
        cosines = cosine_similarity(*(t.detach().reshape(-1, features)[::every].float() for t in (came, left)), dim=-1)
        sum_ = cosines.mean(dtype=torch.float64) * tokens
        self._sums[unit] = self._sums[unit] + sum_ if unit in self._sums else sum_
        self._tokens[unit] = self._tokens.get(unit, 0) + tokens

    def write_stats(self) -> None:
        """The step is over: write it into the layers' statistics. Reads the device once."""
        if self._sums:
            for unit, sum_ in zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True):
                unit.stats["influence"] = max(0.0, 1 - sum_ / self._tokens[unit])  # below 0 by rounding alone


def hidden_states(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Find the first floating-point tensor that comes out, and the first of its shape that went in."""
    left = next((t for t in outputs if _is_floating(t)), None)
    came = next((t for t in inputs if left is not None and _is_floating(t) and t.shape == left.shape), None)
    return None if left is None or came is None or not left.ndim or not left.numel() else (came, left)


def _is_floating(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or is_functorch_wrapped_tensor(leaf):
        return False  # what vmap has made is no tensor any more when that is over
    return leaf.is_floating_point() and leaf.layout is torch.strided


def _spacing(tokens: int, shape: Sequence[int]) -> int:
    """Count tokens from one looked at to the next: not in step with sequences, whose first token is special."""
    every, row = -(-tokens // _MAX_SAMPLED), math.prod(shape[1:-1])
    while every > 1 and math.gcd(every, row) > 1:
        every += 1
    return every
