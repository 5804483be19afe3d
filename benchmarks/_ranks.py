"""Processes with a process group, each on separate cores, that run the given functions one after another."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_ANSWER_S = 3600.0


class Ranks(AbstractContextManager["Ranks"]):
    """Processes of one process group.

    Args:
        count: number of processes.
        cores: cores and threads per process; rank r has the r-th group of cores, cyclically if the machine has too few.
        method: start method of `multiprocessing`. "forkserver" is quick: the libraries given to it are loaded once. "spawn"
            is for GPUs, which must not be used before a fork.
        backend: backend of the process group.
    """

    def __init__(self, count: int, cores: int = 1, method: str = "spawn", backend: str = "gloo") -> None:
        context = multiprocessing.get_context(method)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(count)]
        self._processes = [
            context.Process(target=_serve, args=(rank, count, cores, backend, self._store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        self._pipes = [ours for ours, _ in pipes]
        for _, theirs in pipes:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Let every rank call ``function(rank, count, *args)``; gives what it returned, by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_ANSWER_S):
                raise TimeoutError(f"rank {rank} has not answered for {_ANSWER_S:g} s")
            try:
                good, answer = pipe.recv()
            except EOFError:
                self._processes[rank].join()
                code = self._processes[rank].exitcode
                raise RuntimeError(f"rank {rank} ended in mid-work with exit code {code}") from None
            if not good:
                raise RuntimeError(f"rank {rank}:\n{answer}")
            answers.append(answer)
        return answers

    def __exit__(self, kind: object, error: object, at: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if process.is_alive() and error is None:
                pipe.send(None)
            elif process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, count: int, cores: int, backend: str, port: int, pipe: Connection) -> None:
    all_cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {all_cores[i % len(all_cores)] for i in range(rank * cores, (rank + 1) * cores)})
    torch.set_num_threads(cores)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    while (told := pipe.recv()) is not None:
        function, args = told
        try:
            pipe.send((True, function(rank, count, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


def timed(run: Callable[[], Any]) -> dict[str, float]:
    """Begin together with all ranks; gives seconds, and those of this process on its core, until this rank is done."""
    dist.barrier()
    began_s, worked_s = time.perf_counter(), time.process_time()
    run()
    seconds, worked_s = time.perf_counter() - began_s, time.process_time() - worked_s
    dist.barrier()  # ranks that are still running are not disturbed
    return {"seconds": seconds, "core_s": worked_s}


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@contextmanager
def most_resident(every_s: float = 1e-3) -> Iterator[list[int]]:
    """Sample the bytes of this process; the list that is yielded holds the most."""
    most, over = [resident_bytes()], threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            most[0] = max(most[0], resident_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()
