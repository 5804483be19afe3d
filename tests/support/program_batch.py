"""Programs in a process of their own, so that one that dies or hangs is found, and the rest goes on in another process."""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from program import Program
from program_run import Outcome, judge

BATCH = 100  # programs of one process
START_S, PATIENCE_S = 120.0, 60.0  # to import torch, and for one program
_HERE = Path(__file__).resolve().parent
_FOLDERS = os.pathsep.join([str(_HERE), str(_HERE.parents[1])])


def work() -> None:
    """In the child: judge the programs that come on stdin, a line each, and answer on stdout."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a program prints is no answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(judge(Program.from_json(line)))), file=answers, flush=True)


class Worker:
    """A child process that judges programs; a new one takes the place of one that died. Use as a context manager."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def judge(self, program: Program) -> Outcome:
        """As `program_run.judge`; a death is an outcome, and so is silence."""
        if self._child is None:
            self._start()
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(program.to_json() + "\n")
            self._child.stdin.flush()
            answer = self._answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            self._end()
            return Outcome(program.seed, "hang", f"over {PATIENCE_S:.0f} s", program.features)
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return Outcome(**json.loads(answer))
        code = self._child.wait()
        self._end()
        cause = _cause_of_death(code, self._errors)
        return Outcome(program.seed, "crash", cause, program.features, "".join(self._errors[-60:]))

    def _start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _FOLDERS}
        command = [sys.executable, "-c", "import program_batch; program_batch.work()"]
        pipe = subprocess.PIPE
        self._child = child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=_read, args=(child.stdout, self._answers.put), daemon=True),
            threading.Thread(
                target=_read, args=(child.stderr, lambda line: self._errors.append(line or "")), daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()
        if self._answers.get(timeout=START_S) is None:
            raise RuntimeError("the child could not start:\n" + "".join(self._errors))

    def _end(self) -> None:
        if (child := self._child) is not None:
            self._child = None
            child.kill()
            child.wait()
            for thread in self._threads:
                thread.join()
            for stream in (child.stdin, child.stdout, child.stderr):
                assert stream is not None
                try:
                    stream.close()
                except BrokenPipeError:
                    pass


def run_all(programs: Iterable[Program], jobs: int = 1) -> Iterator[Outcome]:
    """Judge programs, a batch per process, `jobs` processes at a time; outcomes in order."""
    programs = list(programs)
    batches = [programs[i : i + BATCH] for i in range(0, len(programs), BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        for outcomes in pool.map(_run_batch, batches):
            yield from outcomes


def _run_batch(programs: list[Program]) -> list[Outcome]:
    with Worker() as worker:
        return [worker.judge(program) for program in programs]


def _read(stream: IO[str] | None, put: Callable[[str | None], object]) -> None:
    assert stream is not None
    for line in stream:
        put(line)
    put(None)


def _cause_of_death(code: int, errors: list[str]) -> str:
    """Exit code, and the innermost frames of the relay and of all that faulthandler has shown."""
    frames = [line.strip().rsplit("/", 1)[-1] for line in errors if line.startswith("  File")]
    engine = [line.strip().rsplit("/", 1)[-1] for line in errors if line.startswith("  File") and "/l2l_core/" in line]
    return f"exit {code} {frames[:1]} {engine[:1]}"
