"""Process that trains segments for a study: plan and tasks on its input, answers in JSON lines.

    input     header, plan, {"segment": "s0-g0", "names": ["plain"]}, {"stop": true}, ...
    output    {"step": 1, "flop": 10, "tokens": 8, "loss": 2.5}, ..., then {"end": "finished"}, "stopped" or an error

It ends as soon as its input ends, so none is left behind by a study that was killed.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import psutil
import torch

from workbench.study.segment import Counts, SharedSegment
from workbench.study.segment_queue import SegmentTask
from workbench.study.segment_training import StudyStopped, TrainingPlan, train_segment
from workbench.study.study_records import require

# Settings of PyTorch on which the bits depend: how to read and how to set them.
TORCH_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
)
Answer = dict[str, Any] | None  # None: the process has ended


class WorkerProcess:
    """The parent's side of one process.

    Args:
        payload: the plan, from `pack_plan`.
        receive: gets this object and each answer, on a thread.
    """

    def __init__(self, payload: bytes, receive: Callable[[WorkerProcess, Answer], None]) -> None:
        self.task: SegmentTask | None = None
        self.has_trained = False  # so that its memory is at its usual size
        # A session to itself: an interrupt from the keyboard is for the parent.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        header = {"bytes": len(payload), "sys.path": sys.path}
        self._write(json.dumps(header).encode() + b"\n" + payload)
        self._reader = threading.Thread(target=self._read, args=(receive,), name="study worker", daemon=True)
        self._reader.start()

    def begin(self, task: SegmentTask) -> None:
        """Train a segment."""
        self.task = task
        self._write(json.dumps({"segment": task.segment.name, "names": task.names}).encode() + b"\n")

    def stop(self) -> None:
        """Save the segment after the current step and end it."""
        self._write(b'{"stop": true}\n')

    def close(self) -> None:
        """End the process; steps since its last save are lost."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        pipes: Any = self._process.stdin, self._process.stdout
        for pipe in pipes:
            with suppress(BrokenPipeError):  # what was not written any more
                pipe.close()

    @property
    def rss(self) -> int:
        """Bytes of host memory that it holds; 0 if it has ended."""
        try:
            return psutil.Process(self._process.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    @property
    def exit_code(self) -> int:
        """Its exit status, once it has ended."""
        return self._process.wait()

    def _write(self, data: bytes) -> None:
        pipe: Any = self._process.stdin
        with suppress(BrokenPipeError):  # it has ended, which the reading thread reports
            pipe.write(data)
            pipe.flush()

    def _read(self, receive: Callable[[WorkerProcess, Answer], None]) -> None:
        pipe: Any = self._process.stdout
        for line in pipe:
            receive(self, json.loads(line))
        receive(self, None)


def pack_plan(plan: TrainingPlan) -> bytes:
    """Return a plan and settings of PyTorch as bytes, functions of the notebook included.

    Raises:
        ValueError: a part of it cannot be sent to another process.
    """
    try:
        return require("cloudpickle").dumps((plan, [read() for read, _ in TORCH_SETTINGS]))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            raise
        raise ValueError(
            f"make_relay, batches or a schedule cannot be sent to another process ({type(error).__name__}: {error}): create "
            "what they use inside of these functions, or pass workers=1"
        ) from error


def unpack_error(answer: dict[str, Any]) -> Exception:
    """Return the exception of an answer."""
    return require("cloudpickle").loads(base64.b64decode(answer["error"]))


# -- in the process ----------------------------------------------------------------------------------------------------


class _TaskRunner:
    """Trains one segment after the other; a thread reads the input meanwhile."""

    def __init__(self, source: IO[bytes], answers: IO[bytes]) -> None:
        header = json.loads(source.readline())
        sys.path[:] = header["sys.path"]
        self._payload = source.read(header["bytes"])
        self._plan: TrainingPlan | None = None
        self._source, self._answers, self._stops = source, answers, False
        self._tasks: list[dict[str, Any]] = []
        self._has_task = threading.Semaphore(0)
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def run(self) -> None:
        """Train until the input ends, which ends the process."""
        while True:
            self._has_task.acquire()
            self._train(self._tasks.pop(0))

    def _read(self) -> None:
        for line in self._source:
            task = json.loads(line)
            if "stop" in task:
                self._stops = True
            else:
                self._tasks.append(task)
                self._has_task.release()
        os._exit(1)  # at once, without the save that a step would make: the parent has been killed

    def _train(self, task: dict[str, Any]) -> None:
        try:
            plan = self._load_plan()
            train_segment(SharedSegment(plan.folder, task["segment"]), task["names"], plan, self._report)
        except StudyStopped:
            self._answer({"end": "stopped"})
        except Exception as error:
            self._answer({"end": "failed", "error": _pack_error(error)})
        else:
            self._answer({"end": "finished"})

    def _load_plan(self) -> TrainingPlan:
        plan = self._plan
        if plan is None:
            plan, settings = require("cloudpickle").loads(self._payload)
            self._plan = plan
            for (_, change), value in zip(TORCH_SETTINGS, settings, strict=True):  # now: imports may have changed them
                change(value)
        return plan

    def _report(self, counts: Counts, loss: float | None) -> None:
        self._answer({**vars(counts), "loss": loss})
        if self._stops:
            raise StudyStopped

    def _answer(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer).encode() + b"\n")
        self._answers.flush()


def _pack_error(error: Exception) -> str:
    dumps = require("cloudpickle").dumps
    try:
        data = dumps(error)
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", []):
            plain.add_note(note)
        data = dumps(plain)
    return base64.b64encode(data).decode()


def main() -> None:
    """Train for the study at the other end of the pipes; prints are written to the error stream."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _TaskRunner(sys.stdin.buffer, answers).run()
