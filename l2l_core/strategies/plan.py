"""Plans: operations on the stages of a model, and the check that they can be executed.

Stage i is the model's own code up to layer call i, and that call; the last stage ends in the loss. A plan is for one
micro-batch; all micro-batches of a step follow the same plan. A plan holds no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

F0 = "F0"  # run the stage, keep nothing
FCK = "Fck"  # run it, keep its input
FALL = "Fall"  # run it, keep its record: all tensors that its backward reads
B = "B"  # run its backward, drop its record
OFF, PRE = "Off", "Pre"  # copy the record to the host, and back
OFFX, PREX = "OffX", "PreX"  # copy the kept input to the host, and back

OFFLOAD_OF = {PRE: OFF, PREX: OFFX}
RUN_KINDS = frozenset((F0, FCK, FALL))
COMPUTE_KINDS = frozenset((*RUN_KINDS, B))  # the other kinds copy
KINDS = frozenset((*COMPUTE_KINDS, *OFFLOAD_OF, *OFFLOAD_OF.values()))


class Operation(NamedTuple):
    """An operation of a plan: its kind (`F0`, `Fck`, ...) and its stage.

    Example:
        >>> from l2l_core.strategies import Operation
        >>> str(Operation("Fck", 0))  # run stage 0, keep its input
        'Fck 0'
    """

    kind: str
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} {self.stage}"


Operations = tuple[Operation, ...]


@dataclass(frozen=True)
class Plan:
    """Operations for one micro-batch, and the bytes and seconds of a step that follows them.

    Attributes:
        name: name of the policy, for tables.
        operations: for one micro-batch, in order.
        stages: number of stages, including the loss.
        peak_device_bytes: exact peak on the device during a step, including weights, gradients and optimizer state.
        peak_host_bytes: exact peak of offloaded bytes on the host.
        seconds: simulated seconds of a step on the device's link, without updates.

    Example:
        >>> from l2l_core.strategies import Lab
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model[:2], batch=(batch[0], batch[0]), loss=nn.MSELoss())
        >>> plan = lab.plan([("Fck", 0), ("Fall", 1), ("Fall", 2), ("B", 2), ("B", 1), ("Fall", 0), ("B", 0)])
        >>> plan.stages, plan.layer_forwards  # layer 0 runs again, from its kept input
        (3, 3)
    """

    name: str
    operations: Operations
    stages: int
    peak_device_bytes: int
    peak_host_bytes: int
    seconds: float

    @property
    def layer_forwards(self) -> int:
        """Number of forward runs of layers for one micro-batch; without recompute the number of layers."""
        return sum(kind in RUN_KINDS and stage < self.stages - 1 for kind, stage in self.operations)

    def __str__(self) -> str:
        return f"{self.name}: " + " ".join(f"{kind}{stage}" for kind, stage in self.operations)


def check_operations(operations: Sequence[Operation], stages: int) -> None:
    """Raise ValueError if the operations cannot be executed; the message names the operation, the cause and the remedy.

    The first runs of all stages are in order, and the last one keeps its record. Backward runs from the last stage to the
    first. A stage runs again from its kept input, or directly after the stage before it. Offloaded tensors are fetched
    before they are read.

    Example:
        >>> from l2l_core.strategies import check_operations, mixed_plan
        >>> check_operations(mixed_plan("RK"), stages=3)
        >>> check_operations(mixed_plan("RK")[:-1], stages=3)
        Traceback (most recent call last):
        ValueError: the plan ends before the backward of stage 0: every stage needs one B
    """
    checker = PlanChecker(stages)
    for position, operation in enumerate(operations):
        problem = checker.apply(*operation)
        if problem:
            raise ValueError(f"operation {position} of the plan, {operation}, cannot be executed: {problem}")
    if checker.backwards_left:
        last = checker.backwards_left - 1
        raise ValueError(f"the plan ends before the backward of stage {last}: every stage needs one B")


class PlanChecker:
    """Symbolic execution of a plan: the stages that have records, kept inputs and offloaded tensors.

    Invariant: every operation applied so far can be executed, and no stage at or above `backwards_left` keeps anything.
    """

    def __init__(self, stages: int) -> None:
        self._stages, self._first_runs, self.backwards_left = stages, 0, stages
        self._records: set[int] = set()
        self._kept_inputs: set[int] = set()
        self._on_host: set[tuple[str, int]] = set()
        self._next_input: int | None = None  # the stage whose input the previous rerun has made

    def apply(self, kind: str, i: int) -> str:
        """Apply an operation; return the reason why it cannot be executed, or an empty string."""
        if kind not in KINDS or not 0 <= i < self._stages:
            return f"kinds are {', '.join(sorted(KINDS))}, stages 0 to {self._stages - 1}"
        if kind == B:
            return self._apply_backward(i)
        return self._apply_run(kind, i) if kind in RUN_KINDS else self._apply_copy(kind, i)

    def _apply_run(self, kind: str, i: int) -> str:
        is_given, is_first = self._next_input == i, self._first_runs < self._stages
        rules = [
            (is_first and i != self._first_runs, f"the first runs are in order, stage {self._first_runs} is next"),
            (i == self._stages - 1 and is_first and kind != FALL, "the loss is followed by its backward: use Fall"),
            (i >= self.backwards_left, "its backward is over"),
            (i in self._records, "its record is already kept"),
            (
                not (is_first or is_given or i in self._kept_inputs),
                "its input is not there: keep it with Fck, or run the stage before it first",
            ),
            (
                (OFFX, i) in self._on_host and (kind == FALL or not is_given),
                f"its input is on the host: insert PreX {i} before it",
            ),
        ]
        if is_first:
            self._first_runs += 1
        else:
            self._next_input = i + 1 if i + 1 < self._stages else None
        if kind == FALL:
            self._records.add(i)
            self._kept_inputs.discard(i)
        elif kind == FCK:
            self._kept_inputs.add(i)
        return _first_broken(rules)

    def _apply_backward(self, i: int) -> str:
        is_next = self._first_runs == self._stages and i == self.backwards_left - 1
        rules = [
            (not is_next, f"backward follows all first runs, downwards; stage {self.backwards_left - 1} is next"),
            (i not in self._records, f"it has no record: insert Fall {i} before it"),
            ((OFF, i) in self._on_host, f"its record is on the host: insert Pre {i} before it"),
        ]
        self._records.discard(i)
        self.backwards_left -= 1
        self._next_input = None if self._next_input == i + 1 else self._next_input
        return _first_broken(rules)

    def _apply_copy(self, kind: str, i: int) -> str:
        key = OFFLOAD_OF.get(kind, kind), i
        what, where = ("record", self._records) if key[0] == OFF else ("kept input", self._kept_inputs)
        if kind in OFFLOAD_OF:
            rules = [(key not in self._on_host, f"its {what} is not on the host")]
            self._on_host.discard(key)
            return _first_broken(rules)
        rules = [
            (i not in where or key in self._on_host, f"it has no {what} on the device"),
            (self._first_runs == self._stages, "its backward is near: offload during the first runs"),
        ]
        self._on_host.add(key)
        return _first_broken(rules)


def _first_broken(rules: Sequence[tuple[bool, str]]) -> str:
    return next((problem for is_broken, problem in rules if is_broken), "")
