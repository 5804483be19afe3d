"""Work that is done beside the callers, the newest only: who asks again before it is done makes the older request void."""

from __future__ import annotations

import threading
from collections.abc import Callable

Job = Callable[[], None]


class LatestExecutor:
    """Runs jobs one at a time on a thread that is there only while there is something to do.

    Invariant: of the jobs that wait there is at most one, the newest. A job handles its own errors.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Do this as soon as what is under way is done; returns at once, from any thread."""
        with self._lock:
            self._job = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_jobs, name=self._name, daemon=True)
                self._thread.start()  # under the lock: `wait` never joins a thread that has not begun

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; False if that takes longer."""
        with self._lock:
            thread = self._thread
        if thread is not None:  # not under the lock, which the thread needs in order to end
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run_jobs(self) -> None:
        while True:
            with self._lock:
                job, self._job = self._job, None
                if job is None:
                    # under the same lock: whoever asks now starts another thread, and no job is left behind
                    self._thread = None
                    return
            job()
