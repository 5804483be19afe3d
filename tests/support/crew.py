"""Processes that train together, for tests: started once, given one thing after another to do, and watched.

The test process stands where torchrun's agent does: it holds the store and outlives the workers; unless worker 0 does, as where
workers are started by hand. Functions that they run are
in `crew_cases.py`; each is called with the worker's rank and their number first, and what it returns comes back.
"""

import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import HANG_S

FUNCTIONS = sorted(path.stem for path in Path(__file__).parent.glob("crew_*.py"))


@cache
def _context() -> ForkServerContext:
    """Where workers are forked from a process that has imported everything: importing takes each of them seconds.

    That process has no threads, as it has computed nothing; this one has.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", *FUNCTIONS])  # Dynamo, since every optimizer asks for it
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # all that it hears of where modules are
        multiprocessing.forkserver.ensure_running()
    return context


def _serve(rank: int, count: int, port: int | None, pipe: multiprocessing.connection.Connection) -> None:
    """Run what comes through the pipe, until it is closed."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    hosts = port is None and rank == 0
    store = dist.TCPStore("127.0.0.1", port or (0 if hosts else pipe.recv()), is_master=hosts, wait_for_workers=False)
    if hosts:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=HANG_S))
    pipe.send((True, "ready"))
    while (case := pipe.recv()) is not None:
        function, args = case
        torch.manual_seed(1000 * rank)  # nothing may depend on a stream that is each worker's own
        try:
            answer = (True, function(rank, count, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    dist.barrier()
    dist.destroy_process_group()


class Crew:
    """So many worker processes with a process group on gloo; where `by_hand`, worker 0 holds the store."""

    def __init__(self, count: int, by_hand: bool = False) -> None:
        self.count, self._by_hand = count, by_hand
        self._start()

    def _start(self) -> None:
        context, count = _context(), self.count
        self._store = None if self._by_hand else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes, port = [context.Pipe() for _ in range(count)], None if self._store is None else self._store.port
        self.processes = [
            context.Process(target=_serve, args=(rank, count, port, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        self._pipes = [pipe for pipe, _ in pipes]
        for _, theirs in pipes:
            theirs.close()  # so that the end of a process is the end of its pipe
        if port is None:
            port = self._pipes[0].recv()
            for pipe in self._pipes[1:]:
                pipe.send(port)
        self._answers(HANG_S)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Let every worker call ``function(rank, count, *args)``; what it returned, by rank. An error in any fails the test."""
        if not all(process.is_alive() for process in self.processes):  # a test before this one has failed
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._answers(HANG_S)

    def run_while_one_dies(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Do the same where a worker kills itself; None in its place."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._answers(HANG_S, may_die=True)

    def _answers(self, limit_s: float, may_die: bool = False) -> list[Any]:
        until_s = time.monotonic() + limit_s
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, until_s - time.monotonic())):
                self._kill()
                raise AssertionError(f"worker {rank} has not answered within {limit_s} s: does it hang?")
            try:
                answers.append(pipe.recv())
            except EOFError:
                assert may_die, f"worker {rank} has died"
                self.processes[rank].join(limit_s)  # its pipe ends first, and `run` asks whether it is alive
                answers.append((True, None))
        errors = [f"worker {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the processes: in peace if they live, else for good."""
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            if process.is_alive() and all(each.is_alive() for each in self.processes):
                with suppress(OSError):  # it was just dying, as some tests want it to
                    pipe.send(None)
        for process in self.processes:
            process.join(20 if all(each.exitcode in (None, 0) for each in self.processes) else 1)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
