"""Threads that run submitted work in order, or an executor that runs it in the caller's thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch

from l2l_core._torch import (
    count_dispatch_modes,
    count_function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)


class InlineExecutor(Executor):
    """Executor that runs the work in `submit`, in the caller's thread and with all its cores.

    Used where the caller would wait anyway: a thread would compete with compute for cores and for the interpreter lock.

    Args:
        context: returns a context entered around the work, so that the caller's modes do not affect it.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context = context

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function now; its error is raised by the future's `result`."""
        future: Future[Any] = Future()
        try:
            with self._context():
                future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class NoTorchModes(AbstractContextManager[None]):
    """Context that hides operations from all active torch modes, the user's and the engine's.

    A class because it is entered at every copy, where a generator would take three times as long. PyTorch's own guards do not
    fit: they also disable tensor subclasses.
    """

    def __enter__(self) -> None:
        self._functions = [pop_function_mode() for _ in range(count_function_modes())]
        self._dispatch = [pop_dispatch_mode() for _ in range(count_dispatch_modes())]

    def __exit__(self, *exc: object) -> None:
        for mode in reversed(self._functions):
            push_function_mode(mode)
        for mode in reversed(self._dispatch):
            push_dispatch_mode(mode)


class ForkGuard:
    """Detects use of a thread-owning object in a forked child, where a wait for its threads would never end."""

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_current(self) -> bool:
        """False in a child that was forked since."""
        return os.getpid() == self._id

    def check(self, what: str) -> None:
        """Raise RuntimeError if this is not the process that made `what`."""
        if not self.is_current:
            raise RuntimeError(
                f"{what} was made in process {self._id}, and this is process {os.getpid()}, forked from it: the threads that "
                "copy and update stayed behind. Make the relay in the process that trains: in one started by "
                "multiprocessing.get_context('spawn'), or after the fork"
            )


class _SerialExecutor(ThreadPoolExecutor):
    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1, thread_name_prefix=f"relay-{name}")
        self._name, self._fork_guard = name, ForkGuard()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._fork_guard.check(f"the device's or the relay's thread {self._name!r}")
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        # The garbage collector may run a destructor in any thread, also in this one, which cannot wait for itself
        super().shutdown(wait and threading.current_thread() not in self._threads, cancel_futures=cancel_futures)


def serial_executor(name: str, cores: int = 1) -> ThreadPoolExecutor:
    """Start one worker thread that runs submitted work in order, each PyTorch operation on `cores` cores.

    PyTorch counts CPU threads per calling thread, and a new thread takes the default at its first operation, overriding any
    earlier setting; so the number is read first and then set. `set_num_threads` also changes the default for other threads, so
    the caller's number is restored.
    """
    executor = _SerialExecutor(name)
    threads = torch.get_num_threads()
    executor.submit(torch.get_num_threads).result()
    executor.submit(torch.set_num_threads, cores).result()
    torch.set_num_threads(threads)
    return executor


def sleep_until(until_s: float) -> None:
    """Sleep until time.perf_counter() reaches `until_s`, to within tens of microseconds."""
    while (left_s := until_s - time.perf_counter()) > 0:
        # Linux ends a sleep up to 50 microseconds late, so the last part is a busy wait.
        time.sleep(left_s - 5e-5 if left_s > 1e-4 else 0.0)
