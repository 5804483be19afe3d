"""Learning-rate finder: the loss of a few steps whose rate grows exponentially, after which all is as before.

The range test of Smith (arXiv 1506.01186). The steps are made on a fork of the branch, which is discarded, and their batches
are used again by the run, so that it continues with the same bits as without the finder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch

from l2l_core import NonFiniteError, Relay, StepResult
from l2l_core.batches import Batch
from l2l_core.model import preserve_random_state
from workbench.session.background_work import BackgroundWork
from workbench.session.batches import Batches, copy_batch

LEAST_STEPS = 10
SMOOTHING = 0.9  # of the exponential mean of the losses
DIVERGED = 4.0  # times the lowest smoothed loss; the limit of fastai and Lightning

LR_RULE = (
    "the rate at which the smoothed loss falls fastest per decade, before its lowest point (range test of Smith, arXiv "
    '1506.01186; the rule "steep" of fastai and Lightning)'
)


@dataclass(frozen=True, eq=False)
class LRFinding:
    """Result of the learning-rate finder.

    Attributes:
        rates: learning rate of each step, growing exponentially.
        losses: its loss.
        ended: why there are fewer steps than requested; "" if there are not.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    ended: str = ""

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Pairs of rate and loss."""
        return list(zip(self.rates, self.losses, strict=True))

    @property
    def smoothed(self) -> Sequence[float]:
        """Exponential mean of the losses, corrected for its start."""
        means, mean = [], 0.0
        for i, loss in enumerate(self.losses, start=1):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            means.append(mean / (1 - SMOOTHING**i))
        return means

    @property
    def suggestion(self) -> float | None:
        """Suggested learning rate by `LR_RULE`; None if the loss does not fall."""
        smoothed = numpy.array(self.smoothed)
        if len(smoothed) < 3:
            return None
        slopes = numpy.gradient(smoothed, numpy.log10(self.rates))
        first = len(slopes) // 10  # the mean is of a few noisy losses there
        falling = slopes[first : int(smoothed.argmin()) + 1]
        if not len(falling) or not falling.min() < 0:
            return None
        return float(self.rates[first + int(falling.argmin())])

    def __repr__(self) -> str:
        suggested = "no suggestion" if self.suggestion is None else f"suggestion {self.suggestion:.2g}"
        return f"<{type(self).__name__}: {len(self.rates)} steps, {suggested}>"


F = TypeVar("F", bound=LRFinding)


def check_range(lowest: float, highest: float, steps: int) -> None:
    """Check the range of a learning-rate finder.

    Raises:
        ValueError: the rates are not positive and ascending, or there are too few steps.
    """
    if not 0 < lowest < highest < math.inf:
        raise ValueError(f"lowest={lowest!r}, highest={highest!r}: give two positive rates, the lower one first")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < LEAST_STEPS:
        raise ValueError(f"steps={steps!r}: give at least {LEAST_STEPS} steps, so that there is a curve")


class LRFinder:
    """Finds learning rates of a relay on its next batches.

    Args:
        relay, batches, work: the session's.
        step: makes a step of the relay on a batch.
    """

    def __init__(
        self, relay: Relay, batches: Batches, work: BackgroundWork, step: Callable[[Batch], StepResult]
    ) -> None:
        self._relay, self._batches, self._work, self._step = relay, batches, work, step

    def find(self, lowest: float, highest: float, steps: int, result: type[F]) -> F:
        """Return rates and losses; see `Session.find_lr`.

        Raises:
            ValueError: there are fewer than `LEAST_STEPS` batches, or the relay cannot make a branch.
            WorkCancelled: it was cancelled; the relay is as before.
        """
        with self._work.watch("finding a learning rate", "steps", steps) as advance:
            batches = self._batches.peek(steps)
            if len(batches) < LEAST_STEPS:
                raise ValueError(
                    f"only {len(batches)} batches are left, and the finder needs at least {LEAST_STEPS}: give batches that "
                    "restart, such as a DataLoader or a list"
                )
            rates = numpy.geomspace(lowest, highest, steps)[: len(batches)].tolist()
            with preserve_random_state(), self._rewound():
                losses, ended = self._train(rates, batches, advance)
        ended = ended or ("the batches have ended" if len(batches) < steps else "")
        return result(rates[: len(losses)], losses, ended)

    def _train(
        self, rates: Sequence[float], batches: Sequence[Batch], advance: Callable[[], None]
    ) -> tuple[list[float], str]:
        losses: list[float] = []
        starts = [float(group["lr"]) for group in self._relay.optimizer.param_groups]
        for rate, batch in zip(rates, batches, strict=True):
            for group, start in zip(self._relay.optimizer.param_groups, starts, strict=True):
                _set_rate(group, rate * (start / starts[0] if starts[0] else 1.0))
            try:
                loss = self._step(copy_batch(batch)).loss
            except NonFiniteError:
                return losses, f"loss or gradients are not finite at a rate of {rate:.2g}"
            if not math.isfinite(loss):
                return losses, f"the loss is not finite at a rate of {rate:.2g}"
            losses.append(loss)
            smoothed = LRFinding(rates[: len(losses)], losses).smoothed
            if smoothed[-1] > DIVERGED * min(smoothed) > 0:
                return losses, f"the loss diverged at a rate of {rate:.2g}"
            advance()
        return losses, ""

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        """Make the steps of a block on a fork of the branch, which is then discarded; restore the learning rates."""
        relay, home = self._relay, self._relay.branch
        taken, name = {branch.name for branch in relay.branches}, "learning rates"
        while name in taken:
            name += "'"
        rates = [_copy_rate(group["lr"]) for group in relay.optimizer.param_groups]
        relay.fork(name)
        try:
            yield
        finally:
            relay.switch(home)
            relay.discard(name)
            for group, rate in zip(relay.optimizer.param_groups, rates, strict=True):
                _set_rate(group, rate)


def _copy_rate(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set the rate of a group, in place if it is a tensor, which compiled optimizers keep."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
