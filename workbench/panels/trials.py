"""Layers tried out on the probe, one or all of them, in the background and one command at a time. No widgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from workbench.panels.latest import Latest
from workbench.readings import full_name, number_layers
from workbench.session import TRIED, How, Judged, Moment, Session, Trial

Which = tuple[str, How]  # key of a layer, and what is tried

_WORDS: Mapping[How, str] = {"without": "without {}", "twice": "with {} twice"}


class Trials:
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

    def __init__(self, session: Session, told: Callable[[], None]) -> None:
        self._session, self._told = session, told
        self._sweeps, self._stop = Latest("trials"), threading.Event()
        self.found: Mapping[Which, Trial] = {}
        self.waiting: frozenset[Which] = frozenset()
        self.left = 0
        self.stopped = ""

    def ask(self, key: str, how: How, more: int = 0) -> Future[Judged]:
        """Measure one layer when its turn comes; the queue says which, and that `more` others come after it.

        Raises:
            RuntimeError: the session is closed.
        """
        numbers = number_layers(row.key for row in self._session.snapshot().layers)
        words = _WORDS[how].format(full_name(key, numbers)) + (f", and {more} more after it" if more else "")
        future = self._session.measure(TRIED[how](key), what=words)
        self.waiting |= {(key, how)}
        future.add_done_callback(partial(self._take, (key, how)))
        return future

    def ask_all(self, keys: Sequence[str]) -> None:
        """Measure these layers one after another, each left out first, and then each twice."""
        self._stop.clear()
        self.left, self.stopped = len(TRIED) * len(keys), ""
        self._sweeps.ask(partial(self._sweep, [(key, how) for how in TRIED for key in keys]))

    def stop(self) -> None:
        """End the sweep after the measurement under way."""
        self._stop.set()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until no sweep is under way; False if that takes longer."""
        return self._sweeps.wait(timeout_s)

    def _take(self, which: Which, future: Future[Judged]) -> None:
        """On the session's thread, before it does anything else; but if it was cancelled, on whatever thread did that."""
        self.waiting -= {which}
        if future.cancelled():
            return  # whoever has cancelled it may hold the session's lock
        error, moment = future.exception(), Moment.of(self._session.snapshot())
        judged = None if error is not None else future.result()
        trial = Trial(*which, judged, "" if error is None else str(error).partition("\n")[0], moment)
        self.found = {**self.found, which: trial}
        self._told()

    def _sweep(self, asked: Sequence[Which]) -> None:
        try:
            self.stopped = self._measure(asked)
        except RuntimeError as error:  # the session was closed between two measurements
            self.stopped = str(error)
        finally:
            self.left = 0
            self._told()

    def _measure(self, asked: Sequence[Which]) -> str:
        """One after another; why the rest was left out."""
        for done, (key, how) in enumerate(asked):
            self.left = len(asked) - done
            if key not in [row.key for row in self._session.snapshot().layers]:
                continue  # an edit has taken it out
            over = threading.Event()
            future = self.ask(key, how, self.left - 1)
            future.add_done_callback(lambda _, over=over: over.set())  # behind the one that takes what was found
            over.wait()
            if future.cancelled():
                return "taken out of the queue"
            if future.exception() is not None and not self._session.probe_on:
                return "the probe is off"
            self._let_step()
            if self._stop.is_set():
                return f"stopped with {len(asked) - done - 1} left" if done + 1 < len(asked) else ""
        return ""

    def _let_step(self) -> None:
        """Wait until a run under way has made a step."""
        now = first = self._session.snapshot()
        while now.state == "running" and now.step == first.step and not (now.ended or self._stop.is_set()):
            self._session.wait_for_change(now.number, 0.2)  # seconds; `stop` does not wake it
            now = self._session.snapshot()
