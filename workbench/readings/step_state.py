"""The state of the relay at one moment, as a value. Where it comes from is in `state_timeline.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["fill", "forward", "backward", "tail", "idle"]


@dataclass(frozen=True, slots=True)
class LaneActivity:
    """What a lane does: an event; `progress` in [0, 1], None if the event is known only because it is over."""

    kind: str
    layer: str
    k: int
    nbytes: int
    progress: float | None


@dataclass(frozen=True, slots=True)
class SlotState:
    """A weight slot of the device: the layer in it, None if empty, and the share of its weights that is there."""

    layer: str | None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class PushState:
    """The gradient of a layer that backward is done with, and the share that has left the device."""

    layer: str
    share: float


@dataclass(frozen=True, slots=True)
class StepState:
    """The relay at one moment.

    Attributes:
        i, count: number of the event that started last, from 0 (-1 before the first), and of all events; under way
            as many as the step before had, 0 if that is not known.
        t_s: seconds since the step began.
        phase: "fill" before the first layer runs, "tail" when compute is over, "idle" without a step.
        lanes: what every lane does, None if it rests.
        slots: the weight slots of the device, A first.
        layer: the layer that computes.
        waits_for: the layer that compute waits for, because its weights are on their way.
        k, micro_batches: the micro-batch, -1 if none or all together, and how many there are.
        kind: "forward", "backward" or "loss": what compute did last.
        adding: the layer whose gradient is being added up on the device.
        gathered: further layers whose gradients are there, to which micro-batches are still to add; depth first only.
        leaving: gradients on the device that are complete, in the order in which they leave.
        arrived: layers whose gradient waits in the EPS for their update.
        eps_layer, eps_kind: what the EPS works on: "reduce", "update" or "clip".
        updated: layers updated so far in this step, in order.
        stashed, stash: layer inputs that wait for their recompute, and at which place.
        graphs: layers that have the graph of the micro-batch at work; depth first only, where nothing is stashed.
        device, host: bytes in use by category.
        device_peak_bytes: the most bytes on the device so far known.
        stash_peak_bytes: the most stash at either place so far known.
        schedule: as in `RelayConfig`: which algorithm it is.
        line: of that, index into its lines, None without an event.
        beside: lines that other lanes are at, with the lane.
        graph_kept: whether compute is in backward, in a layer that need not be recomputed.
    """

    event: int = -1
    num_events: int = 0
    t_s: float = 0.0
    phase: Phase = "idle"
    lanes: Mapping[str, LaneActivity | None] = field(default_factory=dict)
    slots: tuple[SlotState, ...] = ()
    layer: str | None = None
    waits_for: str | None = None
    k: int = -1
    micro_batches: int = 1
    kind: str = ""
    accumulating: str | None = None
    waiting_gradients: tuple[str, ...] = ()
    pushing: tuple[PushState, ...] = ()
    arrived: frozenset[str] = frozenset()
    eps_layer: str | None = None
    eps_kind: str = ""
    updated: tuple[str, ...] = ()
    num_stashed: int = 0
    stash: str = "device"
    num_graphs: int = 0
    device: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    device_peak_bytes: int = 0
    stash_peak_bytes: int = 0
    schedule: str = "breadth_first"
    line: int | None = None
    other_lines: tuple[tuple[int, str], ...] = ()
    graph_kept: bool = False
