"""What the model's own frames hold of earlier stages during its forward, and when they let go of it.

A variable of the model's code may outlive the stage that made its value: a ResNet keeps its embedding until the last block
is over. Where the plan drops that value the variable is all that holds it, and how high a later stage rises depends on when
it ends. Seen in metered executions only; the walk reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import Tensor


class ForwardPosition(NamedTuple):
    """How far a forward is: stages begun, operations of shell code done."""

    stages: int
    shell: int


class EarlierStorage(NamedTuple):
    """Something of an earlier stage: a storage at a cut, or all that one stage has made beside the cuts."""

    storage: int = -1
    stage: int = -1


class Release(NamedTuple):
    """Something of an earlier stage ended."""

    position: ForwardPosition
    item: EarlierStorage
    nbytes: int


class FrameRecorder:
    """One first run, as the meter shows it.

    Args:
        older: by key of a storage, what it is; those that were there before the run.
        position: says how far the run is.

    Attributes:
        made: the most bytes of the run's own storages, by position.
        ends: of older storages. What ends at a position ends before anything is made there: variables of the model's code
            change between operations.
    """

    def __init__(self, earlier: Mapping[int, EarlierStorage], position: Callable[[], ForwardPosition]) -> None:
        self._earlier, self._position, self._own_bytes = dict(earlier), position, 0
        self.peak_by_position: dict[ForwardPosition, int] = {}
        self.releases: list[Release] = []

    def on_allocated(self, nbytes: int) -> None:
        """The meter counts a new storage."""
        at = self._position()
        self._own_bytes += nbytes
        self.peak_by_position[at] = max(self.peak_by_position.get(at, 0), self._own_bytes)

    def on_freed(self, key: int, nbytes: int) -> None:
        """The meter counts a storage no longer."""
        what = self._earlier.pop(key, None)
        if what is None:
            self._own_bytes -= nbytes
        else:
            self.releases.append(Release(self._position(), what, nbytes))


class FrameReport(NamedTuple):
    """What a measured first run tells.

    Attributes:
        nbytes: at its end, beside the cuts, of what the model's frames alone hold, by the stage that made it.
        late: storages at cuts that they alone hold then.
        made, ends: as in `Seen`.
    """

    nbytes: dict[int, int]
    late_storages: frozenset[int]
    peak_by_position: dict[ForwardPosition, int]
    releases: list[Release]


class StageReleases:
    """What ends in the first run of a stage, and when.

    Attributes:
        known: by thing, and by whether the stage that made it keeps its record (of storages at cuts: False).
    """

    def __init__(self) -> None:
        self.by_item: dict[tuple[EarlierStorage, bool], list[Release]] = {}

    def add_run(self, releases: Iterable[Release], kept: Mapping[int, bool]) -> None:
        """Take what a run has shown in which every earlier stage kept its record or did not."""
        found: dict[tuple[EarlierStorage, bool], list[Release]] = {}
        for end in releases:
            found.setdefault((end.item, kept.get(end.item.stage, False)), []).append(end)
        self.by_item = found | self.by_item


class RunSegment(NamedTuple):
    """A run up to an end: the most bytes of its own, and what ends then."""

    peak_bytes: int
    item: EarlierStorage | None
    kept: bool
    nbytes: int


@dataclass(frozen=True)
class FirstRun:
    """How the bytes of a stage's first run rise, whatever the plan holds besides.

    Attributes:
        made: the most bytes of its own, by position.
        ends: of things of earlier stages.
    """

    peak_by_position: Mapping[ForwardPosition, int]
    releases: StageReleases

    @cached_property
    def segments(self) -> tuple[RunSegment, ...]:
        """The same with all between two ends in one figure: there are few."""
        ends = sorted((end.position, kept, end) for (_, kept), found in self.releases.by_item.items() for end in found)
        at = [ForwardPosition(0, 0), *(each for each, _, _ in ends), None]
        most = [
            max((self.peak_by_position[p] for p in self.peak_by_position if p >= a and (b is None or p < b)), default=0)
            for a, b in pairwise(at)
        ]
        return (
            *(RunSegment(own, end.item, kept, end.nbytes) for own, (_, kept, end) in zip(most, ends, strict=False)),
            RunSegment(most[-1], None, False, 0),
        )


def find_earlier(
    tensors: Mapping[Tensor, int], born: Sequence[int], structure: StageStructure
) -> dict[int, EarlierStorage]:
    """Say of the storages of shell tensors what they are, by key: `tensors` has the number of each."""
    found: dict[int, EarlierStorage] = {}
    for tensor, number in sorted(
        tensors.items(), key=lambda item: item[1]
    ):  # a view is of the stage that made the storage
        storage = structure.storage.get(number, -1)
        if storage is not None and born[number] >= 0:
            found.setdefault(
                storage_key(tensor), EarlierStorage(stage=born[number]) if storage == -1 else EarlierStorage(storage)
            )
    return found


def storage_key(tensor: Tensor) -> int:
    """Return what a storage is called by the meter."""
    return tensor.untyped_storage()._cdata
