"""Costs of stages in bytes and seconds, as measured in executions of plans."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from l2l_core.strategies.frame_lifetimes import RunSegment
from l2l_core.strategies.plan import F0, FALL, FCK
from l2l_core.strategies.stage_structure import StageStructure


@dataclass
class StageCosts:
    """Costs of the stages of one structure, in metered bytes."""

    structure: StageStructure
    base_bytes: int = 0  # before the first operation: the micro-batch, and gradients of earlier micro-batches
    # bytes of a record outside of the boundaries; key: whether a first run made it
    record_bytes: dict[tuple[int, bool], int] = field(default_factory=dict)
    gradient_bytes: dict[int, int] = field(default_factory=dict)  # that backward adds to gradients of parameters
    constant_bytes: dict[int, int] = field(default_factory=dict)  # that later stages read without a gradient
    # bytes that only the model's frames hold after a first run; key: the stage that made them, whether it keeps its record
    frame_bytes: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    late_storages: dict[int, frozenset[int]] = field(default_factory=dict)  # at boundaries, held by these frames alone
    loss_bytes: int = 0  # of the last stage's record, as far as they are not counted elsewhere
    pending_gradient_bytes: dict[int, int] = field(default_factory=dict)  # at the stage's boundary, after its backward
    first_runs: dict[tuple[str, int], list[RunSegment]] = field(default_factory=dict)  # key: kind
    # peak of any other operation above its start; key: kind, whether its record is of a first run
    rerun_bytes: dict[tuple[str, int, bool], int] = field(default_factory=dict)
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))  # key: kind

    def seconds_of(self, kind: str, stage: int) -> float:
        """Return the seconds of a kind of operation on a stage; for the loss, those of `Fall`."""
        return median(self.seconds.get((cost_kind(kind), stage)) or self.seconds[FALL, stage])

    def max_extra_bytes(self, kind: str, stage: int) -> int:
        """Return the highest peak above its start of any such operation."""
        kind = cost_kind(kind)
        extra = [nbytes for (k, i, _), nbytes in self.rerun_bytes.items() if (k, i) == (kind, stage)]
        return max([0, *extra, *(segment.peak_bytes for segment in self.first_runs.get((kind, stage), ()))])


def cost_kind(kind: str) -> str:
    """Return `F0` for `Fck`, which costs the same: the kept input is at the boundary already."""
    return F0 if kind == FCK else kind
