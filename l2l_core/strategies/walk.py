"""The exact walk: what a plan has on the device and on the host at each of its operations, without running it.

It holds names of what the execution holds as tensors, and reads the bytes off them; storages at cuts that several hold
are counted once. `tests/core/strategies/test_walk.py` compares it with the meter at every operation of random plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from l2l_core.strategies.costs import Costs, _sort
from l2l_core.strategies.execution import Done
from l2l_core.strategies.plan import F0, FALL, FCK, OFF, OFFX, PRE, PREX, RUNS, B, Operation

_BACK = {PRE: OFF, PREX: OFFX}


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
        if kind == F0 and begun[i] == F0:
            costs.late.setdefault(i, done.late)
        for j, nbytes in done.frames.items():
            costs.frames[i, j, begun[j] == FALL] = nbytes


class Walk:
    """What is held between two operations, in names.

    Invariant: `bytes` is what the meter counts at that moment.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._s = costs, costs.structure
        self._next = 0  # the stage whose first run is next
        self._kind = ""  # of the last first run
        self._cut: set[int] = set()  # storages, as all sets here
        self._late: set[int] = set()  # what the model's frames let go of when they go on
        self._at: tuple[int, set[int]] | None = None
        self._held: dict[int, set[int]] = {}
        self._records: dict[int, bool] = {}  # whether it is of a first run
        self._copied: set[int] = set()
        self._backs: list[int] = []  # stages whose backward is over
        self._leaving: list[tuple[str, int]] = []
        self._away: dict[tuple[str, int], set[int]] = {}  # storages at cuts that are gone
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
        total += sum(c.record.get((i, first), 0) for i, first in self._records.items() if (OFF, i) not in self._away)
        return total + sum(s.nbytes[storage] for storage in self._storages())

    def _in_frames(self, at: int, i: int) -> int:
        """Return what the model's frames alone hold of stage i when they stand at the end of stage `at`."""
        return self._costs.frames.get((at, i, i in self._records), 0) if at < self._s.stages - 1 else 0

    def _storages(self) -> set[int]:
        held = set().union(self._cut, self._late, *self._held.values(), *([self._at[1]] if self._at else ()))
        for i in self._records:
            held |= self._s.storages(self._s.reads[i] | self._s.made(i))
        return held.difference(*self._away.values())

    # -- one operation -------------------------------------------------------------------------------------------------

    def step(self, operation: Operation) -> Step:
        """Go on by one operation."""
        kind, i = operation
        if kind not in RUNS and kind != B:
            return self._move(kind, i, operation)
        was = self.bytes()
        context, before = self._begin(kind, i)
        high = before + self._costs.highest(kind, i, context)
        self._end(kind, i)
        unsettled = self.bytes()
        self._settle()
        return Step(operation, max(was, high, unsettled), self.bytes(), sum(self._host.values()), 0)

    def learn(self, done: Done) -> None:
        """Go on by one operation that was metered, and take what it tells."""
        kind, i = done.operation
        c = self._costs
        context, before = self._begin(kind, i)
        c.top.setdefault((_sort(kind), i, *context), done.high - before)
        c.seconds[_sort(kind), i].append(done.seconds)
        self._end(kind, i)
        if kind == B and i not in c.grads:
            c.grads[i] = 0
            c.grads[i] = done.after - self.bytes()
        elif i == self._s.stages - 1 and not c.loss:
            c.loss = done.after - self.bytes()

    def _begin(self, kind: str, i: int) -> tuple[tuple[bool, str], int]:
        """Let go of what an operation lets go of first; returns its context, as `Costs.top` has it, and the bytes."""
        if kind == B:
            self._held.pop(i, None)
            self._copied.discard(i)
            if self._at and self._at[0] == i + 1:
                self._at = None
            return (self._records[i], ""), self.bytes()
        if self._next < self._s.stages:
            self._late = set()
            return (True, self._kind), self.bytes()
        if not self._at or self._at[0] != i:
            self._at = i, set(self._held[i])
        return (False, ""), self.bytes()

    def _end(self, kind: str, i: int) -> None:
        s = self._s
        if kind == B:
            del self._records[i]
            self._backs.append(i)
            return
        is_first, is_last = self._next < s.stages, i == s.stages - 1
        if kind == FCK:
            self._held[i] = s.storages(s.live[i])
        elif kind == FALL:
            self._held.pop(i, None)
            self._records[i] = is_first
        following = set() if is_last else s.storages(s.live[i + 1])
        if not is_first:
            self._at = None if is_last else (i + 1, following)
            return
        self._kind = kind
        if kind != FALL:
            self._copied.add(i)
        self._next, self._cut = i + 1, following
        self._late = set() if is_last else {*self._costs.late.get(i, ())}

    # -- the host ------------------------------------------------------------------------------------------------------

    def _move(self, kind: str, i: int, operation: Operation) -> Step:
        was = self.bytes()
        if kind in _BACK:
            self._settle()
            del self._away[_BACK[kind], i]
            moved = self._host.pop((_BACK[kind], i))
        else:
            own = self._costs.record.get((i, self._records[i]), 0) if kind == OFF else 0
            moved = own + sum(self._s.nbytes[storage] for storage in self._s.movable(i) & self._storages())
            self._host[kind, i] = moved
            self._leaving.append((kind, i))
        return Step(operation, max(was, self.bytes()), self.bytes(), sum(self._host.values()), moved)

    def _settle(self) -> None:
        for kind, i in self._leaving:
            self._away[kind, i] = self._s.movable(i)
        self._leaving.clear()
