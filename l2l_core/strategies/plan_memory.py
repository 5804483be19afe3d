"""Symbolic execution of a plan: exact bytes on the device and on the host at each of its operations.

It tracks identifiers of the tensors that the execution holds, and adds up their measured bytes. A storage at a boundary is
counted once for all its holders, and twice if a stage has made it again while the first copy is kept.
`tests/core/strategies/test_walk.py` compares the bytes with the meter at every operation of random plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from l2l_core.strategies.frame_lifetimes import ForwardPosition, FrameReport, StageReleases, divide_run
from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFLOAD_OF, OFFX, RUN_KINDS, B, Operation
from l2l_core.strategies.plan_execution import ExecutedOperation
from l2l_core.strategies.stage_costs import StageCosts, cost_kind

# Storages at boundaries, each with the number of the rerun that made this copy of it; 0 stands for first runs.
StorageCopies = dict[int, int]


class _RecordCopies(NamedTuple):
    is_first_run: bool
    inputs: StorageCopies
    outputs: StorageCopies


class OperationMemory(NamedTuple):
    """Bytes of one operation."""

    operation: Operation
    peak_bytes: int  # on the device, during it
    bytes_after: int
    host_bytes: int  # on the host, after it
    moved_bytes: int  # over the link


def simulate_memory(costs: StageCosts, operations: Iterable[Operation]) -> list[OperationMemory]:
    """Return the bytes of each operation of a checked plan for one micro-batch."""
    state = PlanMemory(costs)
    return [state.apply(operation) for operation in operations]


def fit_costs(costs: StageCosts, logs: Sequence[Sequence[ExecutedOperation]]) -> None:
    """Fill in the bytes of stages from metered executions of plans that offload nothing."""
    peaks: dict[tuple[str, int], dict[ForwardPosition, int]] = {}  # of first runs
    releases: dict[int, StageReleases] = defaultdict(dict)
    for log in logs:
        kinds: dict[int, str] = {}  # of first runs
        for done in log:
            kind, i = done.operation
            kinds.setdefault(i, kind)
            if kind == B:
                costs.record_bytes.setdefault((i, kinds[i] == FALL), done.record_bytes)
                costs.pending_gradient_bytes[i] = done.pending_gradient_bytes
            if frames := done.frame_report:
                kept = {j: each == FALL for j, each in kinds.items()}
                peaks.setdefault((cost_kind(kind), i), frames.peak_by_position)
                for item, found in _group_releases(frames, kept).items():
                    releases[i].setdefault(item, found)
                costs.frame_bytes.update({(i, j, kept[j]): nbytes for j, nbytes in frames.nbytes.items()})
                if kind == F0:
                    costs.late_storages.setdefault(i, frames.late_storages)
    costs.first_runs = {(kind, i): divide_run(peak, releases[i]) for (kind, i), peak in peaks.items()}
    for log in logs:
        state = PlanMemory(costs)
        for done in log:
            state.apply_measured(done)


def _group_releases(frames: FrameReport, kept: Mapping[int, bool]) -> StageReleases:
    found: StageReleases = defaultdict(list)
    for release in frames.releases:
        found[release.item, kept.get(release.item.stage, False)].append(release)
    return found


class PlanMemory:
    """The tensors held between two operations, as identifiers.

    Invariant: `device_bytes` is the meter's count at that moment.
    """

    def __init__(self, costs: StageCosts) -> None:
        self._costs, self._structure = costs, costs.structure
        self._first_runs = 0  # the stage whose first run is next
        self._reruns = 0  # number of reruns so far
        self._boundary: StorageCopies = {}
        self._late_storages: StorageCopies = {}  # held by the model's frames until they resume
        self._next_input: tuple[int, StorageCopies] | None = None
        self._kept_inputs: dict[int, StorageCopies] = {}
        self._records: dict[int, _RecordCopies] = {}
        self._buffer_copies: set[int] = set()
        self._finished_backwards: list[int] = []
        self._sending: list[tuple[tuple[str, int], StorageCopies]] = []
        self._on_host: dict[tuple[str, int], StorageCopies] = {}
        self._host_bytes: dict[tuple[str, int], int] = {}

    def device_bytes(self) -> int:
        """Add up the bytes on the device."""
        c, s = self._costs, self._structure
        total = c.base_bytes + sum(c.gradient_bytes.get(i, 0) for i in self._finished_backwards)
        total += sum(s.buffer_bytes[i] for i in self._buffer_copies)
        for i in range(self._first_runs):
            total += c.constant_bytes.get(i, 0)
            if self._first_runs < s.stages:  # the model's frames are suspended after the latest first run
                total += c.frame_bytes.get((self._first_runs - 1, i, i in self._records), 0)
        if s.stages - 1 in self._records:
            total += c.loss_bytes
        if self._finished_backwards:
            total += c.pending_gradient_bytes[self._finished_backwards[-1]]
        total += sum(self._record_bytes(i) for i in self._records if (OFF, i) not in self._on_host)
        return total + sum(s.nbytes[storage] for storage, _ in self._on_device())

    def _record_bytes(self, i: int) -> int:
        return self._costs.record_bytes.get((i, self._records[i].is_first_run), 0)

    def _on_device(self) -> set[tuple[int, int]]:
        offloaded = [copies.items() for copies in self._on_host.values()]
        return (self._held_copies() | self._late_storages.items()).difference(*offloaded)

    def _held_copies(self) -> set[tuple[int, int]]:
        """Return the copies at boundaries that are held outside of the model's frames."""
        held = [self._boundary, *self._kept_inputs.values(), *([self._next_input[1]] if self._next_input else ())]
        for record in self._records.values():
            held += [record.inputs, record.outputs]
        return {copy for copies in held for copy in copies.items()}

    # -- operations ----------------------------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> OperationMemory:
        """Apply one operation and return its bytes."""
        kind, i = operation
        before, moved_bytes = self.device_bytes(), 0
        if kind not in RUN_KINDS and kind != B:
            moved_bytes = self._copy(kind, i)
            peak = max(before, self.device_bytes())
        else:
            if self._first_runs < self._structure.stages:
                inside = before + self._first_run_bytes(kind, i)
            else:
                of_first = self._begin_operation(kind, i)
                inside = self.device_bytes() + self._costs.rerun_bytes[cost_kind(kind), i, of_first]
            self._end_operation(kind, i)
            peak = max(before, inside, self.device_bytes())
            self._finish_sends()
        return OperationMemory(operation, peak, self.device_bytes(), sum(self._host_bytes.values()), moved_bytes)

    def apply_measured(self, done: ExecutedOperation) -> None:
        """Apply one metered operation, and derive costs from its bytes."""
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
        """Return the peak of a first run above its start; the model's frames release earlier tensors during it."""
        peak = released = 0
        only_in_frames = {storage for storage, _ in self._late_storages.items() - self._held_copies()}
        for part in self._costs.first_runs[cost_kind(kind), i]:
            peak = max(peak, part.peak_bytes - released)
            if part.release is not None:
                storage, stage = part.release.item
                is_counted = storage in only_in_frames if stage < 0 else (stage in self._records) == part.kept
                released += part.release.nbytes if is_counted else 0
        return peak

    def _begin_operation(self, kind: str, i: int) -> bool:
        """Drop the tensors that an operation drops at its start; return whether it reads a record of a first run."""
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
        self._reruns += not is_first
        given = self._boundary if is_first else self._next_input[1]  # type: ignore[index]  # set by the operation before
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

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy(self, kind: str, i: int) -> int:
        """Start to offload or to fetch; return the bytes."""
        if kind in OFFLOAD_OF:
            self._finish_sends()
            del self._on_host[OFFLOAD_OF[kind], i]
            return self._host_bytes.pop((OFFLOAD_OF[kind], i))
        held = self._kept_inputs[i] if kind == OFFX else self._records[i].inputs
        movable = self._structure.movable_storages(i)
        copies = {storage: run for storage, run in held.items() if storage in movable}
        nbytes = sum(self._structure.nbytes[storage] for storage, _ in copies.items() & self._on_device())
        nbytes += self._record_bytes(i) if kind == OFF else 0
        self._host_bytes[kind, i] = nbytes
        self._sending.append(((kind, i), copies))
        return nbytes

    def _finish_sends(self) -> None:
        self._on_host.update(self._sending)
        self._sending.clear()
