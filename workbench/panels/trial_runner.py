"""Layers tried out on the probe, one or all of them, in the background and one command at a time. No widgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from workbench.panels.latest_executor import LatestExecutor
from workbench.readings import full_name, number_layers
from workbench.session import TRIAL_EDITS, LayerTrial, LossChange, Session, StateVersion, TrialKind

TrialRef = tuple[str, TrialKind]  # key of a layer, and what is tried

_TRIAL_TEXT: Mapping[TrialKind, str] = {"without": "without {}", "twice": "with {} twice"}


class TrialRunner:
    """Holds what was found out about layers, and measures what is asked for.

    Between two measurements of a sweep the session has nothing of it in its queue until a run has made a step, so that neither a
    run nor other commands wait for the whole sweep.

    Args:
        session: measures.
        told: called when there is something new to show, from other threads too, and without any lock.

    Attributes:
        found: the last trial of each kind; never changed in place.
        waiting: what was asked for and is not there yet.
        left: measurements that a sweep has still to make; 0 if there is none under way.
        stopped: why the last sweep has ended early.
    """

    def __init__(self, session: Session, on_change: Callable[[], None]) -> None:
        self._session, self._on_change = session, on_change
        self._sweeps, self._stop = LatestExecutor("trials"), threading.Event()
        self.found: Mapping[TrialRef, LayerTrial] = {}
        self.waiting: frozenset[TrialRef] = frozenset()
        self.remaining = 0
        self.stop_reason = ""

    def request(self, key: str, kind: TrialKind, more: int = 0) -> Future[LossChange]:
        """Measure one layer when its turn comes; the queue says which, and that `more` others come after it.

        Raises:
            RuntimeError: the session is closed.
        """
        numbers = number_layers(row.key for row in self._session.snapshot().layers)
        words = _TRIAL_TEXT[kind].format(full_name(key, numbers)) + (f", and {more} more after it" if more else "")
        future = self._session.measure(TRIAL_EDITS[kind](key), what=words)
        self.waiting |= {(key, kind)}
        future.add_done_callback(partial(self._on_result, (key, kind)))
        return future

    def request_all(self, keys: Sequence[str]) -> None:
        """Measure these layers one after another, each left out first, and then each twice."""
        self._stop.clear()
        self.remaining, self.stop_reason = len(TRIAL_EDITS) * len(keys), ""
        self._sweeps.submit(partial(self._run_sweep, [(key, how) for how in TRIAL_EDITS for key in keys]))

    def stop(self) -> None:
        """End the sweep after the measurement under way."""
        self._stop.set()

    def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no sweep is under way; False if that takes longer."""
        return self._sweeps.wait(timeout_s)

    def _on_result(self, ref: TrialRef, future: Future[LossChange]) -> None:
        """On the session's thread, before it does anything else; but if it was cancelled, on whatever thread did that."""
        self.waiting -= {ref}
        if future.cancelled():
            return  # whoever has cancelled it may hold the session's lock
        error, moment = future.exception(), StateVersion.of(self._session.snapshot())
        judged = None if error is not None else future.result()
        trial = LayerTrial(*ref, judged, "" if error is None else str(error).partition("\n")[0], moment)
        self.found = {**self.found, ref: trial}
        self._on_change()

    def _run_sweep(self, asked: Sequence[TrialRef]) -> None:
        try:
            self.stop_reason = self._measure_all(asked)
        except RuntimeError as error:  # the session was closed between two measurements
            self.stop_reason = str(error)
        finally:
            self.remaining = 0
            self._on_change()

    def _measure_all(self, asked: Sequence[TrialRef]) -> str:
        """One after another; why the rest was left out."""
        for done, (key, how) in enumerate(asked):
            self.remaining = len(asked) - done
            if key not in [row.key for row in self._session.snapshot().layers]:
                continue  # an edit has taken it out
            over = threading.Event()
            future = self.request(key, how, self.remaining - 1)
            future.add_done_callback(lambda _, over=over: over.set())  # behind the one that takes what was found
            over.wait()
            if future.cancelled():
                return "taken out of the queue"
            if future.exception() is not None and not self._session.probe_on:
                return "the probe is off"
            self._wait_for_step()
            if self._stop.is_set():
                return f"stopped with {len(asked) - done - 1} left" if done + 1 < len(asked) else ""
        return ""

    def _wait_for_step(self) -> None:
        """Wait until a run under way has made a step."""
        snapshot = first = self._session.snapshot()
        while (
            snapshot.state == "running" and snapshot.step == first.step and not (snapshot.ended or self._stop.is_set())
        ):
            self._session.wait_for_change(snapshot.number, 0.2)  # seconds; `stop` does not wake it
            snapshot = self._session.snapshot()
