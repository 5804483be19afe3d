"""What the demonstration is told, and what it has measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from l2l_core import Trace

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Says what is trained, on what, and how. Widths, windows and learning rate are tuned to learn fast in few steps.

    What lessons and benchmarks start from; the demonstration's own are `FULL` and `QUICK`.
    """

    layers: int = 24
    width: int = 64
    heads: int = 4
    context: int = 48  # bytes in a window
    rows: int = 16  # windows in a batch
    micro_batches: int = 4
    steps: int = 220
    compared: int = 5  # steps that run in core as well
    judged_every: int = 20  # steps between two looks at held-out text
    judged_batches: int = 8
    judged_rows: int = 16  # windows in each of them
    budget_bytes: int = 4_500_000
    learning_rate: float = 3e-3
    warm_up: int = 20  # steps until the learning rate is reached
    target: float = 0.85  # of the entropy of single bytes: what the held-out loss must fall to
    close: float = 1e-3  # relative difference of losses allowed where it is not the CPU that computes
    seed: int = 0


# A step costs time by the micro-batch: two in a step, and more steps, learn more in a minute than four in fewer steps.
FULL = Settings(rows=8, micro_batches=2, steps=135, warm_up=30, judged_every=45)
QUICK = Settings(layers=6, width=32, steps=30, compared=3, judged_every=10, judged_batches=2, budget_bytes=2_500_000)


@dataclass(frozen=True)
class DemoStep:
    """Holds what one training step by relay gave."""

    step: int  # from 1
    loss: float
    held_out: float | None  # loss on held-out text after the step, if it was looked at
    learning_rate: float
    seconds: float


@dataclass(frozen=True)
class StepComparison:
    """Holds what one step gave by relay and in core."""

    step: int
    relay_loss: float
    in_core_loss: float
    unequal_weights: int  # how many differ in any bit after the step
    max_abs_diff: float  # of any weight
    relay_s: float
    in_core_s: float


@dataclass(frozen=True)
class DemoRun:
    """Holds what was measured."""

    settings: Settings
    device: str
    exact: bool  # whether equal means bitwise: so on the CPU
    budget_bytes: int | None
    num_params: int
    entropy: float  # of single bytes of the held-out text, nats
    steps: tuple[DemoStep, ...]
    compared: tuple[StepComparison, ...]
    relay_device_bytes: int  # peaks
    in_core_device_bytes: int
    relay_host_bytes: int
    last_trace: Trace

    @property
    def equal(self) -> bool:
        """Whether relay and in core were equal in all steps compared."""
        return all(map(self.is_equal, self.compared))

    def is_equal(self, one: StepComparison) -> bool:
        """Tell whether one step was equal; where arithmetic is not this CPU's, whether its losses were close."""
        if self.exact:
            return one.relay_loss == one.in_core_loss and one.unequal_weights == 0
        return math.isclose(one.relay_loss, one.in_core_loss, rel_tol=self.settings.close)

    @property
    def held_out(self) -> float:
        """Loss on held-out text at the end."""
        return next(step.held_out for step in reversed(self.steps) if step.held_out is not None)

    @property
    def share_of_entropy(self) -> float:
        """That loss as a share of the entropy of single bytes."""
        return self.held_out / self.entropy

    @property
    def reached_target(self) -> bool:
        """Whether it fell to the target."""
        return self.share_of_entropy <= self.settings.target

    def median_step_s(self, who: str) -> float:
        """Return the median seconds of a compared step, "relay" or "in_core"; the first, a warm-up, counts only if alone."""
        return statistics.median(getattr(one, f"{who}_s") for one in self.compared[1:] or self.compared)
