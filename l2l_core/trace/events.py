"""What a trace consists of: pieces of work on lanes, and what memories held when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

CATEGORIES = ("weights", "gradients", "activations", "stash", "optimizer", "other")  # of bytes in a memory
LANES = ("compute", "h2d", "d2h", "eps")
PLACES = ("device", "host")

_LETTERS = {"forward": "F", "backward": "B", "load": "L", "push": "P", "reduce": "R", "update": "U"}


class Event(NamedTuple):
    """One piece of work on one lane. Events of a lane follow one another: a lane is a serial resource."""

    lane: str  # one of LANES
    kind: str  # "shell" | "forward" | "loss" | "backward" | "load" | "push" | "stash" | "reduce" | ...
    start_s: float  # seconds since the step began
    stop_s: float
    layer: str = ""  # permanent key of the layer, "shell" for the rest of the model, "" if none
    k: int = -1  # micro-batch, -1 if none
    nbytes: int = 0
    visit: int = -1  # forward visits 0..V-1, backward visits V..2V-1, -1 if none
    stalled_s: float = 0.0  # seconds that compute waited for copies or for the EPS right before the event
    stay: int = -1  # of compute: number of the stay on the device that it is part of or follows, from 0; -1 if none

    def label(self) -> str:
        """A short name: "F L003 k=1", "L L004", "loss k=0". Kinds that share a first letter are spelled out."""
        words = [_LETTERS.get(self.kind, self.kind)]
        if self.layer not in ("", self.kind):
            words.append(self.layer)
        if self.k >= 0:
            words.append(f"k={self.k}")
        return " ".join(words)


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


class Recorded(Protocol):
    """What those who read or write a trace ask of it; `Trace` is one."""

    step: int
    device: str
    names: dict[str, str]
    settings: dict[str, Any]

    @property
    def lanes(self) -> Mapping[str, tuple[Event, ...]]:
        """Every lane with its events, sorted by start."""

    @property
    def memory(self) -> tuple[MemorySample, ...]:
        """Samples of both places in order of time."""
