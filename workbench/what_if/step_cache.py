"""Cache of the measured steps of a session: the newest for each combination of settings."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import NamedTuple

from l2l_core import Trace
from workbench.readings import batch_bytes
from workbench.session import Snapshot
from workbench.what_if.answer import Answer, answer_question, measured_answer
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import Question

_MAX_STEPS = 6
_KEY_SETTINGS = ("stash", "precision", "keep", "micro_batches", "ahead", "resident")


class LastStep(NamedTuple):
    """The last step as measured, and a simulation with its settings and costs."""

    measured: Answer
    simulated: Answer


class _CachedStep:
    """A trace and its name; the costs are computed on first use, because that is slow for many events."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name = trace, name

    @cached_property
    def base(self) -> MeasuredStep:
        return MeasuredStep.of(self.trace, self.name)

    @cached_property
    def answers(self) -> LastStep:
        return LastStep(measured_answer(self.base), answer_question(self.base, Question.of(self.base)))


class StepCache:
    """Measured steps with the branch, stack and batch size of the last one. Thread-safe.

    The answer to a question with the settings of a cached step needs no formula, so its bytes are exact.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # not held while costs are computed
        self._steps: dict[tuple[object, ...], _CachedStep] = {}  # the newest last
        self._context: object = None

    def add(self, snapshot: Snapshot) -> None:
        """Add the last step of a session."""
        shown = snapshot.shown
        with self._lock:
            if shown is None or shown.trace.settings.get("stash") == "disk":  # cannot be simulated
                self._steps, self._context = {}, None
                return
            trace, name = shown.trace, snapshot.name_of(shown)  # a fork since then adds the branch to the name
            newest = next(reversed(self._steps.values()), None)
            if newest is not None and newest.trace is trace and newest.name == name:
                return
            layers = tuple((row.key, row.num_params, row.num_trained) for row in shown.layers)
            context = shown.branch, layers, snapshot.shell_trained, batch_bytes(trace)
            if context != self._context:
                self._steps, self._context = {}, context
            key = tuple(trace.settings.get(setting) for setting in ("schedule", *_KEY_SETTINGS))
            self._steps.pop(key, None)  # so that the new step is last in order
            self._steps[key] = _CachedStep(trace, name)
            if len(self._steps) > _MAX_STEPS:
                del self._steps[next(iter(self._steps))]

    def last_step(self) -> LastStep | None:
        """Return the last step; None if the cache is empty.

        Raises:
            DepthFirstStep: the step ran depth first.
        """
        with self._lock:
            newest = next(reversed(self._steps.values()), None)
        return None if newest is None else newest.answers

    def nearest(self, question: Question) -> MeasuredStep | None:
        """Return the newest step whose settings are closest to those of a question; None if the cache is empty.

        Settings are compared in the order of `_KEY_SETTINGS`; steps that ran depth first rank last.

        Raises:
            DepthFirstStep: all cached steps ran depth first.
        """

        def distance(step: _CachedStep) -> tuple[bool, ...]:
            settings = step.trace.settings
            return settings.get("schedule") == "depth_first", *(
                settings.get(name) != getattr(question, name) for name in _KEY_SETTINGS
            )

        with self._lock:
            found = min(
                reversed(self._steps.values()), key=distance, default=None
            )  # of equal ones the first: the newest
        return None if found is None else found.base
