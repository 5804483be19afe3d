"""An executor that runs only the newest job and drops jobs that it has replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable

Job = Callable[[], None]


class LatestExecutor:
    """Runs jobs one at a time on a thread that exists only while a job is pending.

    Invariant: at most one job waits, the newest. A job handles its own exceptions.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Run `job` after the current one, in place of a waiting job; return at once."""
        with self._lock:
            self._job = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_jobs, name=self._name, daemon=True)
                self._thread.start()  # under the lock: `wait` never joins a thread that has not started

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is left; return False after `timeout_s` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:  # without the lock, which the thread needs to end
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run_jobs(self) -> None:
        while True:
            with self._lock:
                job, self._job = self._job, None
                if job is None:
                    # under the same lock: the next `submit` starts another thread, and no job is left behind
                    self._thread = None
                    return
            job()
