"""A thread that draws the newest snapshot of a session without slowing training down.

The number of frames per second is limited, and so is the thread's share of processor time: the longer a frame takes to
draw, the fewer are drawn. Snapshots between two frames are skipped.
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
CPU_SHARE = 0.03  # of a core; ten frames per second during a training step would take 0.1 (docs/LOG.md)
_IDLE_WAIT_S = 0.5  # longest wait for a change of an idle session


class RefreshLoop:
    """Calls views with snapshots of one session, on a thread that exists while there are views.

    Invariant: one thread at a time calls a view, and none after `remove` has returned, except for the call from which
    `remove` itself was called. A view that raises is logged and removed; the others continue.
    """

    def __init__(self, session: SnapshotSource, hz: float = HZ, share: float = CPU_SHARE) -> None:
        self._session = ref(session)  # weak: `_loops` must not keep sessions alive
        self._hz, self._share = hz, share
        self._views: list[View] = []
        self._has_no_views = threading.Event()  # set: the thread stops sleeping and ends
        self._drawing = threading.RLock()
        self._thread: threading.Thread | None = None
        self.frames = 0
        self.busy_s = 0.0  # processor seconds of all frames

    @staticmethod
    def for_session(session: SnapshotSource) -> RefreshLoop:
        """Return the refresh loop that all panels of a session share."""
        with _loops_lock:
            return _loops.setdefault(session, RefreshLoop(session))

    def add(self, view: View) -> None:
        """Call `view` now and with every new snapshot."""
        session = self._session()
        assert session is not None, "the caller of `add` holds the session"
        with self._drawing:
            view(session.snapshot())
            self._views.append(view)
            self._has_no_views.clear()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_loop, args=(session,), name="refresh loop", daemon=True
                )
                self._thread.start()

    def remove(self, view: View) -> None:
        """Stop calling `view`; the thread ends with the last view."""
        with self._drawing:
            if view in self._views:
                self._views.remove(view)
            if not self._views:
                self._has_no_views.set()

    def join(self) -> None:
        """Wait for the end of the thread after the last view was removed."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run_loop(self, session: SnapshotSource) -> None:
        shown: Snapshot | None = None
        while True:
            # processor time of this thread: while it waits for the interpreter, training runs
            began_s = time.thread_time()
            snapshot = session.snapshot()
            with self._drawing:
                if not self._views:
                    self._thread = None  # under the lock: the next `add` starts another thread
                    return
                # a step in progress grows under the same number
                if shown is None or snapshot.number != shown.number or snapshot.progress is not None:
                    self._call_views(snapshot)
                    self.frames += 1
                shown = snapshot
            cost_s = time.thread_time() - began_s
            self.busy_s += cost_s
            # cost / (cost + pause) is at most the share
            left = self._has_no_views.wait(max(1 / self._hz, cost_s / self._share - cost_s))
            if not left and snapshot.progress is None and snapshot.state != "running":
                # with a timeout: removing the last view does not change the session
                session.wait_for_change(snapshot.number, _IDLE_WAIT_S)

    def _call_views(self, snapshot: Snapshot) -> None:
        for view in list(self._views):
            if view not in self._views:
                continue  # removed by another view
            try:
                view(snapshot)
            except Exception:
                _log.exception("a view of the session raised an exception and is no longer updated")
                self.remove(view)


_log = logging.getLogger(__name__)
_loops: WeakKeyDictionary[SnapshotSource, RefreshLoop] = WeakKeyDictionary()
_loops_lock = threading.Lock()
