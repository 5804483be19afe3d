"""The processes of all ranks: started, called and ended together."""

from __future__ import annotations

import multiprocessing
import threading
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

START_S, END_S = 180.0, 20.0  # timeouts for the start and the end of ranks


class LaunchError(RuntimeError):
    """The ranks could not start; all processes were ended."""


class RankProcesses:
    """The ranks of one training, one process each, on this machine.

    Invariant: requests reach all ranks in the same order. A rank ends when its pipe is closed, so it does not outlive a killed
    kernel.

    Args:
        train: creates the session of a rank; a function in a module that the processes can import.
        count: number of ranks.

    Raises:
        TypeError: `train` is not an importable function.
        ValueError: `count` is less than 2.
        LaunchError: a rank could not start; the message has the rank and the cause.
    """

    def __init__(self, train: Callable[[], Session], count: int) -> None:
        _check_arguments(train, count)
        self.changed = threading.Condition()
        self.on_message: Callable[[], None] = lambda: None  # called after every message of a rank
        # In this process, where it outlives every rank: ranks record lost workers in it.
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
        parent_end, child_end = context.Pipe()
        args = (train, rank, count, self._store.port, child_end)
        process = context.Process(target=run_rank, args=args, name=f"rank {rank}", daemon=True)
        process.start()
        child_end.close()  # so that the pipe closes when the process ends
        return RemoteRank(rank, process, parent_end, self.changed)  # pyright: ignore[reportArgumentType] (Windows)

    def _wait_until_ready(self) -> None:
        def is_over() -> bool:
            return any(one.failure or one.ended for one in self) or all(one.is_ready for one in self)

        with self.changed:
            if not self.changed.wait_for(is_over, START_S):
                late = [one.rank for one in self if not one.is_ready]
                raise LaunchError(
                    f"ranks {late} have not started within {START_S:g} s: check that `train` returns without waiting"
                )
            failed = next((one for one in self if one.failure), None) or next((one for one in self if one.ended), None)
        if failed is not None:
            cause = failed.failure.traceback if failed.failure is not None else failed.ended
            raise LaunchError(f"rank {failed.rank} of {len(self)} could not start, and all were ended: {cause}")

    def __getitem__(self, rank: int) -> RemoteRank:
        return self._remotes[rank]

    def __len__(self) -> int:
        return len(self._remotes)

    def __iter__(self) -> Iterator[RemoteRank]:
        return iter(self._remotes)

    def call_all(self, method: str, *args: Any, **options: Any) -> list[RankResponse]:
        """Call a method of every rank's session and wait; an ended rank's response is a failure."""
        number = next(_request_numbers)
        for one in self:
            one.send(RankRequest(number, method, args, options))
        responses: dict[int, RankResponse] = {}

        def is_complete() -> bool:
            for one in [one for one in self if one.rank not in responses]:
                if (response := one.take_response(number)) is not None:
                    responses[one.rank] = response
                elif one.ended:
                    responses[one.rank] = RankResponse(number, _lost_rank_failure(one))
            return len(responses) == len(self)

        with self.changed:
            self.changed.wait_for(is_complete)
        return [responses[rank] for rank in range(len(self))]

    def close(self, timeout_s: float = END_S) -> None:
        """Request all ranks to end, and kill those that do not within the timeout. Further calls do nothing."""
        for one in self:
            with suppress(OSError):  # it has ended already
                one.pipe.send_bytes(b"")
        with self.changed:
            if not self.changed.wait_for(self._have_ended, timeout_s):
                for one in self:
                    if not one.ended:
                        one.process.kill()
            self.changed.wait_for(self._have_ended)

    def _have_ended(self) -> bool:
        # By what the reading thread has seen. A process that two threads join may seem alive to one of them after its end.
        return all(one.ended for one in self)

    def _read_messages(self) -> None:
        while pipes := {one.pipe: one for one in self if not one.ended}:
            for pipe in wait(list(pipes)):
                pipes[pipe].read_message()  # type: ignore[index]  # `wait` returns what it was given
            self.on_message()


def _check_arguments(train: object, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise ValueError(f"workers={count!r}: must be 2 or more; use Workbench(relay, batches) for a single process")
    module, name = getattr(train, "__module__", None), getattr(train, "__qualname__", "<")
    if not callable(train) or module in (None, "__main__") or "<" in name:
        raise TypeError(
            f"train={train!r}: must be a function in a module, because the process of every rank imports it. In a notebook, "
            "write it to a file next to the notebook (%%writefile my_train.py) and import it from there"
        )


def _lost_rank_failure(one: RemoteRank) -> Failure:
    step = one.snapshot().step + 1
    return Failure(
        step,
        "step",
        "WorkerLostError",
        f"worker {one.rank} is gone: {one.ended}",
        one.failure.traceback if one.failure is not None else "",
        "The other workers cannot continue without it. Run this cell again to start all of them anew, from a save if one exists.",
    )


_request_numbers = count()
