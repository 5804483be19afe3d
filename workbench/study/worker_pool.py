"""Processes that train segments of a study at once, as many as cores and memory allow."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Literal, cast

import psutil
import torch

from workbench.study.segment import Counts
from workbench.study.segment_queue import SegmentQueue
from workbench.study.segment_training import TrainingPlan
from workbench.study.study_progress import StudyProgress
from workbench.study.worker_process import Answer, WorkerProcess, pack_plan, unpack_error

Workers = int | Literal["auto"]
ANSWER_S = 0.5  # until a request to stop is noticed
MEMORY_MARGIN = 1.25  # free memory that a further process needs, in sizes of the largest one


def check_workers(workers: object) -> Workers:
    """Return a number of processes, or "auto".

    Raises:
        ValueError: it is neither.
    """
    if workers == "auto" or (isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1):
        return cast(Workers, workers)
    raise ValueError(f'workers={workers!r}: pass a number of processes of at least 1, or "auto"')


def most_workers(workers: Workers) -> int:
    """Return the largest number of processes: for "auto", one per `torch.get_num_threads()` cores, and one with a GPU."""
    if workers != "auto":
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if torch.cuda.is_available() else max(1, cores // torch.get_num_threads())


class WorkerPool:
    """Trains the segments of a queue in several processes; each segment has the bits that it has alone.

    Args:
        plan: of the study.
        workers: number of processes, or "auto".
        segments: the queue.
        progress: of the study.
        stops: returns True when the study shall stop.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        workers: Workers,
        segments: SegmentQueue,
        progress: StudyProgress,
        stops: Callable[[], bool],
    ) -> None:
        self._payload, self._most, self._watches_memory = pack_plan(plan), most_workers(workers), workers == "auto"
        self._segments, self._progress, self._stops = segments, progress, stops
        self._workers: list[WorkerProcess] = []
        self._answers: queue.Queue[tuple[WorkerProcess, Answer]] = queue.Queue()
        self._failure: Exception | None = None
        self._is_stopping = False

    def run(self) -> None:
        """Train until the queue is empty or the study stops.

        Raises:
            Exception: of the first segment that failed; the others are saved.
        """
        try:
            self._assign()
            while any(worker.task for worker in self._workers):
                self._receive()
                self._assign()
        finally:
            for worker in self._workers:
                worker.close()
        if self._failure is not None:
            raise self._failure

    def _assign(self) -> None:
        """Give segments that are ready to processes without one; start processes while there is room."""
        if self._stops() or self._failure is not None:
            self._stop()
            return
        while task := self._segments.take():
            worker = next((each for each in self._workers if each.task is None), None) or self._start()
            if worker is None:
                self._segments.give_back(task)
                return
            self._progress.begin(task)
            worker.begin(task)

    def _start(self) -> WorkerProcess | None:
        """Start a process; None if there are enough, or memory is short."""
        if len(self._workers) >= self._most or not (self._has_memory() or not self._workers):
            return None
        worker = WorkerProcess(self._payload, lambda sender, answer: self._answers.put((sender, answer)))
        self._workers.append(worker)
        return worker

    def _has_memory(self) -> bool:
        """Return True if one more process fits, as far as those that have trained a step show."""
        if not self._watches_memory:
            return True
        needed = MEMORY_MARGIN * max((worker.rss for worker in self._workers), default=0)
        return all(worker.has_trained for worker in self._workers) and psutil.virtual_memory().available > needed

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            for worker in self._workers:
                worker.stop()

    def _receive(self) -> None:
        """Take one answer, or none after a moment."""
        try:
            worker, answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            return
        task = worker.task
        if task is None:
            return
        if answer is None:
            code = worker.exit_code
            self._failure = self._failure or RuntimeError(
                f"the process that trained {task} ended with exit status {code}, without an error of Python: it may have run "
                "out of memory; run() resumes, also with fewer workers="
            )
        elif "step" in answer:
            worker.has_trained = worker.has_trained or answer["loss"] is not None
            counts = Counts(answer["step"], answer["flop"], answer["tokens"])
            self._progress.update(task, counts, answer["loss"])
            return
        elif answer["end"] == "failed":
            self._failure = self._failure or unpack_error(answer)
        elif answer["end"] == "finished":
            self._segments.finish(task)
        worker.task = None
        self._progress.end(task)
