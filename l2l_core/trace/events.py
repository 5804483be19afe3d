"""What a trace consists of: pieces of work on lanes, and what memories held when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from l2l_core.trace.formatting import format_bytes

CATEGORIES = ("weights", "gradients", "activations", "stash", "optimizer", "other")  # of bytes in a memory
LANES = ("compute", "h2d", "d2h", "eps")  # of every worker
NETWORK_LANES = ("gather", "reduce")  # of those that train with others, too
DISK_LANES = ("disk read", "disk write")  # where weights and their state are in files
ALL_LANES = LANES + NETWORK_LANES + DISK_LANES
PLACES = ("device", "host")

_KIND_LETTERS = {
    "forward": "F",
    "backward": "B",
    "load": "L",
    "push": "P",
    "reduce": "R",
    "update": "U",
    "gather": "G",
    "exchange": "X",
}


class Event(NamedTuple):
    """One piece of work on one lane. Events of a lane follow one another: a lane is a serial resource."""

    lane: str  # one of ALL_LANES
    kind: str  # "shell" | "forward" | "loss" | "backward" | "load" | "push" | "stash" | "reduce" | ...
    start_s: float  # seconds since the step began
    stop_s: float
    layer: str = ""  # permanent key of the layer, "shell" for the rest of the model, "" if none
    k: int = -1  # micro-batch, -1 if none
    nbytes: int = 0
    visit: int = -1  # forward visits 0..V-1, backward visits V..2V-1, -1 if none
    stalled_s: float = (
        0.0  # right before the event compute waited so long for copies or the EPS, the network for a worker
    )
    stay: int = -1  # of compute: number of the stay on the device that it is part of or follows, from 0; -1 if none
    slot: int = -1  # of a load: the weight slot that it fills; -1 if none, as for the shell
    piece: int = 0  # of a copy that travels in pieces: which one this is
    pieces: int = 1  # how many there are
    last: int = -1  # on the network: the worker that came last, for which the others have waited; -1 elsewhere

    def label(self) -> str:
        """Give a short name: "F L003 k=1", "L L004", "loss k=0". Kinds that share a first letter are spelled out."""
        words = [_KIND_LETTERS.get(self.kind, self.kind)]
        if self.layer not in ("", self.kind):
            words.append(self.layer)
        if self.k >= 0:
            words.append(f"k={self.k}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Says whose trace it is.

    Attributes:
        rank, count: of the worker, and how many train together.
        began_s: when the trace began, in seconds on a clock that all of them share.
        waited_s: how long this worker had waited by then for the last one to begin.
        last: the worker that came last; -1 if nobody is waited for.
    """

    rank: int = 0
    count: int = 1
    began_s: float = 0.0
    waited_s: float = 0.0
    last: int = -1

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that it has."""
        return LANES if self.count == 1 else (*LANES, *NETWORK_LANES)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes in use at one place from `t_s` until the next sample of that place."""

    t_s: float  # seconds since the step began
    place: str  # one of PLACES
    bytes_by_category: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        return sum(self.bytes_by_category.values())


@dataclass(frozen=True, slots=True)
class StepFailure:
    """How a step ended that was not finished.

    Attributes:
        t_s: when, in seconds since it began.
        error: name of the exception's class.
        asked_bytes: of the allocation that the device had no room for; 0 if it failed for another reason.
        asked_for: what for, as "activations for L004 during forward of h.4 (L004), micro-batch 0".
        held_bytes: of the device that were in use then.
        missing_bytes: by how much the allocation was too large.
    """

    t_s: float
    error: str
    asked_bytes: int = 0
    asked_for: str = ""
    held_bytes: int = 0
    missing_bytes: int = 0

    def __str__(self) -> str:
        asked = f": {format_bytes(self.asked_bytes)} of {self.asked_for} were asked for" if self.asked_bytes else ""
        missing = f", {format_bytes(self.missing_bytes)} too much" if self.missing_bytes else ""
        return f"failed after {self.t_s:.3g} s ({self.error}){asked}{missing}"


class TraceLike(Protocol):
    """What those who read or write a trace ask of it; `Trace` is one."""

    step: int
    device: str
    names: dict[str, str]
    settings: dict[str, Any]
    failed: StepFailure | None
    worker: WorkerInfo

    def check_finished(self) -> None:
        """Raise a ValueError if the step failed."""

    @property
    def lanes(self) -> Mapping[str, tuple[Event, ...]]:
        """Every lane with its events, sorted by start."""

    @property
    def memory(self) -> tuple[MemorySample, ...]:
        """Samples of both places in order of time."""
