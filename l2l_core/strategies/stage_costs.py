"""What stages cost, in bytes and seconds: read off executions of four plans, metered ones and ones that are timed.

A plan that keeps every record, one that keeps none, one that runs every stage once more without a record, and one that keeps
the first input alone: together they show each kind of operation on each stage, and what outlives the stages that drop it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from l2l_core.strategies.fixed_plans import Operations, full_plan, periodic_plan, plain_plan
from l2l_core.strategies.frame_lifetimes import FirstRun, StageReleases
from l2l_core.strategies.plan import F0, FALL, FCK, B, Operation
from l2l_core.strategies.stage_structure import StageStructure


@dataclass
class StageCosts:
    """Costs of the stages of one structure, all in bytes as the meter counts them.

    Attributes:
        structure: of the stages.
        base: before the first operation: the micro-batch, and gradients of earlier micro-batches.
        record: of every stage, what its record has beyond tensors at cuts, from a first run (True) or a run again (False).
        grads: what the backward of every stage adds to parameters' gradients.
        constants: what every stage makes that is read across cuts without a gradient.
        frames: what the model's own frames alone hold after the first run of a stage, by the stage that has made it and whether
            that one keeps its record.
        late: storages at cuts that these frames still hold after the first run of a stage.
        loss: what the record of the last stage has beyond all that.
        waiting: gradients at the cut before every stage, after its backward.
        ends: what the model's frames let go of in the first run of a stage.
        rises: how bytes rise in the first run of a stage, by kind and stage.
        top: how much more than at its start another operation needs, by kind, stage, and whether the record is of a first run.
        seconds: measured, by kind and stage.
    """

    structure: StageStructure
    base_bytes: int = 0
    record_bytes: dict[tuple[int, bool], int] = field(default_factory=dict)
    gradient_bytes: dict[int, int] = field(default_factory=dict)
    constant_bytes: dict[int, int] = field(default_factory=dict)
    frame_bytes: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    late_storages: dict[int, frozenset[int]] = field(default_factory=dict)
    loss_bytes: int = 0
    pending_gradient_bytes: dict[int, int] = field(default_factory=dict)
    releases: dict[int, StageReleases] = field(default_factory=dict)
    first_runs: dict[tuple[str, int], FirstRun] = field(default_factory=dict)
    rerun_bytes: dict[tuple[str, int, bool], int] = field(default_factory=dict)
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def seconds_of(self, operation: Operation) -> float:
        """Return the seconds of an operation that computes."""
        return self.seconds_of_kind(*operation)

    def seconds_of_kind(self, kind: str, stage: int) -> float:
        """Return the seconds of a kind of operation on a stage; of the loss without a record, as with one."""
        return median(self.seconds.get((cost_kind(kind), stage)) or self.seconds[FALL, stage])

    def record_seconds(self, operation: Operation, seconds: float) -> None:
        """Note how long an operation has taken where nothing was counted."""
        self.seconds[cost_kind(operation.kind), operation.stage].append(seconds)

    def first_run(self, kind: str, stage: int) -> FirstRun:
        """Return how bytes rise in the first run of a stage."""
        return self.first_runs[cost_kind(kind), stage]

    def extra_bytes(self, kind: str, stage: int, is_first_run: bool) -> int:
        """Return how much more another operation needs than there is at its start."""
        return self.rerun_bytes[cost_kind(kind), stage, is_first_run]

    def max_extra_bytes(self, kind: str, stage: int) -> int:
        """Return how much more any such operation needs than there is at its start."""
        found = [more for (k, i, _), more in self.rerun_bytes.items() if (k, i) == (cost_kind(kind), stage)]
        rise = self.first_runs.get((cost_kind(kind), stage))
        return max([0, *found, *(rise.peak_by_position.values() if rise else ())])


def cost_kind(kind: str) -> str:
    return F0 if kind == FCK else kind  # they need the same: what is kept is at the cut already


def measurement_plans(n: int) -> tuple[Operations, ...]:
    """Return the plans to measure: each kind of operation on each stage, first and again, with all kept or nothing."""
    twice = [Operation(FCK, i) for i in range(n - 1)] + [Operation(FALL, n - 1), Operation(B, n - 1)]
    for i in reversed(range(n - 1)):
        twice += [Operation(F0, i), Operation(FALL, i), Operation(B, i)]
    return plain_plan(n), full_plan(n), tuple(twice), periodic_plan(n, max(1, n - 1))


def storage_bytes(structure: StageStructure, tensors: Iterable[int]) -> int:
    """Return the bytes of the storages of tensors at cuts."""
    return sum(structure.nbytes[s] for s in structure.storages_of(tensors))
