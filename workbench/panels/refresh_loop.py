"""Brings snapshots to those who look at a session, on a thread that comes late rather than slow training down.

Training must not notice that somebody looks. So the newest snapshot is taken and older ones are forgotten, at most so
many times a second, and the thread works for at most a small share of the time: the longer a frame takes to draw, the
fewer there are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

from workbench.session import Snapshot, SnapshotSource

View = Callable[[Snapshot], None]

HZ = 10.0
CPU_SHARE = 0.03  # of a core; ten frames a second would take a tenth of one, beside a training step (docs/LOG.md)
_IDLE_WAIT_S = 0.5  # between two looks at a session where nothing happens


class RefreshLoop:
    """Calls views with snapshots of one session, on a thread that lives as long as there are views.

    Invariant: a view is called by one thread at a time, and never after `remove` has returned, unless it is being called
    by the thread that removes it. A view that fails is logged and removed; the others go on.
    """

    def __init__(self, session: SnapshotSource, hz: float = HZ, share: float = CPU_SHARE) -> None:
        self._session = ref(session)  # weak: `_pumps` must not keep sessions that nobody else keeps
        self._hz, self._share = hz, share
        self._views: list[View] = []
        self._has_no_views = threading.Event()  # there are no views, so that the thread need not sleep any longer
        self._drawing = threading.RLock()
        self._thread: threading.Thread | None = None
        self.frames = 0
        self.busy_s = 0.0  # processor seconds spent on them

    @staticmethod
    def for_session(session: SnapshotSource) -> RefreshLoop:
        """Return the pump that all panels of a session share."""
        with _loops_lock:
            return _loops.setdefault(session, RefreshLoop(session))

    def add(self, view: View) -> None:
        """Show the session to `view` from now on, at once for a start."""
        session = self._session()
        assert session is not None, "whoever shows a session has it"
        with self._drawing:
            view(session.snapshot())
            self._views.append(view)
            self._has_no_views.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_loop, args=(session,), name="pump", daemon=True)
                self._thread.start()

    def remove(self, view: View) -> None:
        """Show it no more; without views the thread ends."""
        with self._drawing:
            if view in self._views:
                self._views.remove(view)
            if not self._views:
                self._has_no_views.set()

    def join(self) -> None:
        """Wait for the end of the thread, once no views are left."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run_loop(self, session: SnapshotSource) -> None:
        shown: Snapshot | None = None
        while True:
            # processor time of this thread alone: while it waits for the interpreter, training has it
            began_s = time.thread_time()
            snapshot = session.snapshot()
            with self._drawing:
                if not self._views:
                    self._thread = None  # under the lock: a view that comes now starts another thread
                    return
                # a step under way grows without another number
                if shown is None or snapshot.number != shown.number or snapshot.progress is not None:
                    self._call_views(snapshot)
                    self.frames += 1
                shown = snapshot
            cost_s = time.thread_time() - began_s
            self.busy_s += cost_s
            # cost / (cost + pause) is at most the share
            left = self._has_no_views.wait(max(1 / self._hz, cost_s / self._share - cost_s))
            if not left and snapshot.progress is None and snapshot.state != "running":
                # not for good: meanwhile the last view may go, which does not change the session
                session.wait_for_change(snapshot.number, _IDLE_WAIT_S)

    def _call_views(self, snapshot: Snapshot) -> None:
        for view in list(self._views):
            if view not in self._views:
                continue  # another view has removed it
            try:
                view(snapshot)
            except Exception:
                _log.exception("a view of the session has failed and is shown no more")
                self.remove(view)


_log = logging.getLogger(__name__)
_loops: WeakKeyDictionary[SnapshotSource, RefreshLoop] = WeakKeyDictionary()
_loops_lock = threading.Lock()
