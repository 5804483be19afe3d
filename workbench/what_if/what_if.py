"""What a step would be with other settings: a question, and its answer from the schedule in numbers (`simulate`).

Costs are those of a measured step, scaled where the question asks for what was not measured (`rescale.py`); where no step has
been measured yet, see `guess.py`. Nothing here trains, waits, or shows anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from l2l_core import Profile, RelayConfig, Trace, simulate
from l2l_core.forecast import COPY_LANES
from l2l_core.trace import Bound, format_bytes
from workbench.pictures import format_seconds
from workbench.readings import Columns, TimelineSummary, timeline_summary
from workbench.session import Snapshot
from workbench.what_if.base import Base, Target
from workbench.what_if.rescale import formulas, rescale

Stash = Literal["device", "host"]
Precision = Literal["fp32", "bf16"]

_DEEPEST, _MOST = 100_000, 4096


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of a step that may never have run.

    Attributes:
        depth: layers.
        width: of the model, as a multiple of the measured one.
        micro_batches: per step.
        same_batch: whether more micro-batches share the rows of the measured batch, as in a relay whose setting is changed;
            otherwise micro-batches keep their size and the batch grows.
        ahead: layers loaded ahead of the one that computes.
        stash, precision: as in `RelayConfig`.
        h2d_bytes_per_s, d2h_bytes_per_s: of the link; None: no limit but that of the machine that was measured.
        memory_bytes: of the device, None without a limit.

    Raises:
        ValueError: a value out of range; says which would be valid.
    """

    depth: int
    width: float = 1.0
    micro_batches: int = 1
    same_batch: bool = True
    ahead: int = 1
    stash: Stash = "device"
    precision: Precision = "fp32"
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, most in (("depth", _DEEPEST), ("micro_batches", _MOST)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: must be an integer from 1 to {most:,}")
        if not 0 < self.width < math.inf:
            raise ValueError(f"width={self.width!r}: must be a positive factor, as 2 for twice the measured width")
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be positive, or None for no limit")
        RelayConfig(micro_batches=self.micro_batches, ahead=self.ahead, stash=self.stash, precision=self.precision)

    @staticmethod
    def of(step: Trace | Profile | Base) -> Question:
        """The settings with which a step was measured."""
        base = Base.of(step)
        return Question(depth=base.depth, **_known(base.profile.settings))

    @staticmethod
    def next_of(now: Snapshot) -> Question:
        """The settings of a session's next step."""
        config = {name: getattr(now.config, name) for name in ("micro_batches", "ahead", "stash", "precision")}
        return Question(depth=max(1, len(now.layers)), **_known({**now.figures, **config}))


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(Question)} - {"depth", "width", "same_batch"}
    return {name: settings[name] for name in names & {*settings}}


@dataclass(frozen=True, eq=False)
class Answer:
    """A step that was simulated, or measured and put into the same form.

    Attributes:
        question: its settings.
        trace: the step.
        basis: where its costs come from, in words.
        by_formula: what of it is by formula, in words.
        simulated: False for a measured step.
        guessed: True if no step was measured at all.
        per_layer: how many layers of the stack one layer of the trace stands for, at most.
    """

    question: Question
    trace: Trace
    basis: str
    by_formula: tuple[str, ...] = ()
    simulated: bool = True
    guessed: bool = False
    per_layer: int = 1

    @property
    def columns(self) -> Columns:
        """Of the trace."""
        return Columns.of(self.trace)

    @cached_property
    def summary(self) -> TimelineSummary:
        """Busy and exposed seconds."""
        return timeline_summary(self.columns)

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return self.summary.span_s

    @property
    def overlap(self) -> float:
        """Share in [0, 1] of copy time hidden under compute."""
        return self.summary.overlap

    @cached_property
    def device_bytes(self) -> Mapping[str, int]:
        """At the peak, by category."""
        return _peak(self.trace, "device")

    @cached_property
    def host_bytes(self) -> Mapping[str, int]:
        """At the peak, by category."""
        return _peak(self.trace, "host")

    @property
    def peak_device_bytes(self) -> int:
        """All categories together."""
        return sum(self.device_bytes.values())

    @property
    def peak_host_bytes(self) -> int:
        """All categories together."""
        return sum(self.host_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether the device has so much memory."""
        limit = self.question.memory_bytes
        return limit is None or self.peak_device_bytes <= limit

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """What binds each phase. Of a step of thousands of events this takes longer than all else."""
        return self.trace.bound_by()

    @cached_property
    def bound(self) -> Bound | None:
        """What binds the phase that loses most, or else the longest one; None without events."""
        span_s = self.seconds
        losing = [b for b in self.bounds if b.lane != "compute" and b.exposed_s > 0.05 * span_s]
        if losing:
            return max(losing, key=lambda b: b.exposed_s)
        return max(self.bounds, key=lambda b: b.span_s, default=None)

    def __str__(self) -> str:
        """One line: seconds, bytes, what binds."""
        limit = self.question.memory_bytes
        room = f" of {format_bytes(limit)}" if limit is not None else ""
        lacks = "" if self.fits else ", which is too much"
        found = str(self.bound).split("; ")[0] if self.bound is not None else "no events"
        return f"{format_seconds(self.seconds)}, {format_bytes(self.peak_device_bytes)}{room} on the device{lacks}; {found}"


def _peak(trace: Trace, place: str) -> Mapping[str, int]:
    sample = trace.peak_sample(place)
    return dict(sample.bytes_by_category) if sample is not None else {}


def measured(step: Trace | Base) -> Answer:
    """A measured step as an answer, to compare others with.

    Raises:
        ValueError: the trace holds no whole training step.
    """
    base = Base.of(step)
    assert base.trace is not None, "a profile alone is no measured step"
    return Answer(Question.of(base), base.trace, f"{base.name}, measured", simulated=False)


def answer(step: Trace | Profile | Base, question: Question) -> Answer:
    """What a step would be with the settings of a question.

    Args:
        step: measured; `Base.of` it once, if many questions are to be asked.
        question: unknown settings (`update`, latency, ...) are those of the step.

    Raises:
        TypeError, ValueError: no step.
    """
    base = Base.of(step)
    settings = base.profile.settings
    target = target_of(base, question)
    by_formula = formulas(settings, base.depth, target)
    if base.trace is not None and question == Question.of(base):
        profile, per_layer = base.profile, 1
    else:
        profile, per_layer = rescale(base, target)
    trace = simulated(profile, question, settings)
    return Answer(question, trace, f"simulated with the costs of {base.name}", tuple(by_formula), per_layer=per_layer)


def target_of(base: Base, question: Question) -> Target:
    """What to scale a measured step to."""
    return Target(
        depth=question.depth,
        width=question.width,
        micro_batches=question.micro_batches,
        ahead=question.ahead,
        stash=question.stash,
        precision=question.precision,
        rows=base.micro_batches / question.micro_batches if question.same_batch else 1.0,
    )


def simulated(profile: Profile, question: Question, settings: Mapping[str, Any]) -> Trace:
    """The step on a virtual clock; its settings are those asked for."""
    config = {f.name: settings[f.name] for f in fields(RelayConfig) if f.name in settings}
    config |= {name: getattr(question, name) for name in ("ahead", "stash", "precision")}
    figures = {"latency_s": settings.get("latency_s", 0.0), "memory_bytes": question.memory_bytes}
    link = {f"{lane}_bytes_per_s": getattr(question, f"{lane}_bytes_per_s") for lane in COPY_LANES}
    # without a limit where one was measured nobody knows how fast it is: as fast as can be
    fast = {name: math.inf if value is None and settings.get(name) else value for name, value in link.items()}
    trace = simulate(profile, RelayConfig(**{**config, "micro_batches": profile.micro_batches}), {**figures, **fast})
    trace.settings.update(link, micro_batches=question.micro_batches)
    return trace
