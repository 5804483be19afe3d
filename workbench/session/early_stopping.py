"""Early stopping: the run pauses when a held-out value has not improved for some evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.session.metrics import LOSS, MetricSet
from workbench.session.snapshot_values import HeldOutRow


@dataclass(frozen=True)
class EarlyStopping:
    """Rule by which a run pauses when a held-out value does not improve any more.

    The remaining steps stay, so Run continues; it pauses again after `patience` more evaluations without an improvement.

    Args:
        metric: "loss", or the name of a metric of the evaluation.
        patience: number of evaluations in a row without an improvement after which the run pauses.
        min_change: smallest difference to the best value that counts as an improvement.
        higher_is_better: None: as the metric states (`higher_is_better` of torchmetrics); lower is better for the loss.

    Raises:
        ValueError: `patience` is below 1, or `min_change` is negative.

    Example:
        >>> from workbench import EarlyStopping
        >>> EarlyStopping(metric="accuracy", patience=3, higher_is_better=True).patience
        3
    """

    metric: str = LOSS
    patience: int = 5
    min_change: float = 0.0
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or isinstance(self.patience, bool) or self.patience < 1:
            raise ValueError(f"patience={self.patience!r}: give a positive number of evaluations")
        if not self.min_change >= 0:
            raise ValueError(f"min_change={self.min_change!r}: give 0, or a positive difference")


class StoppingMonitor:
    """The best value so far, and the number of evaluations since.

    Args:
        rule: the rule.
        metrics: metrics of the evaluation.

    Raises:
        ValueError: the rule names no metric of the evaluation, or one without a direction.
    """

    def __init__(self, rule: EarlyStopping, metrics: MetricSet) -> None:
        if rule.metric not in (LOSS, *metrics.names):
            raise ValueError(
                f"EarlyStopping(metric={rule.metric!r}) names no metric of this evaluation: there are "
                f"{', '.join((LOSS, *metrics.names))}"
            )
        higher = metrics.higher_is_better(rule.metric) if rule.higher_is_better is None else rule.higher_is_better
        if higher is None:
            raise ValueError(
                f"the metric {rule.metric!r} does not state whether higher values are better: give "
                f"EarlyStopping(metric={rule.metric!r}, higher_is_better=True), or False"
            )
        self._rule, self._higher = rule, higher
        self._best: HeldOutRow | None = None
        self._waited = 0

    def check(self, row: HeldOutRow) -> str:
        """Add an evaluation; return the reason to pause in words, or ""."""
        value_of: Callable[[HeldOutRow], float] = lambda one: one.values[self._rule.metric]  # noqa: E731
        if (
            self._best is None
            or self._best.branch != row.branch
            or self._is_better(value_of(row), value_of(self._best))
        ):
            self._best, self._waited = row, 0
            return ""
        self._waited += 1
        if self._waited < self._rule.patience:
            return ""
        count, self._waited = self._waited, 0  # a continued run gets as many evaluations
        times = "the last evaluation" if count == 1 else f"{count} evaluations in a row"
        return (
            f"Stopped early: the held-out {self._rule.metric} has not improved in {times}; the best is "
            f"{value_of(self._best):.4g} after step {self._best.step}. Run continues."
        )

    def _is_better(self, value: float, best: float) -> bool:
        if best != best:  # NaN
            return value == value
        return value > best + self._rule.min_change if self._higher else value < best - self._rule.min_change
