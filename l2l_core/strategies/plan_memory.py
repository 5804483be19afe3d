"""The exact walk: what a plan has on the device and on the host at each of its operations, without running it.

It holds names of what the execution holds as tensors, and reads the bytes off them. Storages at cuts that several hold are
counted once, and twice where a stage has made its output again while the first one is kept.
`tests/core/strategies/test_walk.py` compares it with the meter at every operation of random plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from l2l_core.strategies.frame_lifetimes import FirstRun, FrameReport, StageReleases
from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, PRE, PREX, RUN_KINDS, B, Operation
from l2l_core.strategies.plan_execution import ExecutedOperation
from l2l_core.strategies.stage_costs import StageCosts, cost_kind

_OFFLOAD_OF = {PRE: OFF, PREX: OFFX}


StorageCopies = dict[
    int, int
]  # storages at cuts, each with the run again that made this copy of it; 0 stands for first runs


class _RecordCopies(NamedTuple):
    is_first_run: bool  # whether it is of a first run
    inputs: StorageCopies
    outputs: StorageCopies


class OperationMemory(NamedTuple):
    """One operation of a walk, in bytes."""

    operation: Operation
    peak_bytes: int  # most on the device during it
    bytes_after: int
    host_bytes: int  # on the host after it
    moved_bytes: int  # over the link


def simulate_memory(costs: StageCosts, operations: Iterable[Operation]) -> list[OperationMemory]:
    """Walk through a checked plan for one micro-batch."""
    state = PlanMemory(costs)
    return [state.apply(operation) for operation in operations]


def fit_costs(costs: StageCosts, logs: Sequence[Sequence[ExecutedOperation]]) -> None:
    """Fill in what metered executions of plans tell, in which nothing goes to the host."""
    for log in logs:
        _add_log(costs, log)
    for log in logs:
        state = PlanMemory(costs)
        for done in log:
            state.apply_measured(done)


def _add_log(costs: StageCosts, log: Sequence[ExecutedOperation]) -> None:
    begun: dict[int, str] = {}
    for done in log:
        kind, i = done.operation
        begun.setdefault(i, kind)
        if kind == B:
            costs.record_bytes.setdefault((i, begun[i] == FALL), done.record_bytes)
            costs.pending_gradient_bytes[i] = done.pending_gradient_bytes
        if done.frame_report:
            _add_frames(costs, kind, i, done.frame_report, {stage: each == FALL for stage, each in begun.items()})


def _add_frames(costs: StageCosts, kind: str, i: int, frames: FrameReport, kept: Mapping[int, bool]) -> None:
    if kind == F0:
        costs.late_storages.setdefault(i, frames.late_storages)
    for j, nbytes in frames.nbytes.items():
        costs.frame_bytes[i, j, kept[j]] = nbytes
    ends = costs.releases.setdefault(i, StageReleases())
    ends.add_run(frames.releases, kept)
    costs.first_runs.setdefault((cost_kind(kind), i), FirstRun(frames.peak_by_position, ends))


class PlanMemory:
    """What is held between two operations, in names.

    Invariant: `bytes` is what the meter counts at that moment.
    """

    def __init__(self, costs: StageCosts) -> None:
        self._costs, self._structure = costs, costs.structure
        self._first_runs = 0  # the stage whose first run is next
        self._reruns = 0  # how many runs again there were
        self._boundary: StorageCopies = {}
        self._late_storages: StorageCopies = {}  # what the model's frames let go of when they go on
        self._next_input: tuple[int, StorageCopies] | None = None
        self._kept_inputs: dict[int, StorageCopies] = {}
        self._records: dict[int, _RecordCopies] = {}
        self._buffer_copies: set[int] = set()
        self._finished_backwards: list[int] = []  # stages whose backward is over
        self._sending: list[tuple[tuple[str, int], StorageCopies]] = []
        self._on_host: dict[tuple[str, int], StorageCopies] = {}  # gone to the host
        self._host_bytes: dict[tuple[str, int], int] = {}

    def device_bytes(self) -> int:
        """Add up what is on the device."""
        c, s = self._costs, self._structure
        swept = range(self._first_runs)
        total = (
            c.base_bytes
            + sum(c.gradient_bytes.get(i, 0) for i in self._finished_backwards)
            + sum(c.constant_bytes.get(i, 0) for i in swept)
        )
        total += sum(s.buffer_bytes[i] for i in self._buffer_copies)
        total += sum(self._frame_bytes(self._first_runs - 1, i) for i in swept)
        if s.stages - 1 in self._records:
            total += c.loss_bytes
        if self._finished_backwards:
            total += c.pending_gradient_bytes[self._finished_backwards[-1]]
        total += sum(
            c.record_bytes.get((i, record.is_first_run), 0)
            for i, record in self._records.items()
            if (OFF, i) not in self._on_host
        )
        return total + sum(s.nbytes[storage] for storage, _ in self._on_device())

    def _frame_bytes(self, at: int, i: int) -> int:
        """Return what the model's frames alone hold of stage i when they stand at the end of stage `at`."""
        return self._costs.frame_bytes.get((at, i, i in self._records), 0) if at < self._structure.stages - 1 else 0

    def _on_device(self) -> set[tuple[int, int]]:
        away = [copies.items() for copies in self._on_host.values()]
        return (self._held_copies() | self._late_storages.items()).difference(*away)

    def _held_copies(self) -> set[tuple[int, int]]:
        """Find the copies at cuts that are held by more than the model's frames."""
        held = [self._boundary, *self._kept_inputs.values(), *([self._next_input[1]] if self._next_input else ())]
        for record in self._records.values():
            held += [record.inputs, record.outputs]
        return {copy for copies in held for copy in copies.items()}

    # -- one operation -------------------------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> OperationMemory:
        """Go on by one operation."""
        kind, i = operation
        if kind not in RUN_KINDS and kind != B:
            return self._apply_move(kind, i, operation)
        was = self.device_bytes()
        high = (
            was + self._first_run_bytes(kind, i)
            if self._first_runs < self._structure.stages
            else self._rerun_bytes(kind, i)
        )
        self._end_operation(kind, i)
        unsettled = self.device_bytes()
        self._finish_sends()
        return OperationMemory(
            operation, max(was, high, unsettled), self.device_bytes(), sum(self._host_bytes.values()), 0
        )

    def apply_measured(self, done: ExecutedOperation) -> None:
        """Go on by one operation that was metered, and take what it tells."""
        kind, i = done.operation
        c = self._costs
        if self._first_runs == self._structure.stages:
            of_first = self._begin_operation(kind, i)
            c.rerun_bytes.setdefault((cost_kind(kind), i, of_first), done.peak_bytes - self.device_bytes())
        self._end_operation(kind, i)
        if kind == B and i not in c.gradient_bytes:
            c.gradient_bytes[i] = 0
            c.gradient_bytes[i] = done.bytes_after - self.device_bytes()
        elif i == self._structure.stages - 1 and not c.loss_bytes:
            c.loss_bytes = done.bytes_after - self.device_bytes()

    def _first_run_bytes(self, kind: str, i: int) -> int:
        """Return how much more the first run of a stage needs than there is: frames of the model let go of older things in it."""
        most = gone = 0
        alone = {storage for storage, _ in self._late_storages.items() - self._held_copies()}
        for part in self._costs.first_run(kind, i).segments:
            most = max(most, part.peak_bytes - gone)
            if part.item is not None:
                storage, stage = part.item
                gone += part.nbytes if (storage in alone if stage < 0 else (stage in self._records) == part.kept) else 0
        return most

    def _rerun_bytes(self, kind: str, i: int) -> int:
        of_first = self._begin_operation(kind, i)
        return self.device_bytes() + self._costs.extra_bytes(kind, i, of_first)

    def _begin_operation(self, kind: str, i: int) -> bool:
        """Let go of what an operation lets go of first; returns whether it reads a record of a first run."""
        if kind == B:
            self._kept_inputs.pop(i, None)
            self._buffer_copies.discard(i)
            if self._next_input and self._next_input[0] == i + 1:
                self._next_input = None
            return self._records[i].is_first_run
        if not self._next_input or self._next_input[0] != i:
            self._next_input = i, self._kept_inputs[i]
        if kind == FCK:
            self._kept_inputs[i] = self._next_input[1]
        elif kind == FALL:
            self._kept_inputs.pop(i, None)
        return False

    def _end_operation(self, kind: str, i: int) -> None:
        s = self._structure
        if kind == B:
            del self._records[i]
            self._finished_backwards.append(i)
            return
        is_first, is_last = self._first_runs < s.stages, i == s.stages - 1
        if not is_first:
            self._reruns += 1
        given = self._boundary if is_first else self._next_input[1]  # type: ignore[index]
        following = {storage: given.get(storage, self._reruns) for storage in s.storages_of(s.live[i + 1])}
        if kind == FALL:
            read = {storage: given[storage] for storage in s.storages_of(s.reads[i])}
            made = {storage: given.get(storage, self._reruns) for storage in s.storages_of(s.outputs_of(i))}
            self._records[i] = _RecordCopies(is_first, read, made)
        if not is_first:
            self._next_input = None if is_last else (i + 1, following)
            return
        if kind == FCK:
            self._kept_inputs[i] = given
        if kind != FALL:
            self._buffer_copies.add(i)
        self._first_runs, self._boundary = i + 1, following
        self._late_storages = {} if is_last else dict.fromkeys(self._costs.late_storages.get(i, ()), 0)

    # -- the host ------------------------------------------------------------------------------------------------------

    def _apply_move(self, kind: str, i: int, operation: Operation) -> OperationMemory:
        was = self.device_bytes()
        if kind in _OFFLOAD_OF:
            self._finish_sends()
            del self._on_host[_OFFLOAD_OF[kind], i]
            moved = self._host_bytes.pop((_OFFLOAD_OF[kind], i))
        else:
            own = self._costs.record_bytes.get((i, self._records[i].is_first_run), 0) if kind == OFF else 0
            going = self._movable(kind, i)
            moved = own + sum(self._structure.nbytes[storage] for storage, _ in going.items() & self._on_device())
            self._host_bytes[kind, i] = moved
            self._sending.append(((kind, i), going))
        return OperationMemory(
            operation, max(was, self.device_bytes()), self.device_bytes(), sum(self._host_bytes.values()), moved
        )

    def _movable(self, kind: str, i: int) -> StorageCopies:
        copies = self._kept_inputs[i] if kind == OFFX else self._records[i].inputs
        return {storage: run for storage, run in copies.items() if storage in self._structure.movable_storages(i)}

    def _finish_sends(self) -> None:
        self._on_host.update(self._sending)
        self._sending.clear()
