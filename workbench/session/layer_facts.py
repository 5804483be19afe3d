"""What a layer is made of and how its weights are spread, as plain values. Looking changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from l2l_core import Relay

BINS = 48
CHUNK = 1 << 20  # weights that are looked at together, so that a large layer needs no second copy of itself


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A parameter of a layer: its name within the layer, shape, type without "torch.", and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer between two steps.

    Attributes:
        key: permanent identity.
        module: name of its class.
        parts: its parameters, in order.
        counts: finite weights in each of `BINS` bins of equal width from `low` to `high`; empty if there is none.
        mean, deviation: of the finite weights.
        broken: weights that are not finite.
        step, branch: finished steps at that moment, and the branch.
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
    """Look at a layer of a relay that makes no step meanwhile; None if there is no such layer (any more)."""
    unit = next((unit for unit in relay.stack if unit.key == key), None)
    if unit is None:
        return None
    names = [name.removeprefix(f"{unit.name}.") for block in unit.blocks for name in block.names]
    parts = tuple(
        ParameterFacts(name, tuple(param.shape), str(param.dtype).removeprefix("torch."), trained)
        for name, param, trained in zip(names, unit.params, unit.trained, strict=True)
    )
    spread = _weight_histogram(unit.params)
    return LayerFacts(key, type(unit.module).__name__, parts, *spread, relay.steps, relay.branch)


def _weight_histogram(params: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], float, float, float, float, int]:
    """Counts, both ends, mean, deviation, and how many are not finite."""
    low, high, total, count = math.inf, -math.inf, 0.0, 0
    for chunk in _finite_values(params):
        low, high = min(low, float(chunk.min())), max(high, float(chunk.max()))
        total, count = total + float(chunk.sum()), count + len(chunk)
    broken = sum(param.numel() for param in params) - count
    if not count:
        return (), 0.0, 0.0, math.nan, math.nan, broken
    mean, squares = total / count, 0.0
    if low == high:  # as the weights of a new norm: a bin of their own, in the middle
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    counts = torch.zeros(BINS, dtype=torch.float64)
    for chunk in _finite_values(params):
        counts += torch.histc(chunk, BINS, low, high)
        squares += float((chunk - mean).square().sum())
    return tuple(map(int, counts.tolist())), low, high, mean, math.sqrt(squares / count), broken


def _finite_values(params: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for param in params:
        for chunk in param.detach().flatten().split(CHUNK):
            exact = chunk.to("cpu", torch.float64)  # figures over millions of weights keep their digits
            finite = exact[exact.isfinite()]
            if len(finite):
                yield finite
