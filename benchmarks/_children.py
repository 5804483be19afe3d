"""Run each task in a forked process, with a time limit.

A fork has everything imported already. The parent must not have computed anything, so that it has no threads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Answer = dict[str, Any]  # values that JSON can hold
MOST_BYTES = 60_000  # of an answer: what a pipe holds before its writer waits


@dataclass
class Child:
    """A process that runs one task, and the pipe for its answer."""

    key: Hashable
    pid: int
    pipe: int
    until_s: float


@dataclass
class Failure:
    """A task without an answer.

    Attributes:
        kind: "failed", "crashed" or "timed out".
        reason: the first line of the error, the wait status or the time limit.
    """

    kind: str
    reason: str


def run(
    tasks: Iterable[tuple[Hashable, Callable[[], Answer]]], jobs: int, limit_s: float
) -> Iterator[tuple[Any, Answer | Failure]]:
    """Run tasks, at most `jobs` at once; yield the key of each and its answer, as they end."""
    children: dict[int, Child] = {}
    waiting = iter(tasks)
    try:
        while True:
            while len(children) < jobs and (following := next(waiting, None)) is not None:
                child = _fork(*following, limit_s)
                children[child.pipe] = child
            if not children:
                return
            ready, _, _ = select.select(list(children), [], [], 0.2)
            for pipe in ready:
                child = children.pop(pipe)
                yield child.key, _collect(child)
            for child in [c for c in children.values() if time.monotonic() > c.until_s]:
                _kill(children.pop(child.pipe))
                yield child.key, Failure("timed out", f"after {limit_s:g} s")
    finally:
        for child in children.values():
            _kill(child)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]


def _fork(key: Hashable, task: Callable[[], Answer], limit_s: float) -> Child:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # so that a time limit ends its own children, too
        os.close(reading)
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        try:
            answer: Answer = {"answer": task()}
        except BaseException as error:
            answer = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        os.write(writing, json.dumps(answer).encode()[:MOST_BYTES])
        os._exit(0)
    os.close(writing)
    return Child(key, pid, reading, time.monotonic() + limit_s)


def _collect(child: Child) -> Answer | Failure:
    written = b""
    while more := os.read(child.pipe, 65_536):
        written += more
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    if not written:
        return Failure("crashed", f"wait status {status}")
    answer = json.loads(written)
    return answer["answer"] if "answer" in answer else Failure("failed", answer["failed"])


def _kill(child: Child) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    os.close(child.pipe)
    os.waitpid(child.pid, 0)
