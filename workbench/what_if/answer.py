"""Simulate a training step with other settings, from the costs of a measured step.

Costs that were not measured are scaled (`rescale.py`). Before the first measured step, see `assumed_costs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from l2l_core import Profile, RelayConfig, Trace, simulate
from l2l_core.forecast import Priced, Run, StepFigures, WhatFits, what_fits
from l2l_core.simulator import COPY_LANES
from l2l_core.trace import format_bytes
from workbench.pictures import format_seconds
from workbench.readings import Columns, TimelineSummary, summarize_timeline
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import CONFIG_FIELDS, Question
from workbench.what_if.rescale import formula_notes, rescale


class TracedStep(StepFigures):
    """Figures of a step that are read from the columns of its trace."""

    @property
    def columns(self) -> Columns:
        """Events and samples of the trace."""
        return Columns.of(self.trace)

    @cached_property
    def summary(self) -> TimelineSummary:
        """Busy and exposed seconds of the lanes."""
        return summarize_timeline(self.columns)

    @property
    def seconds(self) -> float:
        """Seconds from the first event to the last."""
        return self.summary.span_s

    @property
    def overlap(self) -> float:
        """Share in [0, 1] of copy time hidden under compute."""
        return self.summary.overlap


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer(TracedStep):
    """Figures of a simulated step, or of a measured step in the same form.

    Attributes:
        question: settings of the step.
        by_formula: descriptions of the figures that were scaled by formula.
        simulated: False for a measured step.
        guessed: True if no step was measured at all.
        per_layer: largest number of layers that one layer of the trace represents.
    """

    question: Question
    by_formula: tuple[str, ...] = ()
    simulated: bool = True
    guessed: bool = False
    per_layer: int = 1

    @property
    def fits(self) -> bool:
        """True if the step fits in device memory."""
        limit = self.question.memory_bytes
        return limit is None or self.peak_device_bytes <= limit

    def __str__(self) -> str:
        """Summarize the step in one line: seconds, device bytes, bound."""
        limit = self.question.memory_bytes
        room = f" of {format_bytes(limit)}" if limit is not None else ""
        excess = "" if self.fits else ", which is too much"
        bound = str(self.bound).split("; ")[0] if self.bound is not None else "no events"
        return f"{format_seconds(self.seconds)}, {format_bytes(self.peak_device_bytes)}{room} on the device{excess}; {bound}"


def measured_answer(step: Trace | MeasuredStep) -> Answer:
    """Return the figures of a measured step as an `Answer`, for comparison.

    Raises:
        ValueError: the trace is not a complete training step.
    """
    base = MeasuredStep.of(step)
    assert base.trace is not None, "a profile without a trace is not a measured step"
    return Answer(question=Question.of(base), trace=base.trace, basis=f"{base.name}, measured", simulated=False)


def answer_question(step: Trace | Profile | MeasuredStep, question: Question) -> Answer:
    """Simulate a step with the settings of `question`.

    Args:
        step: the measured step; pass a `MeasuredStep` to answer many questions from it.
        question: new settings; settings that it lacks (`update`, latency, ...) are those of the step.

    Raises:
        TypeError: `step` is not a step.
        ValueError: the trace is not a complete training step.
    """
    base = MeasuredStep.of(step)
    settings = base.profile.settings
    # Not rescaled: `rescale` merges the micro-batches of a long step, which would make the answer inexact.
    if base.trace is not None and question == Question.of(base):
        profile, per_layer = base.profile, 1
    else:
        profile, per_layer = rescale(base, question)
    return Answer(
        question=question,
        trace=simulate_profile(profile, question, settings),
        basis=f"simulated with the costs of {base.name}{_in_own_order(settings)}",
        by_formula=tuple(formula_notes(base, question)),
        per_layer=per_layer,
    )


def _in_own_order(settings: Mapping[str, Any]) -> str:
    """Return a note for a step by a user-defined schedule, whose order a simulation with other settings does not have."""
    name = settings.get("schedule_name")
    return f", in the order of the relay's own schedule, not of {name}" if name else ""


def simulate_profile(profile: Profile, question: Question, settings: Mapping[str, Any]) -> Trace:
    """Simulate the profile on a virtual clock; the settings of the trace are those of `question`."""
    config = {f.name: settings[f.name] for f in fields(RelayConfig) if f.name in settings}
    config |= {name: getattr(question, name) for name in ("ahead", "keep", "stash", "precision")}
    config["resident"] = profile.settings["resident"]
    figures = {"latency_s": settings.get("latency_s", 0.0), "memory_bytes": question.memory_bytes}
    link = {f"{lane}_bytes_per_s": getattr(question, f"{lane}_bytes_per_s") for lane in COPY_LANES}
    # If the measured link had a limit and the question has none, the copies take no time.
    fast = {name: math.inf if value is None and settings.get(name) else value for name, value in link.items()}
    # profile.micro_batches is 1 if micro-batches are merged.
    trace = simulate(profile, RelayConfig(**{**config, "micro_batches": profile.micro_batches}), {**figures, **fast})
    # The settings of the question: None instead of inf, and counts before merging.
    trace.settings.update(link, micro_batches=question.micro_batches, resident=question.resident)
    return trace


def find_fitting_settings(
    answer: Callable[[Question], Answer], question: Question, most_s: float = math.inf
) -> WhatFits:
    """Find settings of `ahead`, `stash`, `resident` and `keep` with which a step fits in device memory.

    The number of micro-batches stays: figures scaled to other numbers are too inexact for a guarantee (off by up to a fifth
    of the bytes). A step that does not fit rehearses them itself.

    Args:
        answer: simulates a question; no step runs.
        question: settings with a device budget; settings that are not searched stay.
        most_s: as in `what_fits`.

    Raises:
        ValueError: the device has no budget, or no step can be simulated.
    """
    if question.memory_bytes is None:
        raise ValueError(
            "memory_bytes=None: a device without a limit has room for every setting; pass a number of bytes"
        )

    def price(config: RelayConfig) -> Priced:
        found = answer(replace(question, **{name: getattr(config, name) for name in CONFIG_FIELDS}))
        return Priced(config, found.peak_device_bytes, lambda: Run(found.seconds, found.peak_host_bytes))

    config = RelayConfig(**{name: getattr(question, name) for name in CONFIG_FIELDS})
    return what_fits(price, config, [question.micro_batches], int(question.memory_bytes), most_s)
