"""Threads on which devices and the EPS work, one thing after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from l2l_core.devices.process import Process


class _Serial(ThreadPoolExecutor):
    """One thread, of the process that made it."""

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1, thread_name_prefix=f"relay-{name}")
        self._name, self._process = name, Process()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As in the base class.

        Raises:
            RuntimeError: in a process that was forked since.
        """
        self._process.check(f"the device's or the relay's thread {self._name!r}")
        return super().submit(fn, *args, **kwargs)


def serial_thread(name: str, cores: int = 1) -> ThreadPoolExecutor:
    """Start one worker thread that runs what is submitted in order, each operation of PyTorch on `cores` cores.

    PyTorch counts its CPU threads per calling thread. A new thread takes the default at its first operation, whatever it
    was told before, so it asks first and is told then. `set_num_threads` also changes the default for others, so the
    caller's number is put back.
    """
    executor = _Serial(name)
    threads = torch.get_num_threads()
    executor.submit(torch.get_num_threads).result()
    executor.submit(torch.set_num_threads, cores).result()
    torch.set_num_threads(threads)
    return executor


def sleep_until(until_s: float) -> None:
    """Sleep until time.perf_counter() reaches `until_s`, to within tens of microseconds."""
    while (left_s := until_s - time.perf_counter()) > 0:
        # A sleep ends up to tens of microseconds late (Linux lets timers slip by 50), so the last of it is spent awake.
        time.sleep(left_s - 5e-5 if left_s > 1e-4 else 0.0)
