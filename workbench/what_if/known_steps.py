"""The measured steps of a session that questions may start from: the newest of each kind."""

from __future__ import annotations

import threading

from l2l_core import Trace
from workbench.readings import batch_bytes
from workbench.session import Snapshot
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import Question
from workbench.what_if.what_if import Answer, measured

_MOST = 6  # steps that are kept
_KIND = ("stash", "precision", "micro_batches", "ahead")


class KnownSteps:
    """Steps of the present stack and batch; others are forgotten. Thread-safe.

    What was measured with the settings of a question needs no formula, so its bytes are exact.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[tuple[object, ...], Trace] = {}  # the newest last
        self._bases: dict[int, MeasuredStep] = {}
        self._like: object = None
        self._last: Answer | None = None

    def note(self, now: Snapshot) -> None:
        """Remember the last step of a session."""
        trace = now.last
        if trace is None:
            return
        with self._lock:
            if self._traces and next(reversed(self._traces.values())) is trace:
                return
            layers = tuple((row.key, row.num_params, row.num_trained) for row in now.layers)
            like = layers, now.shell_trained, batch_bytes(trace)
            if like != self._like:
                self._traces, self._bases, self._like = {}, {}, like
            kind = tuple(trace.settings.get(name) for name in _KIND)
            self._traces.pop(kind, None)
            self._traces[kind] = trace
            while len(self._traces) > _MOST:
                del self._traces[next(iter(self._traces))]
            self._bases = {id(kept): base for kept in self._traces.values() if (base := self._bases.get(id(kept)))}

    def last(self) -> Answer:
        """The last step, as measured."""
        with self._lock:
            trace = next(reversed(self._traces.values()))
        if self._last is None or self._last.trace is not trace:
            self._last = measured(self._base(trace))
        return self._last

    def nearest(self, question: Question) -> MeasuredStep:
        """The costs of the step whose settings are nearest to those of a question; of several, the newest."""

        def far(trace: Trace) -> tuple[bool, ...]:
            return tuple(trace.settings.get(name) != getattr(question, name) for name in _KIND)

        with self._lock:
            trace = min(reversed(self._traces.values()), key=far)
        return self._base(trace)

    def _base(self, trace: Trace) -> MeasuredStep:
        """Made outside of the lock: of a step of many events that takes a while."""
        with self._lock:
            known = self._bases.get(id(trace))
        if known is not None:
            return known
        made = MeasuredStep.of(trace)
        with self._lock:
            if any(kept is trace for kept in self._traces.values()):
                self._bases[id(trace)] = made
        return made
