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
_KIND = ("stash", "precision", "keep", "micro_batches", "ahead", "resident")


class KnownSteps:
    """Steps of the present branch, and of the stack and batch that its last one had; others are forgotten. Thread-safe.

    What was measured with the settings of a question needs no formula, so its bytes are exact.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[tuple[object, ...], Trace] = {}  # the newest last
        self._names: dict[int, str] = {}  # by the identity of a trace, which is held above
        self._bases: dict[int, MeasuredStep] = {}
        self._like: object = None
        self._last: Answer | None = None

    def note(self, now: Snapshot) -> None:
        """Remember the last step of a session."""
        shown = now.shown
        if shown is None or shown.trace.settings.get("stash") == "disk":  # of such a step nothing is replayed
            with self._lock:
                self._traces, self._bases, self._names, self._like = {}, {}, {}, None
            return
        trace = shown.trace
        with self._lock:
            if self._traces and next(reversed(self._traces.values())) is trace:
                self._names[id(trace)] = now.name_of(shown)  # a fork since then adds the branch to it
                return
            layers = tuple((row.key, row.num_params, row.num_trained) for row in shown.layers)
            like = shown.branch, layers, now.shell_trained, batch_bytes(trace)
            if like != self._like:
                self._traces, self._bases, self._like = {}, {}, like
            kind = tuple(trace.settings.get(name) for name in ("schedule", *_KIND))
            self._traces.pop(kind, None)  # otherwise it would keep its place in the order
            self._traces[kind] = trace
            while len(self._traces) > _MOST:
                del self._traces[next(iter(self._traces))]
            self._bases = {id(kept): base for kept in self._traces.values() if (base := self._bases.get(id(kept)))}
            self._names = {id(kept): name for kept in self._traces.values() if (name := self._names.get(id(kept)))}
            self._names[id(trace)] = now.name_of(shown)

    def last(self) -> Answer | None:
        """Return the last step, as measured; None if there is none.

        Raises:
            DepthFirstStep: it was one.
        """
        with self._lock:
            trace = next(reversed(self._traces.values()), None)
        if trace is None:
            return None
        if self._last is None or self._last.trace is not trace:
            self._last = measured(self._base(trace))
        return self._last

    def nearest(self, question: Question) -> MeasuredStep | None:
        """Find the step whose settings are nearest to those of a question, the newest of several; None if none is known.

        Of steps that ran depth first it is the last resort.

        Raises:
            DepthFirstStep: no other one is known.
        """

        def far(trace: Trace) -> tuple[bool, ...]:
            asked = (trace.settings.get(name) != getattr(question, name) for name in _KIND)
            return trace.settings.get("schedule") == "depth_first", *asked

        with self._lock:
            # Of those that are equally far `min` takes the first, and so the newest.
            trace = min(reversed(self._traces.values()), key=far, default=None)
        return self._base(trace) if trace is not None else None

    def _base(self, trace: Trace) -> MeasuredStep:
        """Made outside of the lock: of a step of many events that takes a while."""
        with self._lock:
            known, name = self._bases.get(id(trace)), self._names.get(id(trace), "")
        if known is not None and (not name or known.name == name):
            return known
        made = MeasuredStep.of(trace, name)
        with self._lock:
            if any(kept is trace for kept in self._traces.values()):
                self._bases[id(trace)] = made
        return made
