"""A plan: which stages run when, what each keeps, and what goes to the host meanwhile.

Stage i is the model's own code up to layer call i, and that call; the last stage ends in the loss. A plan is for one
micro-batch; all micro-batches of a step follow the same one. What it is not: it holds no tensors and knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

F0 = "F0"  # run the stage, keep nothing
FCK = "Fck"  # run it, keep its input
FALL = "Fall"  # run it, keep its record: all that backward reads
B = "B"  # backward through the record
OFF, PRE = "Off", "Pre"  # the record to the host, and back
OFFX, PREX = "OffX", "PreX"  # a kept input to the host, and back

RUN_KINDS = frozenset((F0, FCK, FALL))
COMPUTE_KINDS = frozenset((*RUN_KINDS, B))  # the others move
KINDS = frozenset((*COMPUTE_KINDS, OFF, PRE, OFFX, PREX))


class Operation(NamedTuple):
    """One entry of a plan: what is done (`F0`, `Fck`, ...), to which stage."""

    kind: str
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}"


@dataclass(frozen=True)
class Plan:
    """Operations, and what they are known to need.

    Attributes:
        name: of the way that made it.
        operations: for one micro-batch, in order.
        stages: number of stages, that of the loss included.
        peak_device_bytes: exact highest bytes on the device during a step: weights, optimizer state, gradients, the rest.
        peak_host_bytes: highest bytes that wait on the host.
        seconds: simulated seconds of a step on the device's link, updates left out.
    """

    name: str
    operations: tuple[Operation, ...]
    stages: int
    peak_device_bytes: int
    peak_host_bytes: int
    seconds: float

    @property
    def layer_forwards(self) -> int:
        """How often layers run forward for one micro-batch; the number of layers is the least."""
        return sum(kind in RUN_KINDS and stage < self.stages - 1 for kind, stage in self.operations)

    def __str__(self) -> str:
        return f"{self.name}: " + " ".join(f"{kind}{stage}" for kind, stage in self.operations)


def check_operations(operations: Sequence[Operation], stages: int) -> None:
    """Raise ValueError for a plan that cannot be executed: it names the operation, the cause and the remedy.

    The rules: the first run of every stage comes in order, and the last one keeps its record; backward goes from the last
    stage to the first; a stage runs again from its kept input or right after the stage before it; what is on the host is
    brought back before it is read.
    """
    PlanChecker(stages).check(operations)


class PlanChecker:
    """What a plan holds between its operations, by stage.

    Invariant: every operation seen so far could be executed.
    """

    def __init__(self, stages: int) -> None:
        self._stages, self._first_runs, self._backwards_left = stages, 0, stages
        self._records: set[int] = set()
        self._kept_inputs: set[int] = set()
        self._on_host: set[tuple[str, int]] = set()
        self._next_input: int | None = None  # the stage whose input a run again has just made

    def check(self, operations: Sequence[Operation]) -> None:
        """Raise ValueError for the first operation that cannot be executed, or for what is left at the end."""
        for at, operation in enumerate(operations):
            problem = self._find_problem(*operation)
            if problem:
                raise ValueError(f"operation {at} of the plan, {operation}, cannot be executed: {problem}")
        if self._backwards_left or self._records or self._kept_inputs:
            left = sorted(self._records | self._kept_inputs)
            raise ValueError(
                f"the plan ends before the backward of stage {self._backwards_left - 1}, or keeps something of stages {left}: every stage "
                "needs one B"
            )

    def _find_problem(self, kind: str, i: int) -> str:
        if kind not in KINDS or not 0 <= i < self._stages:
            return f"kinds are {', '.join(sorted(KINDS))}, stages 0 to {self._stages - 1}"
        if kind in RUN_KINDS:
            return self._check_run(kind, i)
        return self._check_backward(i) if kind == B else self._check_move(kind, i)

    def _check_run(self, kind: str, i: int) -> str:
        if self._first_runs < self._stages:
            if i != self._first_runs:
                return f"the first runs come in order, stage {self._first_runs} is next"
            if i == self._stages - 1 and kind != FALL:
                return "the loss is followed by its backward: use Fall"
            self._first_runs += 1
        else:
            if i >= self._backwards_left:
                return "its backward is over"
            if i in self._records:
                return "its record is there"
            if self._next_input != i and i not in self._kept_inputs:
                return "its input is not there: keep it with Fck, or run the stage before it first"
            if (OFFX, i) in self._on_host and self._next_input != i:
                return f"its input is on the host: PreX {i} comes first"
            self._next_input = i + 1 if i + 1 < self._stages else None
        if kind == FALL:
            self._records.add(i)
            if (OFFX, i) in self._on_host:
                return f"its kept input is on the host: PreX {i} comes first"
            self._kept_inputs.discard(i)
        elif kind == FCK:
            self._kept_inputs.add(i)
        return ""

    def _check_backward(self, i: int) -> str:
        if self._first_runs < self._stages or i != self._backwards_left - 1:
            return f"backward begins after all first runs and goes down; stage {self._backwards_left - 1} is next"
        if i not in self._records:
            return f"there is no record: Fall {i} comes first"
        if (OFF, i) in self._on_host:
            return f"its record is on the host: Pre {i} comes first"
        self._records.discard(i)
        self._backwards_left -= 1
        self._next_input = None if self._next_input == i + 1 else self._next_input
        return ""

    def _check_move(self, kind: str, i: int) -> str:
        out, what, where = (
            (OFF, "record", self._records) if kind in (OFF, PRE) else (OFFX, "kept input", self._kept_inputs)
        )
        if kind in (PRE, PREX):
            if (out, i) not in self._on_host:
                return f"the {what} is not on the host"
            self._on_host.remove((out, i))
            return ""
        if self._first_runs < self._stages and i == self._first_runs - 1 and i == self._stages - 1:
            return "the loss is followed by its backward"
        if i not in where or (out, i) in self._on_host:
            return f"there is no {what} of it on the device"
        if self._first_runs == self._stages:
            return "what is left after the loss is read soon: send it out during the first runs"
        self._on_host.add((out, i))
        return ""
