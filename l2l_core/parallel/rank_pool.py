"""Processes of one gloo group, which run functions together and end cleanly; or the ranks of a launcher.

Ranks are spawned, since a notebook has threads, so functions and what they are given come from modules. A rank that dies
closes its connections: the others' communication fails at once, or at the timeout if it is only stopped.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from l2l_core.workers import find_launcher, init_process_group

_GRACE_S = 10.0  # for the others, after a rank has failed or ended
_END_S = 20.0


class RankError(RuntimeError):
    """A rank failed or was lost; the pool is closed.

    Attributes:
        causes: by rank, the error or the end of the process.

    Example:
        See `RankPool`.
    """

    def __init__(self, causes: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items())))
        self.causes = causes


class RankPool:
    """Ranks of one process group that wait for functions to run; use it in a `with` statement.

    Invariant: every request reaches all ranks in the same order. Ranks end with the process that made them.

    Args:
        count: number of ranks.
        timeout_s: limit for one message or collective.

    Example:
        >>> from l2l_core.parallel import RankError, RankPool
        >>> with RankPool(2) as pool:
        ...     results = pool.run(divmod)  # called with the rank and the number of ranks: divmod(0, 2), divmod(1, 2)
        ...     try:
        ...         pool.run(divmod, 3)
        ...     except RankError as error:
        ...         print(results, error.causes[1].splitlines()[-1])
        [(0, 0), (0, 1)] TypeError: divmod expected 2 arguments, got 3
    """

    def __init__(self, count: int, timeout_s: float = 60.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(count)]
        self.processes = [
            context.Process(target=_serve, args=(rank, count, self._store.port, timeout_s, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        self._pipes: list[Any] = [ours for ours, _ in pipes]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # so that the pipe closes when the process ends

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, count, *args)`` on every rank; return the results by rank.

        Raises:
            RankError: of every rank that failed or was lost; the pool is closed.
            TypeError: the function or an argument cannot be sent.
        """
        message = _dump((function, args))
        for pipe in self._pipes:
            with suppress(OSError):  # seen when it is read
                pipe.send_bytes(message)
        results, causes = self._answers()
        if causes:
            self.close(0.0)
            raise RankError(causes)
        return [results[rank] for rank in range(len(self._pipes))]

    def _answers(self) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        causes: dict[int, str] = {}
        waiting, until_s = {pipe: rank for rank, pipe in enumerate(self._pipes)}, float("inf")
        while waiting:
            left_s = None if until_s == float("inf") else max(0.0, until_s - time.monotonic())
            ready: list[Any] = wait(list(waiting), left_s)
            if not ready:
                causes |= dict.fromkeys(waiting.values(), f"no answer within {_GRACE_S:g} s of the first failure")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(_GRACE_S)
                    good, answer = False, f"its process ended with exit code {self.processes[rank].exitcode}"
                (results if good else causes)[rank] = answer
                if not good:
                    until_s = min(until_s, time.monotonic() + _GRACE_S)
        return results, causes

    def close(self, timeout_s: float = _END_S) -> None:
        """End all ranks, and kill those that do not end within the timeout."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(b"")
        until_s = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, until_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        self.close(_END_S if error is None else 0.0)


class LaunchedRanks:
    """The ranks of a launcher as a pool: this process is one of them, and each calls `run` alike.

    Use it within `launched_rank`.
    """

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(rank, count, *args)`` here, on copies of the arguments; return the results of all ranks."""
        count = dist.get_world_size()
        results: list[Any] = [None] * count
        dist.all_gather_object(results, function(dist.get_rank(), count, *copy.deepcopy(args)))
        return results


@contextmanager
def ranks_for(count: int, pool: RankPool | None) -> Iterator[RankPool | LaunchedRanks]:
    """Yield the given pool, else the ranks of the launcher, else a new pool for the block.

    Raises:
        ValueError: the pool or the launcher has another number of ranks.
    """
    there = len(pool.processes) if pool else dist.get_world_size() if dist.is_initialized() else count
    if there != count:
        kind = "pool" if pool else "launcher"
        raise ValueError(f"ranks={count}, and the {kind} has {there}: give both the same number")
    if pool is None and dist.is_initialized():
        yield LaunchedRanks()
        return
    with nullcontext(pool) if pool is not None else RankPool(count) as ranks:
        yield ranks


def _dump(request: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    # Not through `Connection.send`, which would put tensors into memory that ranks share with this process.
    function = request[0]
    if getattr(function, "__module__", None) in (None, "__main__"):
        raise TypeError(
            f"{function!r} is defined in a notebook or script, and every rank imports it: write it to a file next to it "
            "(%%writefile my_train.py) and import it from there"
        )
    try:
        message = pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to the ranks: {error}. Take the model's class and the loss from a module, not from a notebook, a "
            "lambda or a function inside a function"
        ) from error
    if b"__main__" in message:
        raise TypeError(
            "the model, the loss or the optimizer is defined in this notebook or script (__main__), and every rank imports it: "
            "write it to a file next to it (%%writefile my_model.py) and import it from there"
        )
    return message


def _serve(rank: int, count: int, port: int, timeout_s: float, pipe: Connection) -> None:
    """Run the requests of the pipe, until it is closed or a request is empty."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout_s))
    failed = False
    with suppress(EOFError, OSError):
        while message := pipe.recv_bytes():
            try:
                function, args = pickle.loads(message)
                answer = pickle.dumps((True, function(rank, count, *args)))
                del function, args
            except BaseException:
                answer, failed = pickle.dumps((False, traceback.format_exc())), True
            pipe.send_bytes(answer)
    end_process_group(not failed)
    os._exit(0)  # threads of gloo that run while the interpreter exits may abort it


def end_process_group(together: bool = True) -> None:
    """End the process group so that no thread of gloo is left; `together` waits for the other ranks first."""
    gc.collect()  # objects of the group in cycles
    if together:
        with suppress(RuntimeError):  # another rank is gone
            dist.barrier()
    dist.destroy_process_group()


@contextmanager
def launched_rank(timeout_s: float = 60.0) -> Iterator[tuple[int, int]]:
    """Join the process group of torchrun or mpirun inside the block; yields the rank and the number of ranks.

    There `run_parallel` and `run_pipeline`, called by every rank alike, train in it and return all ranks' results to each.

    Raises:
        RuntimeError: the process was not started by a launcher.

    Example:
        >>> from l2l_core.parallel import launched_rank
        >>> with launched_rank() as (rank, count):  # in a program that torchrun has started
        ...     print(rank)
        Traceback (most recent call last):
        RuntimeError: no launcher has started this process: run it by `torchrun --standalone --nproc-per-node 2 train.py`, ...
    """
    launcher, rank, count = find_launcher()
    if not launcher:
        raise RuntimeError(
            "no launcher has started this process: run it by `torchrun --standalone --nproc-per-node 2 train.py`, or call "
            "run_pipeline or run_parallel outside of this block, which start ranks by themselves"
        )
    init_process_group(launcher, rank, count, timeout_s)
    is_good = False
    try:
        yield rank, count
        is_good = True
    finally:
        end_process_group(is_good)
