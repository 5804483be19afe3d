"""Contents of a trace: events on lanes, compute events grouped by visit, and bytes in use over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from l2l_core.trace.formatting import format_bytes

CATEGORIES = ("weights", "gradients", "activations", "stash", "optimizer", "other")  # of bytes in a memory
LANES = ("compute", "h2d", "d2h", "eps")  # of every worker
NETWORK_LANES = ("gather", "reduce")  # with several workers
DISK_LANES = ("disk read", "disk write")  # with a shelf
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
    """One piece of work on one lane. Events of a lane do not overlap: a lane is a serial resource.

    Example:
        >>> event = relay.step(batch).trace.lanes["compute"][0]
        >>> event.lane, event.stop_s >= event.start_s
        ('compute', True)
    """

    lane: str  # one of ALL_LANES
    kind: str  # "shell" | "forward" | "loss" | "backward" | "load" | "push" | "stash" | "reduce" | ...
    start_s: float  # seconds since the step began
    stop_s: float
    layer: str = ""  # permanent key of the layer, "shell" for the rest of the model, "" if none
    k: int = -1  # micro-batch, -1 if none
    nbytes: int = 0
    visit: int = -1  # forward visits 0..V-1, backward visits V..2V-1, -1 if none
    stalled_s: float = (
        0.0  # right before the event: wait of compute for copies or the EPS, of a collective for a worker
    )
    stay: int = -1  # of compute: the stay on the device that it is part of or follows, from 0; -1 if none
    slot: int = -1  # of a load: the weight slot that it fills; -1 if none, as for the shell
    piece: int = 0  # of a chunked copy: number of the piece
    pieces: int = 1  # of a chunked copy: number of pieces
    last: int = -1  # of a collective: rank of the last worker to start, for which the others waited; -1 elsewhere

    def label(self) -> str:
        """Return a short name: "F L003 k=1", "L L004", "loss k=0". Only common kinds are shortened to a letter."""
        words = [_KIND_LETTERS.get(self.kind, self.kind)]
        if self.layer not in ("", self.kind):
            words.append(self.layer)
        if self.k >= 0:
            words.append(f"k={self.k}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The worker that recorded a trace."""

    rank: int = 0
    count: int = 1  # number of workers
    began_s: float = 0.0  # start of the trace, on a clock shared by all workers
    waited_s: float = 0.0  # wait of this worker by then for the last one to start
    last: int = -1  # rank of that one; -1 without workers

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes of this worker."""
        return LANES if self.count == 1 else (*LANES, *NETWORK_LANES)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes in use at one place from `t_s` until the next sample of that place."""

    t_s: float  # seconds since the step began
    place: str  # one of PLACES
    bytes_by_category: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.bytes_by_category.values())


@dataclass(frozen=True, slots=True)
class StepFailure:
    """End of a step that failed."""

    t_s: float  # seconds since the step began
    error: str  # name of the exception's class
    asked_bytes: int = 0  # size of the allocation that did not fit on the device; 0 after other errors
    asked_for: str = ""  # as "activations for L004 during forward of h.4 (L004), micro-batch 0"
    held_bytes: int = 0  # on the device at that time
    missing_bytes: int = 0  # by which the allocation was too large

    def __str__(self) -> str:
        asked = f": allocating {format_bytes(self.asked_bytes)} of {self.asked_for}" if self.asked_bytes else ""
        missing = f", {format_bytes(self.missing_bytes)} too much" if self.missing_bytes else ""
        return f"failed after {self.t_s:.3g} s ({self.error}){asked}{missing}"


def group_by_visit(compute: Sequence[Event]) -> list[list[Event]]:
    """Group compute events by stay, in order; the first group has the events before the first layer."""
    groups: list[list[Event]] = [[]]
    last = None
    for event in compute:
        if event.kind in ("forward", "backward") and event.stay != last:
            groups.append([])
            last = event.stay
        groups[-1].append(event)
    return groups


def turn_of(groups: Sequence[Sequence[Event]]) -> int:
    """Return the index of the first group with backward work, their number if there is none."""
    turns = (i for i, group in enumerate(groups) if i and any(e.kind in ("loss", "backward") for e in group))
    return next(turns, len(groups))


def find_last_backward_start(groups: Sequence[Sequence[Event]]) -> int:
    """Return the index of the group in which the last micro-batch starts backward; depth first, each has its own."""
    kinds = [[event.kind for event in group] for group in groups]
    turns = (i for i, of in enumerate(kinds) if i and of[0] == "forward" and {"loss", "backward"} & {*of})
    return max(turns, default=turn_of(groups))
