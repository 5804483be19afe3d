"""What a look inside gives: plain values and small tensors on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

BINS = 48  # of a histogram


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """How the numbers of an activation are spread. Figures are of the finite ones.

    Attributes:
        count: how many numbers there are, finite or not.
        mean, deviation, rms: NaN if none is finite.
        zeros: share of all numbers that are exactly 0.
        broken: numbers that are not finite.
        counts: in each of `BINS` bins of equal width from `low` to `high`, which is four deviations to both sides of the
            mean, or as far as there are numbers; empty if none is finite.
        outside: finite numbers beyond `low` and `high`.
    """

    count: int
    mean: float
    deviation: float
    rms: float
    zeros: float
    broken: int
    counts: tuple[int, ...]
    low: float
    high: float
    outside: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerObservation:
    """One layer, run by one micro-batch.

    Attributes:
        key, name: of the layer.
        micro_batch: its number among those of a step, from 0.
        visit: the number of the visit; a layer that runs twice has two.
        entered, left: of the hidden state, the first floating-point tensor that comes out and the first of its shape that went
            in; None where the layer has none.
        added: norm of the difference between the two over the norm of what entered; None without both.
        cosine: mean over tokens of the cosine between the two.
        added_at: the same as `added`, for each of the first positions of the row, (positions,).
        attention: one map for every attention that the layer computed, (heads, queries, keys), float32: rows are positions that
            look, columns those that are looked at.
        why_no_attention: why there is no map, if some were asked for.
        why_not_at: why there is no `added_at`.
    """

    key: str
    name: str
    micro_batch: int
    visit: int
    entered: ActivationStats | None
    left: ActivationStats | None
    added: float | None
    cosine: float | None
    added_at: torch.Tensor | None
    attention: tuple[torch.Tensor, ...] = ()
    why_no_attention: str = ""
    why_not_at: str = ""

    @property
    def nbytes(self) -> int:
        """Host bytes of the tensors and the histograms."""
        tensors = [*self.attention, *([] if self.added_at is None else [self.added_at])]
        spreads = [one for one in (self.entered, self.left) if one is not None]
        return sum(tensor.nbytes for tensor in tensors) + 8 * sum(len(one.counts) for one in spreads)


@dataclass(frozen=True, slots=True, eq=False)
class LensResult:
    """What the model says if it ends after so many layers: those above are left out, and its own head reads the stream.

    Attributes:
        layers: how many run.
        key, name: of the last of them.
        micro_batch: its number among those of a step, from 0.
        loss: of the micro-batch; None if this depth could not be run.
        tokens: of the row, the most likely ones at each of the first positions, (positions, top), the likeliest first.
        chances: their probabilities, (positions, top), float32.
        why_not: why this depth has no loss, or no tokens.
    """

    layers: int
    key: str
    name: str
    micro_batch: int
    loss: float | None = None
    tokens: torch.Tensor | None = None
    chances: torch.Tensor | None = None
    why_not: str = ""

    @property
    def nbytes(self) -> int:
        """Host bytes of the tensors."""
        return sum(one.nbytes for one in (self.tokens, self.chances) if one is not None)


@dataclass(frozen=True, slots=True)
class Continuation:
    """How the model goes on if it ends after so many layers: always with the likeliest token.

    Attributes:
        layers: how many run.
        key, name: of the last of them.
        tokens: those that were written, in order.
        why_not: why there are none.
    """

    layers: int
    key: str
    name: str
    tokens: tuple[int, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """What `Relay.look` has seen.

    Attributes:
        step, branch: finished steps at that moment, and the branch.
        keys: of the layers that were looked at, in order.
        micro_batches, row: those that were looked at, and which row of each.
        tokens: by micro-batch, the tokens of the row, (positions,), if the batch holds any.
        passings: a layer after the other, and in each its micro-batches.
        depths: what the head makes of the stream after each of the layers; empty if that was not asked for.
        prompt: how many tokens of the row were given before what was written.
        written: of the first of the micro-batches, how the row goes on at each depth.
        passes: how many times micro-batches went through the model.
        seconds: how long all of it took.
    """

    step: int
    branch: str
    keys: tuple[str, ...]
    micro_batches: tuple[int, ...]
    row: int
    tokens: Mapping[int, torch.Tensor]
    passings: tuple[LayerObservation, ...]
    depths: tuple[LensResult, ...]
    prompt: int
    written: tuple[Continuation, ...]
    passes: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Host bytes that are kept of it."""
        held = sum(one.nbytes for one in (*self.passings, *self.depths, *self.tokens.values()))
        return held + 8 * sum(len(one.tokens) for one in self.written)
