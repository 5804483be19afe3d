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

from l2l_core.strategies.forward import Tensor
from l2l_core.strategies.structure import Structure


class Position(NamedTuple):
    """How far a forward is: stages begun, operations of shell code done."""

    stages: int
    shell: int


class Held(NamedTuple):
    """Something of an earlier stage: a storage at a cut, or all that one stage has made beside the cuts."""

    storage: int = -1
    stage: int = -1


class End(NamedTuple):
    """Something of an earlier stage ended."""

    at: Position
    what: Held
    nbytes: int


class Seen:
    """One first run, as the meter shows it.

    Args:
        older: by key of a storage, what it is; those that were there before the run.
        position: says how far the run is.

    Attributes:
        made: the most bytes of the run's own storages, by position.
        ends: of older storages. What ends at a position ends before anything is made there: variables of the model's code
            change between operations.
    """

    def __init__(self, older: Mapping[int, Held], position: Callable[[], Position]) -> None:
        self._older, self._position, self._own = dict(older), position, 0
        self.made: dict[Position, int] = {}
        self.ends: list[End] = []

    def comes(self, nbytes: int) -> None:
        """The meter counts a new storage."""
        at = self._position()
        self._own += nbytes
        self.made[at] = max(self.made.get(at, 0), self._own)

    def goes(self, key: int, nbytes: int) -> None:
        """The meter counts a storage no longer."""
        what = self._older.pop(key, None)
        if what is None:
            self._own -= nbytes
        else:
            self.ends.append(End(self._position(), what, nbytes))


class Frames(NamedTuple):
    """What a measured first run tells.

    Attributes:
        nbytes: at its end, beside the cuts, of what the model's frames alone hold, by the stage that made it.
        late: storages at cuts that they alone hold then.
        made, ends: as in `Seen`.
    """

    nbytes: dict[int, int]
    late: frozenset[int]
    made: dict[Position, int]
    ends: list[End]


class Ends:
    """What ends in the first run of a stage, and when.

    Attributes:
        known: by thing, and by whether the stage that made it keeps its record (of storages at cuts: False).
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Held, bool], list[End]] = {}

    def tell(self, ends: Iterable[End], kept: Mapping[int, bool]) -> None:
        """Take what a run has shown in which every earlier stage kept its record or did not."""
        found: dict[tuple[Held, bool], list[End]] = {}
        for end in ends:
            found.setdefault((end.what, kept.get(end.what.stage, False)), []).append(end)
        self.known = found | self.known


class Part(NamedTuple):
    """A run up to an end: the most bytes of its own, and what ends then."""

    most: int
    what: Held | None
    kept: bool
    nbytes: int


@dataclass(frozen=True)
class Rise:
    """How the bytes of a stage's first run rise, whatever the plan holds besides.

    Attributes:
        made: the most bytes of its own, by position.
        ends: of things of earlier stages.
    """

    made: Mapping[Position, int]
    ends: Ends

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The same with all between two ends in one figure: there are few."""
        ends = sorted((end.at, kept, end) for (_, kept), found in self.ends.known.items() for end in found)
        at = [Position(0, 0), *(each for each, _, _ in ends), None]
        most = [
            max((self.made[p] for p in self.made if p >= a and (b is None or p < b)), default=0)
            for a, b in pairwise(at)
        ]
        return (
            *(Part(own, end.what, kept, end.nbytes) for own, (_, kept, end) in zip(most, ends, strict=False)),
            Part(most[-1], None, False, 0),
        )


def older(tensors: Mapping[Tensor, int], born: Sequence[int], structure: Structure) -> dict[int, Held]:
    """Say of the storages of shell tensors what they are, by key: `tensors` has the number of each."""
    found: dict[int, Held] = {}
    for tensor, number in sorted(
        tensors.items(), key=lambda item: item[1]
    ):  # a view is of the stage that made the storage
        storage = structure.storage.get(number, -1)
        if storage is not None and born[number] >= 0:
            found.setdefault(key_of(tensor), Held(stage=born[number]) if storage == -1 else Held(storage))
    return found


def key_of(tensor: Tensor) -> int:
    """Return what a storage is called by the meter."""
    return tensor.untyped_storage()._cdata
