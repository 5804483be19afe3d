"""Lifetimes of tensors that only the model's own frames hold during a first run.

A variable of the model's code may outlive the stage that made its value: a ResNet keeps its embedding until the last block
has run. If the plan drops that value, only the variable holds it, and the peak of a later stage depends on the moment of its
release. Releases are recorded in metered executions and replayed in `plan_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from l2l_core.model import storage_key
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import Tensor

ForwardPosition = tuple[int, int]  # progress of a forward: stages begun, operations of shell code done


class EarlierStorage(NamedTuple):
    """A storage at a boundary, or all other tensors that one earlier stage has made."""

    storage: int = -1
    stage: int = -1


class Release(NamedTuple):
    """The end of a tensor of an earlier stage during a first run."""

    position: ForwardPosition
    item: EarlierStorage
    nbytes: int


# Releases in the first run of one stage, by item and by whether the stage that made it keeps its record (False at boundaries).
StageReleases = dict[tuple[EarlierStorage, bool], list[Release]]


class FrameRecorder:
    """Allocations and releases of one first run, as the meter counts them.

    Args:
        earlier: storages that exist before the run, by their keys.
        position: returns the current position of the run.

    Attributes:
        peak_by_position: peak bytes of the run's own storages.
        releases: of earlier storages. A release precedes the allocations at its position, because variables of the model's
            code change between operations.
    """

    def __init__(self, earlier: Mapping[int, EarlierStorage], position: Callable[[], ForwardPosition]) -> None:
        self._earlier, self._position, self._own_bytes = dict(earlier), position, 0
        self.peak_by_position: dict[ForwardPosition, int] = {}
        self.releases: list[Release] = []

    def on_allocated(self, nbytes: int) -> None:
        """Record a new storage."""
        position = self._position()
        self._own_bytes += nbytes
        self.peak_by_position[position] = max(self.peak_by_position.get(position, 0), self._own_bytes)

    def on_freed(self, key: int, nbytes: int) -> None:
        """Record the end of a storage."""
        item = self._earlier.pop(key, None)
        if item is None:
            self._own_bytes -= nbytes
        else:
            self.releases.append(Release(self._position(), item, nbytes))


class FrameReport(NamedTuple):
    """Result of a measured first run; at its end, tensors that only the model's frames hold."""

    nbytes: dict[int, int]  # bytes outside of the boundaries, by the stage that made them
    late_storages: frozenset[int]  # storages at boundaries
    peak_by_position: dict[ForwardPosition, int]
    releases: list[Release]


class RunSegment(NamedTuple):
    """A part of a first run, up to a release or to the end, and the peak of its allocations."""

    peak_bytes: int
    kept: bool = False
    release: Release | None = None


def divide_run(peak_by_position: Mapping[ForwardPosition, int], releases: StageReleases) -> list[RunSegment]:
    """Divide a first run at its releases; the segments hold for any tensors that a plan keeps."""
    ends = sorted((end.position, kept, end) for (_, kept), found in releases.items() for end in found)
    limits = [(0, 0), *(position for position, _, _ in ends), None]
    peaks = [
        max((peak for p, peak in peak_by_position.items() if p >= a and (b is None or p < b)), default=0)
        for a, b in pairwise(limits)
    ]
    divided = [RunSegment(peak, kept, end) for peak, (_, kept, end) in zip(peaks, ends, strict=False)]
    return [*divided, RunSegment(peaks[-1])]


def find_earlier(
    numbers: Mapping[Tensor, int], made_in: Sequence[int], structure: StageStructure
) -> dict[int, EarlierStorage]:
    """Classify the storages of the numbered tensors, by their keys."""
    found: dict[int, EarlierStorage] = {}
    for tensor, number in sorted(numbers.items(), key=lambda item: item[1]):  # the base of a view has a lower number
        storage, stage = structure.storage.get(number, -1), made_in[number]
        if storage is not None and stage >= 0:
            item = EarlierStorage(stage=stage) if storage == -1 else EarlierStorage(storage)
            found.setdefault(storage_key(tensor), item)
    return found
