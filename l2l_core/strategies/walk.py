"""The exact walk: what a plan has on the device and on the host at each of its operations, without running it.

It holds names of what the execution holds as tensors, and reads the bytes off them. Storages at cuts that several hold are
counted once, and twice where a stage has made its output again while the first one is kept.
`tests/core/strategies/test_walk.py` compares it with the meter at every operation of random plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from l2l_core.strategies.costs import Costs, sort_of
from l2l_core.strategies.execution import Done
from l2l_core.strategies.frames import Ends, Frames, Rise
from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, PRE, PREX, RUNS, B, Operation

_BACK = {PRE: OFF, PREX: OFFX}


Copies = dict[int, int]  # storages at cuts, each with the run again that made this copy of it; 0 stands for first runs


class _Record(NamedTuple):
    of_first: bool  # whether it is of a first run
    read: Copies
    made: Copies


class Step(NamedTuple):
    """One operation of a walk, in bytes."""

    operation: Operation
    high: int  # most on the device during it
    after: int
    host: int  # on the host after it
    moved: int  # over the link


def walk(costs: Costs, operations: Iterable[Operation]) -> list[Step]:
    """Walk through a checked plan for one micro-batch."""
    state = Walk(costs)
    return [state.step(operation) for operation in operations]


def learn(costs: Costs, logs: Sequence[Sequence[Done]]) -> None:
    """Fill in what metered executions of plans tell, in which nothing goes to the host."""
    for log in logs:
        _tell(costs, log)
    for log in logs:
        state = Walk(costs)
        for done in log:
            state.learn(done)


def _tell(costs: Costs, log: Sequence[Done]) -> None:
    begun: dict[int, str] = {}
    for done in log:
        kind, i = done.operation
        begun.setdefault(i, kind)
        if kind == B:
            costs.record.setdefault((i, begun[i] == FALL), done.record)
            costs.waiting[i] = done.waiting
        if done.frames:
            _tell_frames(costs, kind, i, done.frames, {stage: each == FALL for stage, each in begun.items()})


def _tell_frames(costs: Costs, kind: str, i: int, frames: Frames, kept: Mapping[int, bool]) -> None:
    if kind == F0:
        costs.late.setdefault(i, frames.late)
    for j, nbytes in frames.nbytes.items():
        costs.frames[i, j, kept[j]] = nbytes
    ends = costs.ends.setdefault(i, Ends())
    ends.tell(frames.ends, kept)
    costs.rises.setdefault((sort_of(kind), i), Rise(frames.made, ends))


class Walk:
    """What is held between two operations, in names.

    Invariant: `bytes` is what the meter counts at that moment.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._s = costs, costs.structure
        self._next = 0  # the stage whose first run is next
        self._again = 0  # how many runs again there were
        self._cut: Copies = {}
        self._late: Copies = {}  # what the model's frames let go of when they go on
        self._at: tuple[int, Copies] | None = None
        self._held: dict[int, Copies] = {}
        self._records: dict[int, _Record] = {}
        self._copied: set[int] = set()
        self._backs: list[int] = []  # stages whose backward is over
        self._leaving: list[tuple[tuple[str, int], Copies]] = []
        self._away: dict[tuple[str, int], Copies] = {}  # gone to the host
        self._host: dict[tuple[str, int], int] = {}

    def bytes(self) -> int:
        """Add up what is on the device."""
        c, s = self._costs, self._s
        swept = range(self._next)
        total = c.base + sum(c.grads.get(i, 0) for i in self._backs) + sum(c.constants.get(i, 0) for i in swept)
        total += sum(s.buffer_bytes[i] for i in self._copied)
        total += sum(self._in_frames(self._next - 1, i) for i in swept)
        if s.stages - 1 in self._records:
            total += c.loss
        if self._backs:
            total += c.waiting[self._backs[-1]]
        total += sum(
            c.record.get((i, record.of_first), 0) for i, record in self._records.items() if (OFF, i) not in self._away
        )
        return total + sum(s.nbytes[storage] for storage, _ in self._on_device())

    def _in_frames(self, at: int, i: int) -> int:
        """Return what the model's frames alone hold of stage i when they stand at the end of stage `at`."""
        return self._costs.frames.get((at, i, i in self._records), 0) if at < self._s.stages - 1 else 0

    def _on_device(self) -> set[tuple[int, int]]:
        away = [copies.items() for copies in self._away.values()]
        return (self._kept() | self._late.items()).difference(*away)

    def _kept(self) -> set[tuple[int, int]]:
        """Find the copies at cuts that are held by more than the model's frames."""
        held = [self._cut, *self._held.values(), *([self._at[1]] if self._at else ())]
        for record in self._records.values():
            held += [record.read, record.made]
        return {copy for copies in held for copy in copies.items()}

    # -- one operation -------------------------------------------------------------------------------------------------

    def step(self, operation: Operation) -> Step:
        """Go on by one operation."""
        kind, i = operation
        if kind not in RUNS and kind != B:
            return self._move(kind, i, operation)
        was = self.bytes()
        high = was + self._rise(kind, i) if self._next < self._s.stages else self._top(kind, i)
        self._end(kind, i)
        unsettled = self.bytes()
        self._settle()
        return Step(operation, max(was, high, unsettled), self.bytes(), sum(self._host.values()), 0)

    def learn(self, done: Done) -> None:
        """Go on by one operation that was metered, and take what it tells."""
        kind, i = done.operation
        c = self._costs
        c.seconds[sort_of(kind), i].append(done.seconds)
        if self._next == self._s.stages:
            of_first = self._begin(kind, i)
            c.top.setdefault((sort_of(kind), i, of_first), done.high - self.bytes())
        self._end(kind, i)
        if kind == B and i not in c.grads:
            c.grads[i] = 0
            c.grads[i] = done.after - self.bytes()
        elif i == self._s.stages - 1 and not c.loss:
            c.loss = done.after - self.bytes()

    def _rise(self, kind: str, i: int) -> int:
        """Return how much more the first run of a stage needs than there is: frames of the model let go of older things in it."""
        most = gone = 0
        alone = {storage for storage, _ in self._late.items() - self._kept()}
        for part in self._costs.rise(kind, i).parts:
            most = max(most, part.most - gone)
            if part.what is not None:
                storage, stage = part.what
                gone += part.nbytes if (storage in alone if stage < 0 else (stage in self._records) == part.kept) else 0
        return most

    def _top(self, kind: str, i: int) -> int:
        of_first = self._begin(kind, i)
        return self.bytes() + self._costs.highest(kind, i, of_first)

    def _begin(self, kind: str, i: int) -> bool:
        """Let go of what an operation lets go of first; returns whether it reads a record of a first run."""
        if kind == B:
            self._held.pop(i, None)
            self._copied.discard(i)
            if self._at and self._at[0] == i + 1:
                self._at = None
            return self._records[i].of_first
        if not self._at or self._at[0] != i:
            self._at = i, self._held[i]
        if kind == FCK:
            self._held[i] = self._at[1]
        elif kind == FALL:
            self._held.pop(i, None)
        return False

    def _end(self, kind: str, i: int) -> None:
        s = self._s
        if kind == B:
            del self._records[i]
            self._backs.append(i)
            return
        is_first, is_last = self._next < s.stages, i == s.stages - 1
        if not is_first:
            self._again += 1
        given = self._cut if is_first else self._at[1]  # type: ignore[index]
        following = {storage: given.get(storage, self._again) for storage in s.storages(s.live[i + 1])}
        if kind == FALL:
            read = {storage: given[storage] for storage in s.storages(s.reads[i])}
            made = {storage: given.get(storage, self._again) for storage in s.storages(s.made(i))}
            self._records[i] = _Record(is_first, read, made)
        if not is_first:
            self._at = None if is_last else (i + 1, following)
            return
        if kind == FCK:
            self._held[i] = given
        if kind != FALL:
            self._copied.add(i)
        self._next, self._cut = i + 1, following
        self._late = {} if is_last else dict.fromkeys(self._costs.late.get(i, ()), 0)

    # -- the host ------------------------------------------------------------------------------------------------------

    def _move(self, kind: str, i: int, operation: Operation) -> Step:
        was = self.bytes()
        if kind in _BACK:
            self._settle()
            del self._away[_BACK[kind], i]
            moved = self._host.pop((_BACK[kind], i))
        else:
            own = self._costs.record.get((i, self._records[i].of_first), 0) if kind == OFF else 0
            going = self._movable(kind, i)
            moved = own + sum(self._s.nbytes[storage] for storage, _ in going.items() & self._on_device())
            self._host[kind, i] = moved
            self._leaving.append(((kind, i), going))
        return Step(operation, max(was, self.bytes()), self.bytes(), sum(self._host.values()), moved)

    def _movable(self, kind: str, i: int) -> Copies:
        copies = self._held[i] if kind == OFFX else self._records[i].read
        return {storage: run for storage, run in copies.items() if storage in self._s.movable(i)}

    def _settle(self) -> None:
        self._away.update(self._leaving)
        self._leaving.clear()
