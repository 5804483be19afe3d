"""Threads on which devices and the EPS work, one thing after the other; or the caller's own, where nothing is to overlap."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from l2l_core._torch import (
    count_dispatch_modes,
    count_function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from l2l_core.devices.fork_guard import ForkGuard


class FutureLike(Protocol):
    """Work that was submitted; a `Future` is one."""

    def result(self) -> Any:
        """Wait for it; raise what it raised."""

    def exception(self) -> BaseException | None:
        """Wait for it; return what it raised."""


class Executor(Protocol):
    """Who does what is submitted, in order; an `Executor` is one."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> FutureLike: ...


class _FinishedFuture:
    """A job that is over."""

    def __init__(self, value: Any, error: Exception | None) -> None:
        self._value, self._error = value, error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self) -> Exception | None:
        return self._error


class InlineExecutor:
    """The caller's own hands: what is submitted is done before `submit` returns, on as many cores as compute has.

    For whoever would wait for it anyway. A thread would take a core of two that compute shares, and turns for Python's lock.

    Args:
        state: entered meanwhile, so that the work meets nothing of what the caller's thread stands in.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context = context

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> FutureLike:
        """Do it; what it raises is for whoever waits, as with a thread."""
        try:
            with self._context():
                return _FinishedFuture(fn(*args), None)
        except Exception as error:
            return _FinishedFuture(None, error)


class NoTorchModes(AbstractContextManager[None]):
    """Shows operations in the block to no mode in force: to none of the user's, and none of the engine's.

    There is one at every copy, and a generator would take three times as long. PyTorch's own guards are not for this: they
    take the operations of tensor subclasses away with the modes.
    """

    def __enter__(self) -> None:
        self._functions = [pop_function_mode() for _ in range(count_function_modes())]
        self._dispatch = [pop_dispatch_mode() for _ in range(count_dispatch_modes())]

    def __exit__(self, *exc: object) -> None:
        for mode in reversed(self._functions):
            push_function_mode(mode)
        for mode in reversed(self._dispatch):
            push_dispatch_mode(mode)


class _SerialExecutor(ThreadPoolExecutor):
    """One thread, of the process that made it."""

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1, thread_name_prefix=f"relay-{name}")
        self._name, self._fork_guard = name, ForkGuard()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As in the base class.

        Raises:
            RuntimeError: in a process that was forked since.
        """
        self._fork_guard.check(f"the device's or the relay's thread {self._name!r}")
        return super().submit(fn, *args, **kwargs)


def serial_executor(name: str, cores: int = 1) -> ThreadPoolExecutor:
    """Start one worker thread that runs what is submitted in order, each operation of PyTorch on `cores` cores.

    PyTorch counts its CPU threads per calling thread. A new thread takes the default at its first operation, whatever it
    was told before, so it asks first and is told then. `set_num_threads` also changes the default for others, so the
    caller's number is put back.
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
        # A sleep ends up to tens of microseconds late (Linux lets timers slip by 50), so the last of it is spent awake.
        time.sleep(left_s - 5e-5 if left_s > 1e-4 else 0.0)
