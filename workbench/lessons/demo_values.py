"""Settings and results of the demo."""

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
    """Model, data and training of the demo, with widths and a learning rate that learn fast in few steps.

    Lessons and benchmarks start from the defaults; the demo uses `FULL` and `QUICK`.
    """

    layers: int = 24
    width: int = 64
    heads: int = 4
    context: int = 48  # bytes in a window
    rows: int = 16  # windows in a batch
    micro_batches: int = 4
    steps: int = 220
    compared: int = 5  # steps that run in core as well
    judged_every: int = 20  # steps between two evaluations on held-out text
    judged_batches: int = 8
    judged_rows: int = 16  # windows in each evaluation batch
    budget_bytes: int = 4_500_000
    learning_rate: float = 3e-3
    warm_up: int = 20  # steps until the learning rate is reached
    target: float = 0.85  # the held-out loss must fall to this share of the entropy of single bytes
    close: float = 1e-3  # relative difference of losses that is allowed on other devices than the CPU
    seed: int = 0
    tied: bool = True  # embedding and head are one matrix


# Time is proportional to micro-batches: many steps of two learn more in a minute than few steps of four.
FULL = Settings(rows=8, micro_batches=2, steps=135, warm_up=30, judged_every=45)
QUICK = Settings(layers=6, width=32, steps=30, compared=3, judged_every=10, judged_batches=2, budget_bytes=2_500_000)


@dataclass(frozen=True)
class DemoStep:
    """Result of one training step by relay."""

    step: int  # from 1
    loss: float
    held_out: float | None  # loss on held-out text after the step, if it was evaluated
    learning_rate: float
    seconds: float


@dataclass(frozen=True)
class StepComparison:
    """Results of one step by relay and in core."""

    step: int
    relay_loss: float
    in_core_loss: float
    unequal_weights: int  # weights that differ in any bit after the step
    max_abs_diff: float  # of any weight
    relay_s: float
    in_core_s: float


@dataclass(frozen=True)
class DemoRun:
    """All measurements of a run of the demo."""

    settings: Settings
    device: str
    exact: bool  # True on the CPU, where equal means bitwise equal
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
        """True if relay and in core were equal in all steps compared."""
        return all(map(self.is_equal, self.compared))

    def is_equal(self, one: StepComparison) -> bool:
        """Return whether a step was equal to the bit; on other devices than the CPU, close."""
        if self.exact:
            return one.relay_loss == one.in_core_loss and one.unequal_weights == 0
        return math.isclose(one.relay_loss, one.in_core_loss, rel_tol=self.settings.close)

    @property
    def held_out(self) -> float:
        """Loss on held-out text at the end."""
        return next(step.held_out for step in reversed(self.steps) if step.held_out is not None)

    @property
    def share_of_entropy(self) -> float:
        """Held-out loss as a share of the entropy of single bytes."""
        return self.held_out / self.entropy

    @property
    def reached_target(self) -> bool:
        """True if the held-out loss fell to the target."""
        return self.share_of_entropy <= self.settings.target

    def median_step_s(self, side: str) -> float:
        """Return the median seconds of the compared steps of a side, "relay" or "in_core", without the first if possible."""
        return statistics.median(getattr(one, f"{side}_s") for one in self.compared[1:] or self.compared)
