"""Metrics of an evaluation: functions of outputs and batch, and metric objects with the interface of torchmetrics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch

from l2l_core.batches import Batch

LOSS = "loss"  # name of the held-out loss among the values of an evaluation

MetricFunction = Callable[[Any, Batch], float]


class MetricObject(Protocol):
    """A metric with the interface of torchmetrics."""

    def update(self, *args: Any) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...


Arguments = Callable[[Any, Batch], tuple[Any, ...]]  # (outputs, batch) -> arguments of `update`
MetricSpec = MetricFunction | MetricObject | tuple[MetricObject, Arguments]


class MetricSet:
    """Metrics that are updated with each batch of an evaluation.

    Metric objects are copied, so their state in the user's hands does not change.

    Args:
        metrics: by name: a function ``f(outputs, batch) -> float``, whose mean over batches is weighted as the loss's; a
            metric object, updated with the outputs and the targets where these are known; or a pair of a metric object and
            a function ``f(outputs, batch)`` that returns the arguments of its `update`.

    Raises:
        TypeError: `metrics` is no mapping, or a metric is none of these.
        ValueError: a metric is named "loss".
    """

    def __init__(self, metrics: Mapping[str, MetricSpec] | None) -> None:
        if metrics is not None and not isinstance(metrics, Mapping):
            raise TypeError(f'metrics is a {type(metrics).__name__}: give names and metrics, as {{"accuracy": f}}')
        if LOSS in (metrics or {}):
            raise ValueError('a metric is named "loss", as the held-out loss is, which is always measured: rename it')
        self._parts = {str(name): _make_part(name, metric) for name, metric in (metrics or {}).items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics, in order."""
        return tuple(self._parts)

    def higher_is_better(self, name: str) -> bool | None:
        """Return whether higher values of a metric are better; None if that is not known."""
        return False if name == LOSS else self._parts[name].higher_is_better

    def reset(self) -> None:
        """Begin an evaluation."""
        for part in self._parts.values():
            part.reset()

    def update(self, outputs: Any, batch: Batch, weight: float) -> None:
        """Add a batch; `weight` is that of its loss."""
        for part in self._parts.values():
            part.update(outputs, batch, weight)

    def values(self) -> dict[str, float]:
        """Return the values over all batches since `reset`, by name."""
        return {name: part.value() for name, part in self._parts.items()}


class _MeanPart:
    """A function, and its weighted mean."""

    higher_is_better: bool | None = None

    def __init__(self, name: str, function: MetricFunction) -> None:
        self._name, self._function = name, function
        self.reset()

    def reset(self) -> None:
        self._total = self._weight = 0.0

    def update(self, outputs: Any, batch: Batch, weight: float) -> None:
        self._total += weight * _as_float(self._name, self._function(outputs, batch))
        self._weight += weight

    def value(self) -> float:
        return self._total / self._weight if self._weight else math.nan


class _ObjectPart:
    """A copy of a metric object."""

    def __init__(self, name: str, metric: Any, arguments: Arguments) -> None:
        self._name, self._metric, self._arguments = name, copy.deepcopy(metric), arguments
        found = getattr(metric, "higher_is_better", None)
        self.higher_is_better = found if isinstance(found, bool) else None

    def reset(self) -> None:
        self._metric.reset()

    def update(self, outputs: Any, batch: Batch, weight: float) -> None:
        self._metric.update(*self._arguments(outputs, batch))

    def value(self) -> float:
        value = _as_float(self._name, self._metric.compute())
        self._metric.reset()
        return value


def _make_part(name: str, metric: Any) -> _MeanPart | _ObjectPart:
    if isinstance(metric, tuple) and len(metric) == 2 and _is_object(metric[0]) and callable(metric[1]):
        return _ObjectPart(name, *metric)
    if isinstance(metric, type):
        raise TypeError(
            f"the metric {name!r} is the class {metric.__name__}: give an object of it, {metric.__name__}(...)"
        )
    if _is_object(metric):
        return _ObjectPart(name, metric, lambda outputs, batch: _find_arguments(name, outputs, batch))
    if not callable(metric):
        raise TypeError(
            f"the metric {name!r} is a {type(metric).__name__}: give a function f(outputs, batch) -> float, or an object with "
            "update, compute and reset, such as those of torchmetrics"
        )
    function: Any = metric
    return _MeanPart(name, function)


def _is_object(metric: Any) -> bool:
    return not isinstance(metric, type) and all(hasattr(metric, name) for name in ("update", "compute", "reset"))


def _find_arguments(name: str, outputs: Any, batch: Batch) -> tuple[Any, ...]:
    """Return predictions and targets for a metric object that was given without a function for them."""
    if isinstance(outputs, torch.Tensor) and isinstance(batch, list | tuple) and len(batch) == 2:
        return outputs, batch[1]
    raise ValueError(
        f"the metric {name!r} needs predictions and targets; where they are is known for one tensor of outputs and a pair "
        f"(inputs, targets) as a batch, and these are {_kind(outputs)} and {_kind(batch)}. Give the metric with a function "
        f'for them: metrics={{{name!r}: (metric, lambda outputs, batch: (outputs.logits, batch["labels"]))}}'
    )


def _kind(value: Any) -> str:
    return (
        f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
    )


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        _refuse_value(name, f"a tensor of the shape {tuple(value.shape)}")
    try:
        return float(value)
    except (TypeError, ValueError):
        _refuse_value(name, f"a {type(value).__name__}")


def _refuse_value(name: str, got: str) -> NoReturn:
    raise ValueError(
        f"the metric {name!r} gave {got}: one number is needed; take a mean, or one metric for each of the values"
    )
