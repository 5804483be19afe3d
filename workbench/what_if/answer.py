"""What a step would be with other settings: a question, and its answer from the schedule in numbers (`simulate`).

Costs are those of a measured step, scaled where the question asks for what was not measured (`rescale.py`); where no step has
been measured yet, see `assumed_costs.py`. Nothing here trains, waits, or shows anything.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Answer(StepFigures):
    """A step that was simulated, or measured and put into the same form.

    Attributes:
        question: its settings.
        by_formula: what of it is by formula, in words.
        simulated: False for a measured step.
        guessed: True if no step was measured at all.
        per_layer: how many layers of the stack one layer of the trace stands for, at most.
    """

    question: Question
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
        return summarize_timeline(self.columns)

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return self.summary.span_s

    @property
    def overlap(self) -> float:
        """Share in [0, 1] of copy time hidden under compute."""
        return self.summary.overlap

    @property
    def fits(self) -> bool:
        """Whether the device has so much memory."""
        limit = self.question.memory_bytes
        return limit is None or self.peak_device_bytes <= limit

    def __str__(self) -> str:
        """One line: seconds, bytes, what binds."""
        limit = self.question.memory_bytes
        room = f" of {format_bytes(limit)}" if limit is not None else ""
        lacks = "" if self.fits else ", which is too much"
        found = str(self.bound).split("; ")[0] if self.bound is not None else "no events"
        return f"{format_seconds(self.seconds)}, {format_bytes(self.peak_device_bytes)}{room} on the device{lacks}; {found}"


def measured_answer(step: Trace | MeasuredStep) -> Answer:
    """Make an answer of a measured step, to compare others with.

    Raises:
        ValueError: the trace holds no whole training step.
    """
    base = MeasuredStep.of(step)
    assert base.trace is not None, "a profile alone is no measured step"
    return Answer(question=Question.of(base), trace=base.trace, basis=f"{base.name}, measured", simulated=False)


def answer_question(step: Trace | Profile | MeasuredStep, question: Question) -> Answer:
    """Say what a step would be with the settings of a question.

    Args:
        step: measured; `MeasuredStep.of` it once, if many questions are to be asked.
        question: unknown settings (`update`, latency, ...) are those of the step.

    Raises:
        TypeError, ValueError: no step.
    """
    base = MeasuredStep.of(step)
    settings = base.profile.settings
    # As it ran: `rescale` would take the micro-batches of a long step together, and the answer would no longer be exact.
    if base.trace is not None and question == Question.of(base):
        profile, per_layer = base.profile, 1
    else:
        profile, per_layer = rescale(base, question)
    return Answer(
        question=question,
        trace=simulate_profile(profile, question, settings),
        basis=f"simulated with the costs of {base.name}",
        by_formula=tuple(formula_notes(base, question)),
        per_layer=per_layer,
    )


def simulate_profile(profile: Profile, question: Question, settings: Mapping[str, Any]) -> Trace:
    """Simulate the step on a virtual clock; the trace's settings are those asked for."""
    config = {f.name: settings[f.name] for f in fields(RelayConfig) if f.name in settings}
    config |= {name: getattr(question, name) for name in ("ahead", "keep", "stash", "precision")}
    config["resident"] = profile.settings["resident"]
    figures = {"latency_s": settings.get("latency_s", 0.0), "memory_bytes": question.memory_bytes}
    link = {f"{lane}_bytes_per_s": getattr(question, f"{lane}_bytes_per_s") for lane in COPY_LANES}
    # without a limit where one was measured nobody knows how fast it is: as fast as can be
    fast = {name: math.inf if value is None and settings.get(name) else value for name, value in link.items()}
    # The profile's own number of micro-batches: 1, where they are taken together.
    trace = simulate(profile, RelayConfig(**{**config, "micro_batches": profile.micro_batches}), {**figures, **fast})
    # What was asked for: None in place of inf, and what advice reckons with, where the profile takes things together.
    trace.settings.update(link, micro_batches=question.micro_batches, resident=question.resident)
    return trace


def find_fitting_settings(ask: Callable[[Question], Answer], question: Question, most_s: float = math.inf) -> WhatFits:
    """Find layers ahead and a place of the stash with which a step fits its device, with and without what stays there.

    Other numbers of micro-batches are not tried: an answer stretches what was measured to them, which is good for a picture and
    too little for a promise (a fifth of the bytes has been missing). The step itself rehearses them where it does not fit.

    Args:
        ask: answers a question; nothing is run for it.
        question: of a device with a budget; the rest of its settings stay.
        most_s: as of `what_fits`.

    Raises:
        ValueError: the device has no budget, or no step could be made.
    """
    if question.memory_bytes is None:
        raise ValueError(
            "memory_bytes=None: a device without a limit has room for everything; ask for one with a budget"
        )

    def price(config: RelayConfig) -> Priced:
        found = ask(replace(question, **{name: getattr(config, name) for name in CONFIG_FIELDS}))
        return Priced(config, found.peak_device_bytes, lambda: Run(found.seconds, found.peak_host_bytes))

    asked = RelayConfig(**{name: getattr(question, name) for name in CONFIG_FIELDS})
    return what_fits(price, asked, [question.micro_batches], int(question.memory_bytes), most_s)
