"""The measured steps of a session that questions may start from: the newest of each kind."""

from __future__ import annotations

import threading
from functools import cached_property

from l2l_core import Trace
from workbench.readings import batch_bytes
from workbench.session import Snapshot
from workbench.what_if.answer import Answer, measured_answer
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import Question

_MAX_STEPS = 6  # steps that are kept
_KEY_SETTINGS = ("stash", "precision", "keep", "micro_batches", "ahead", "resident")


class _KnownStep:
    """A trace and its name; its costs are read on first use, which for many events takes a while."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name = trace, name

    @cached_property
    def base(self) -> MeasuredStep:
        return MeasuredStep.of(self.trace, self.name)

    @cached_property
    def answer(self) -> Answer:
        return measured_answer(self.base)


class StepCache:
    """Steps of the present branch, and of the stack and batch that its last one had; others are forgotten. Thread-safe.

    A question with the settings of one of them needs no formula, so its bytes are exact.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # costs are read without it
        self._steps: dict[tuple[object, ...], _KnownStep] = {}  # the newest last
        self._context: object = None

    def add(self, snapshot: Snapshot) -> None:
        """Remember the last step of a session."""
        shown = snapshot.shown
        with self._lock:
            if shown is None or shown.trace.settings.get("stash") == "disk":  # such a step cannot be replayed
                self._steps, self._context = {}, None
                return
            trace, name = shown.trace, snapshot.name_of(shown)  # a fork since then adds the branch to the name
            newest = next(reversed(self._steps.values()), None)
            if newest is not None and newest.trace is trace and newest.name == name:
                return
            layers = tuple((row.key, row.num_params, row.num_trained) for row in shown.layers)
            like = shown.branch, layers, snapshot.shell_trained, batch_bytes(trace)
            if like != self._context:
                self._steps, self._context = {}, like
            kind = tuple(trace.settings.get(setting) for setting in ("schedule", *_KEY_SETTINGS))
            self._steps.pop(kind, None)  # otherwise it would keep its place in the order
            self._steps[kind] = _KnownStep(trace, name)
            if len(self._steps) > _MAX_STEPS:
                del self._steps[next(iter(self._steps))]

    def last_answer(self) -> Answer | None:
        """Return the last step, as measured; None if none is known.

        Raises:
            DepthFirstStep: it was one.
        """
        with self._lock:
            newest = next(reversed(self._steps.values()), None)
        return None if newest is None else newest.answer

    def nearest(self, question: Question) -> MeasuredStep | None:
        """Find the step with the most settings of a question, the newest of several; None if none is known.

        Steps that ran depth first are the last resort.

        Raises:
            DepthFirstStep: no other one is known.
        """

        def far(step: _KnownStep) -> tuple[bool, ...]:
            settings = step.trace.settings
            return settings.get("schedule") == "depth_first", *(
                settings.get(name) != getattr(question, name) for name in _KEY_SETTINGS
            )

        with self._lock:
            # Of those that are equally far `min` takes the first, and so the newest.
            found = min(reversed(self._steps.values()), key=far, default=None)
        return None if found is None else found.base
