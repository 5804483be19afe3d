"""Measures on the probe the loss without a layer and with it twice, for one or all layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from workbench.panels.latest_executor import LatestExecutor
from workbench.readings import full_name, number_layers
from workbench.session import TRIAL_EDITS, LayerTrial, LossChange, Session, StateVersion, TrialKind

TrialRef = tuple[str, TrialKind]  # key of a layer, and the kind of its trial

_TRIAL_TEXT: Mapping[TrialKind, str] = {"without": "without {}", "twice": "with {} twice"}


class TrialRunner:
    """Requests trials of layers and keeps their results.

    A sweep queues one measurement at a time and, during a run, waits for a step in between, so that neither the run nor
    other commands wait for the whole sweep.

    Args:
        session: runs the measurements.
        on_change: called after each result, on other threads too, without locks.

    Attributes:
        found: last trial of each layer and kind; never changed in place.
        waiting: requested trials without a result.
        remaining: measurements that the current sweep still has to make; 0 without a sweep.
        stop_reason: why the last sweep ended early, or "".
    """

    def __init__(self, session: Session, on_change: Callable[[], None]) -> None:
        self._session, self._on_change = session, on_change
        self._sweeps, self._stop = LatestExecutor("trials"), threading.Event()
        self.found: Mapping[TrialRef, LayerTrial] = {}
        self.waiting: frozenset[TrialRef] = frozenset()
        self.remaining = 0
        self.stop_reason = ""

    def request(self, key: str, kind: TrialKind, more: int = 0) -> Future[LossChange]:
        """Queue the measurement of one layer; the label in the queue has the number of `more` that follow.

        Raises:
            RuntimeError: the session is closed.
        """
        numbers = number_layers(row.key for row in self._session.snapshot().layers)
        label = _TRIAL_TEXT[kind].format(full_name(key, numbers)) + (f", and {more} more after it" if more else "")
        future = self._session.measure(TRIAL_EDITS[kind](key), what=label)
        ref: TrialRef = key, kind
        self.waiting |= {ref}
        future.add_done_callback(partial(self._on_result, ref))
        return future

    def request_all(self, keys: Sequence[str]) -> None:
        """Start a sweep: first every layer left out, then every layer twice."""
        self._stop.clear()
        self.remaining, self.stop_reason = len(TRIAL_EDITS) * len(keys), ""
        self._sweeps.submit(partial(self._run_sweep, [(key, kind) for kind in TRIAL_EDITS for key in keys]))

    def stop(self) -> None:
        """End the sweep after the current measurement."""
        self._stop.set()

    def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of a sweep; return False after `timeout_s` seconds."""
        return self._sweeps.wait(timeout_s)

    def _on_result(self, ref: TrialRef, future: Future[LossChange]) -> None:
        """Store a result; called on the session's thread, or by the thread that cancelled the measurement."""
        self.waiting -= {ref}
        if future.cancelled():
            return  # the thread that cancelled it may hold the session's lock
        error, version = future.exception(), StateVersion.of(self._session.snapshot())
        change = None if error is not None else future.result()
        trial = LayerTrial(*ref, change, "" if error is None else str(error).partition("\n")[0], version)
        self.found = {**self.found, ref: trial}
        self._on_change()

    def _run_sweep(self, trials: Sequence[TrialRef]) -> None:
        try:
            self.stop_reason = self._measure_all(trials)
        except RuntimeError as error:  # the session was closed between two measurements
            self.stop_reason = str(error)
        finally:
            self.remaining = 0
            self._on_change()

    def _measure_all(self, trials: Sequence[TrialRef]) -> str:
        """Run the trials in order; return why the rest was skipped, or ""."""
        for done, (key, kind) in enumerate(trials):
            self.remaining = len(trials) - done
            if key not in [row.key for row in self._session.snapshot().layers]:
                continue  # removed by an edit
            over = threading.Event()
            future = self.request(key, kind, self.remaining - 1)
            future.add_done_callback(lambda _, over=over: over.set())  # runs after `_on_result`
            over.wait()
            if future.cancelled():
                return "removed from the queue"
            if future.exception() is not None and not self._session.probe_on:
                return "the probe is off"
            self._wait_for_step()
            if self._stop.is_set():
                return f"stopped with {len(trials) - done - 1} left" if done + 1 < len(trials) else ""
        return ""

    def _wait_for_step(self) -> None:
        """During a run, wait until it has made a step."""
        snapshot = first = self._session.snapshot()
        while snapshot.state == "running" and snapshot.step == first.step:
            if snapshot.ended or self._stop.is_set():
                return
            self._session.wait_for_change(snapshot.number, 0.2)  # seconds; `stop` does not interrupt it
            snapshot = self._session.snapshot()
