"""What stages cost, in bytes and seconds: read off metered executions of four plans.

A plan that keeps every record, one that keeps none, one that runs every stage once more without a record, and one that keeps
the first input alone: together they show each kind of operation on each stage, and what outlives the stages that drop it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from l2l_core.strategies.frames import Ends, Rise
from l2l_core.strategies.plan import F0, FALL, FCK, B, Operation
from l2l_core.strategies.recipes import Operations, full, periodic, plain
from l2l_core.strategies.structure import Structure


@dataclass
class Costs:
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

    structure: Structure
    base: int = 0
    record: dict[tuple[int, bool], int] = field(default_factory=dict)
    grads: dict[int, int] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)
    frames: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    late: dict[int, frozenset[int]] = field(default_factory=dict)
    loss: int = 0
    waiting: dict[int, int] = field(default_factory=dict)
    ends: dict[int, Ends] = field(default_factory=dict)
    rises: dict[tuple[str, int], Rise] = field(default_factory=dict)
    top: dict[tuple[str, int, bool], int] = field(default_factory=dict)
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def tells(self, operation: Operation) -> float:
        """Return the seconds of an operation that computes."""
        return self.tells_kind(*operation)

    def tells_kind(self, kind: str, stage: int) -> float:
        """Return the seconds of a kind of operation on a stage; of the loss without a record, as with one."""
        return median(self.seconds.get((sort_of(kind), stage)) or self.seconds[FALL, stage])

    def rise(self, kind: str, stage: int) -> Rise:
        """Return how bytes rise in the first run of a stage."""
        return self.rises[sort_of(kind), stage]

    def highest(self, kind: str, stage: int, of_first: bool) -> int:
        """Return how much more another operation needs than there is at its start."""
        return self.top[sort_of(kind), stage, of_first]

    def worst(self, kind: str, stage: int) -> int:
        """Return how much more any such operation needs than there is at its start."""
        found = [more for (k, i, _), more in self.top.items() if (k, i) == (sort_of(kind), stage)]
        rise = self.rises.get((sort_of(kind), stage))
        return max([0, *found, *(rise.made.values() if rise else ())])


def sort_of(kind: str) -> str:
    return F0 if kind == FCK else kind  # they need the same: what is kept is at the cut already


def probes(n: int) -> tuple[Operations, ...]:
    """Return the plans to measure: each kind of operation on each stage, first and again, with all kept or nothing."""
    twice = [Operation(FCK, i) for i in range(n - 1)] + [Operation(FALL, n - 1), Operation(B, n - 1)]
    for i in reversed(range(n - 1)):
        twice += [Operation(F0, i), Operation(FALL, i), Operation(B, i)]
    return plain(n), full(n), tuple(twice), periodic(n, max(1, n - 1))


def stage_bytes(structure: Structure, tensors: Iterable[int]) -> int:
    """Return the bytes of the storages of tensors at cuts."""
    return sum(structure.nbytes[s] for s in structure.storages(tensors))
