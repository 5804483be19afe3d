"""Shapes and weight histogram of a layer, as plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from l2l_core import Relay

BINS = 48
CHUNK = 1 << 20  # weights that are converted at a time, to avoid a copy of a large layer


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A parameter of a layer: its name in the layer, shape, dtype without "torch.", and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Parameters and weight histogram of a layer between two steps.

    Attributes:
        key: permanent identity.
        module: name of its class.
        parameters: its parameters, in order.
        counts: finite weights in each of `BINS` bins of equal width from `low` to `high`; empty if there are none.
        mean, deviation: mean and standard deviation of the finite weights.
        non_finite: number of weights that are not finite.
        step, branch: number of finished steps, and the active branch.
    """

    key: str
    module: str
    parameters: tuple[ParameterFacts, ...]
    counts: tuple[int, ...]
    low: float
    high: float
    mean: float
    deviation: float
    non_finite: int
    step: int
    branch: str


def read_layer_facts(relay: Relay, key: str) -> LayerFacts | None:
    """Read a layer of a relay between two steps; return None if the layer does not exist."""
    unit = next((unit for unit in relay.stack if unit.key == key), None)
    if unit is None:
        return None
    names = [name.removeprefix(f"{unit.name}.") for block in unit.blocks for name in block.names]
    parameters = tuple(
        ParameterFacts(name, tuple(param.shape), str(param.dtype).removeprefix("torch."), trained)
        for name, param, trained in zip(names, unit.params, unit.trained, strict=True)
    )
    histogram = _weight_histogram(unit.params)
    return LayerFacts(key, type(unit.module).__name__, parameters, *histogram, relay.steps, relay.branch)


def _weight_histogram(params: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], float, float, float, float, int]:
    """Return counts, low, high, mean, deviation, and the number of non-finite weights."""
    low, high, total, count = math.inf, -math.inf, 0.0, 0
    for chunk in _finite_values(params):
        low, high = min(low, float(chunk.min())), max(high, float(chunk.max()))
        total, count = total + float(chunk.sum()), count + len(chunk)
    non_finite = sum(param.numel() for param in params) - count
    if not count:
        return (), 0.0, 0.0, math.nan, math.nan, non_finite
    mean, squares = total / count, 0.0
    if low == high:  # such as the weights of a new norm: widen the range, so that they fill the middle bin
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    counts = torch.zeros(BINS, dtype=torch.float64)
    for chunk in _finite_values(params):
        counts += torch.histc(chunk, BINS, low, high)
        squares += float((chunk - mean).square().sum())
    return tuple(map(int, counts.tolist())), low, high, mean, math.sqrt(squares / count), non_finite


def _finite_values(params: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for param in params:
        for chunk in param.detach().flatten().split(CHUNK):
            exact = chunk.to("cpu", torch.float64)  # float64, for sums over millions of weights
            finite = exact[exact.isfinite()]
            if len(finite):
                yield finite
