"""Processes with a rank each: started together, asked together, and ended together, whatever happens to one of them."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

from workbench.ranks.messages import RankRequest, RankResponse
from workbench.ranks.rank_server import run_rank
from workbench.ranks.remote_rank import RemoteRank
from workbench.session import Failure, Session

START_S, END_S = 180.0, 20.0  # how long ranks may take to begin, and to end when they are asked to


class LaunchError(RuntimeError):
    """Says that ranks could not begin; none is left."""


class RankProcesses:
    """The ranks of one training, each in a process of its own on this machine.

    Invariant: questions reach all ranks in one order. When the other side of its pipe is gone a rank ends by itself, so none
    is left behind by a kernel that was killed.

    Args:
        train: makes a rank's session; a function in a module that the processes can import.
        count: how many.

    Raises:
        TypeError, ValueError: no such function or number.
        LaunchError: a rank could not begin; says which and why.
    """

    def __init__(self, train: Callable[[], Session], count: int) -> None:
        _check_arguments(train, count)
        self.changed = threading.Condition()
        self.on_message: Callable[[], None] = lambda: None  # called after anything has come from a rank
        # Here, where it outlives every rank: whoever notices that one is gone leaves word in it
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._remotes = [self._start(train, rank, count) for rank in range(count)]
        threading.Thread(target=self._read_messages, name="ranks", daemon=True).start()
        try:
            self._wait_until_ready()
        except BaseException:
            self.close(0.0)
            raise

    def _start(self, train: Callable[[], Session], rank: int, count: int) -> RemoteRank:
        context = multiprocessing.get_context("spawn")  # not fork: this process has threads
        here, there = context.Pipe()
        args = (train, rank, count, self._store.port, there)
        process = context.Process(target=run_rank, args=args, name=f"rank {rank}", daemon=True)
        process.start()
        there.close()  # so that the end of the process is the end of its pipe
        return RemoteRank(rank, process, here, self.changed)

    def _wait_until_ready(self) -> None:
        def over() -> bool:
            return any(one.failure or one.ended for one in self) or all(one.is_ready for one in self)

        with self.changed:
            if not self.changed.wait_for(over, START_S):
                late = [one.rank for one in self if not one.is_ready]
                raise LaunchError(f"ranks {late} have not begun within {START_S:g} s: does train wait for something?")
            failed = next((one for one in self if one.failure), None) or next((one for one in self if one.ended), None)
        if failed is not None:
            why = failed.failure.traceback if failed.failure is not None else failed.ended
            raise LaunchError(f"rank {failed.rank} of {len(self)} could not begin, and all were ended: {why}")

    def __getitem__(self, rank: int) -> RemoteRank:
        return self._remotes[rank]

    def __len__(self) -> int:
        return len(self._remotes)

    def __iter__(self) -> Iterator[RemoteRank]:
        return iter(self._remotes)

    def call_all(self, method: str, *args: Any, **options: Any) -> list[RankResponse]:
        """Let every rank call a verb of its session, and wait for all; a rank that has ended answers with that."""
        number = next(_request_numbers)
        for one in self:
            one.send(RankRequest(number, method, args, options))
        answers: dict[int, RankResponse] = {}

        def all_there() -> bool:
            for one in [one for one in self if one.rank not in answers]:
                if (answer := one.take_response(number)) is not None:
                    answers[one.rank] = answer
                elif one.ended:
                    answers[one.rank] = RankResponse(number, _lost_rank_failure(one))
            return len(answers) == len(self)

        with self.changed:
            self.changed.wait_for(all_there)
        return [answers[rank] for rank in range(len(self))]

    def close(self, timeout_s: float = END_S) -> None:
        """Ask all to end, and end those that do not within so many seconds. Closing twice is fine."""
        for one in self:
            with suppress(OSError):  # it has ended
                one.pipe.send_bytes(b"")
        until_s = time.monotonic() + timeout_s
        for one in self:
            one.process.join(max(0.0, until_s - time.monotonic()))
        for one in self:
            if one.process.is_alive():
                one.process.kill()
            one.process.join()

    def _read_messages(self) -> None:
        while pipes := {one.pipe: one for one in self if not one.ended}:
            for pipe in wait(list(pipes)):
                pipes[pipe].read_message()  # type: ignore[index]
            self.on_message()


def _check_arguments(train: object, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise ValueError(f"workers={count!r}: must be 2 or more; a relay alone is shown by Workbench(relay, batches)")
    where, name = getattr(train, "__module__", None), getattr(train, "__qualname__", "<")
    if not callable(train) or where in (None, "__main__") or "<" in name:
        raise TypeError(
            f"train={train!r}: must be a function in a module, which every rank's process imports. In a notebook, write it to "
            "a file beside it (%%writefile my_train.py) and import it from there"
        )


def _lost_rank_failure(one: RemoteRank) -> Failure:
    step = one.snapshot().step + 1
    return Failure(
        step,
        "step",
        "WorkerLostError",
        f"worker {one.rank} is gone: {one.ended}",
        one.failure.traceback if one.failure is not None else "",
        "The others cannot go on without it. Run this cell again to start all of them anew, from a save if there is one.",
    )


_request_numbers = count()
