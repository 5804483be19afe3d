"""Value types for the state of the relay at one moment; `state_timeline.py` computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["fill", "forward", "backward", "tail", "idle"]


@dataclass(frozen=True, slots=True)
class LaneActivity:
    """The current event of a lane; `progress` is in [0, 1], or None in a running step."""

    kind: str
    layer: str
    k: int
    nbytes: int
    progress: float | None


@dataclass(frozen=True, slots=True)
class SlotState:
    """A weight slot: its layer, None if empty, and the share of the weights that has been loaded."""

    layer: str | None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class PushState:
    """A complete gradient on the device, and the share that has been pushed."""

    layer: str
    share: float


@dataclass(frozen=True, slots=True)
class StepState:
    """The state of the relay at one moment.

    Attributes:
        event: number of the event that started last, from 0; -1 before the first.
        num_events: number of events; in a running step that of the previous step, 0 if unknown.
        t_s: seconds since the step began.
        phase: "fill" before the first layer runs, "tail" after the last compute event, "idle" without a step.
        lanes: current event of every lane, None if it is idle.
        slots: the weight slots of the device.
        layer: the layer that computes.
        waits_for: the layer whose weights compute waits for.
        k: current micro-batch, -1 for none or all together.
        micro_batches: number of micro-batches.
        kind: kind of the last forward, backward or loss event.
        accumulating: the layer whose gradient is being accumulated on the device.
        waiting_gradients: further layers with incomplete gradients on the device; depth first only.
        pushing: complete gradients on the device, in order of their pushes.
        arrived: layers whose gradient has arrived in the EPS and is not applied yet.
        eps_layer, eps_kind: layer and kind ("reduce", "update" or "clip") of the current EPS event.
        updated: layers updated so far in this step, in order.
        num_stashed, stash: number of stashed layer inputs, and their place.
        num_graphs: number of layers with a graph of the current micro-batch; depth first only.
        device, host: bytes in use by category.
        device_peak_bytes: largest device bytes in this and the previous step.
        stash_peak_bytes: largest stash bytes at either place in this and the previous step.
        schedule: as in `RelayConfig`.
        line: current line of the pseudocode of the schedule, None without an event.
        other_lines: current lines of other lanes, with the lane.
        graph_kept: True during a backward without recompute.
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
    schedule: object = "breadth_first"
    line: int | None = None
    other_lines: tuple[tuple[int, str], ...] = ()
    graph_kept: bool = False
