"""Effect of an edit on the losses of a few fixed batches, as numbers and as text. `probe.py` measures it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import stdev
from typing import Any, Literal

Verdict = Literal["same", "better", "worse", "unclear"]

PENDING = "measuring…"  # in place of a reason, until the losses after the edit are measured
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ProbeLosses:
    """Losses of the probe's batches at one moment.

    Attributes:
        losses: one per batch.
        seconds: duration of the measurement.
    """

    losses: tuple[float, ...]
    seconds: float

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> ProbeLosses:
        """Restore the value from `dataclasses.asdict` after JSON; non-finite numbers may be text.

        Raises:
            KeyError, TypeError, ValueError: `plain` has another format.
        """
        return cls(tuple(map(float, plain["losses"])), float(plain["seconds"]))

    @property
    def mean(self) -> float:
        """Mean of the losses."""
        return _mean(self.losses)


@dataclass(frozen=True)
class LossChange:
    """Losses of the same batches, in the same order, before and after an edit."""

    before: ProbeLosses
    after: ProbeLosses

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> LossChange:
        """Restore the value from `dataclasses.asdict` after JSON; non-finite numbers may be text.

        Raises:
            KeyError, TypeError, ValueError: `plain` has another format.
        """
        before, after = (ProbeLosses.of_plain(plain[name]) for name in ("before", "after"))
        if not len(before.losses) == len(after.losses) > 0:
            raise ValueError(f"{len(before.losses)} losses before and {len(after.losses)} after an edit")
        return cls(before, after)

    @property
    def is_same(self) -> bool:
        """True if every batch has the same loss, to the bit."""
        return self.before.losses == self.after.losses

    @cached_property
    def change(self) -> float:
        """Mean change of a batch; nan if it does not exist."""
        return _mean(self._changes)

    @cached_property
    def spread(self) -> float | None:
        """Standard deviation of the changes of the batches; None for a single batch, nan if it does not exist."""
        if len(self._changes) < 2:
            return None
        return stdev(self._changes) if all(map(math.isfinite, self._changes)) else math.nan

    @property
    def verdict(self) -> Verdict:
        """Direction of a change larger than the spread; "unclear" for a smaller one, or for a single batch."""
        if self.is_same:
            return "same"
        finite = [all(map(math.isfinite, each.losses)) for each in (self.before, self.after)]
        if finite[0] != finite[1]:
            return "worse" if finite[0] else "better"
        if self.spread is None or not abs(self.change) > self.spread:  # not `<=`, which is False for nan
            return "unclear"
        return "worse" if self.change > 0 else "better"

    @property
    def _changes(self) -> Sequence[float]:
        return [after - before for before, after in zip(self.before.losses, self.after.losses, strict=True)]


def describe_loss_change(change: LossChange) -> str:
    """Format losses and change, such as "2.431 → 2.508, ▲ +0.077 ± 0.012 over 4 batches"."""
    before, after = (f"{each.mean:.4g}" for each in (change.before, change.after))
    return (
        f"{before}, {describe_change(change)}" if change.is_same else f"{before} → {after}, {describe_change(change)}"
    )


def describe_change(change: LossChange) -> str:
    """Format the change and its standard deviation over the batches."""
    if change.is_same:
        return "no change (0 exactly)"
    if not math.isfinite(change.change):
        return f"{VERDICT_MARKS[change.verdict]}not finite"
    spread = (
        "(one batch)" if change.spread is None else f"± {change.spread:.2g} over {len(change.before.losses)} batches"
    )
    sign = "−" if change.change < 0 else "+"
    return f"{VERDICT_MARKS[change.verdict]}{sign}{abs(change.change):.2g} {spread}"


def describe_verdict(change: LossChange | None, why_not: str) -> str:
    """Format the result of the probe, or the reason why there is none."""
    if change is not None:
        return describe_loss_change(change)
    return why_not if why_not == PENDING else ": ".join(filter(None, (NOT_MEASURED, why_not)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # fmean refuses infinities of both signs


VERDICT_MARKS: Mapping[Verdict, str] = {"same": "", "better": "▼ ", "worse": "▲ ", "unclear": ""}
