"""Results of an inspection: plain values and small tensors on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

BINS = 48  # of a histogram


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """Distribution of the numbers of an activation. Figures are of the finite ones.

    Attributes:
        count: all numbers, finite or not.
        mean, deviation, rms: NaN if none is finite.
        zeros: fraction of all numbers that are exactly 0.
        broken: numbers that are not finite.
        counts: in each of `BINS` bins of equal width from `low` to `high`, which are four deviations from the mean, or the
            extremes if these are closer; empty if none is finite.
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
        visit: number of the visit; a layer that runs twice has two.
        entered, left: of the hidden state: the first floating-point output, and the first input of its shape; None without
            one.
        added: norm of their difference over the norm of the input; None without both.
        cosine: mean over tokens of the cosine between the two.
        added_at: `added` for each of the first positions of the row, (positions,).
        attention: one map for every attention of the layer, (heads, queries, keys), float32.
        why_no_attention: reason for a missing map, if maps were requested.
        why_not_at: reason for a missing `added_at`.
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
    """Predictions of the model without the layers after a depth, by its own head."""

    layers: int  # number of layers that run
    key: str  # of the last of them
    name: str
    micro_batch: int  # its number among those of a step, from 0
    loss: float | None = None  # None if the model could not run
    tokens: torch.Tensor | None = None  # the likeliest at each of the first positions of the row, (positions, top)
    chances: torch.Tensor | None = None  # their probabilities, (positions, top), float32
    why_not: str = ""  # reason for a missing loss, or missing tokens

    @property
    def nbytes(self) -> int:
        """Host bytes of the tensors."""
        return sum(one.nbytes for one in (self.tokens, self.chances) if one is not None)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy continuation of a row by the model without the layers after a depth."""

    layers: int  # number of layers that run
    key: str  # of the last of them
    name: str
    tokens: tuple[int, ...] = ()  # the generated ones, in order
    why_not: str = ""  # reason if there are none


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """Result of `Relay.look`.

    Attributes:
        step, branch: number of completed steps, and the branch.
        keys: of the inspected layers, in order.
        micro_batches, row: the inspected micro-batches, and the row of each.
        tokens: by micro-batch, the tokens of the row, (positions,), if the batch has tokens.
        passings: one per layer and micro-batch, by layer.
        depths: predictions after each of the layers; empty without `lens`.
        prompt: number of tokens of the row before the generated ones.
        written: for the first of the micro-batches, the continuation at each depth.
        passes: number of times a micro-batch ran through the model.
        seconds: duration.

    Example:
        >>> inside = relay.look(batch, layers=[2])
        >>> (seen,) = inside.passings
        >>> seen.name, seen.entered.count  # of a micro-batch of 4 rows
        ('2', 64)
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
        """Host bytes of the result."""
        held = sum(one.nbytes for one in (*self.passings, *self.depths, *self.tokens.values()))
        return held + 8 * sum(len(one.tokens) for one in self.written)
