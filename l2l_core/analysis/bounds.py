"""The lane that limits each phase of a step, and the setting that would help.

Computed from the events of a trace. The phases are those of `roofline.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2l_core.analysis.phases import (
    IDLE,
    NEGLIGIBLE_SHARE,
    OTHERS,
    Bound,
    Phase,
    binding_lane,
    make_bound,
    split_phases,
)
from l2l_core.analysis.roofline import ALL_PHASES, VisitWork
from l2l_core.schedule_rules import has_link
from l2l_core.trace import DISK_LANES, NETWORK_LANES, Event, Trace, format_bytes, format_seconds

# Events whose number does not depend on the number of micro-batches, unless `Event.k` is set.
_PER_VISIT_KINDS = ("load", "push", "reduce", "update", "clip", "gather", "end", "read", "write")
_LOCAL_LANES = {"compute", "h2d", "d2h", "eps"}  # lanes of one machine, without files
_WHOLE_STEP = "the step"  # only phase of a plan, in which micro-batches run forward and backward in turn
_MAX_GROWTH = 16  # above this factor, more micro-batches are not practical as the only advice


def find_bounds(trace: Trace) -> tuple[Bound, ...]:
    """Return the bounds of a step's phases, in order of time; empty without events.

    Also for a running or failed step, and for a forward pass. Settings absent from `Trace.settings` are not advised; the
    number of micro-batches is then counted from the events.
    """
    lanes = trace.lanes
    phases = {name: Phase(name, start_s, stop_s, lanes) for name, start_s, stop_s in split_phases(lanes)}
    adviser = _Adviser(phases, VisitWork(lanes, trace.settings), trace.settings)
    return tuple(adviser.find_bound(phase) for phase in phases.values())


def micro_batches_to_hide(compute_s: float, fixed_s: float, growing_s: float, micro_batches: int) -> int | None:
    """Return the least number of micro-batches whose compute hides a lane's work, None if no number does.

    Each further micro-batch of the same size adds to compute and to the growing part in proportion, so K' of them do if
    ``K' * (compute_s - growing_s) / K >= fixed_s``. All were measured with `micro_batches`; `fixed_s` is the lane's work that
    does not grow with them, such as loads, and `growing_s` the rest, such as the stash.
    """
    gain_s = (compute_s - growing_s) / micro_batches
    if gain_s <= 0:
        return None
    needed = fixed_s / gain_s
    return max(1, math.ceil(needed - 1e-9 * max(1.0, needed)))  # rounding may lift a whole number a little


def find_plan_bounds(trace: Trace) -> tuple[Bound, ...]:
    """Return the bound of a step of a plan. Empty without events."""
    lanes = trace.lanes
    events = [event for lane in lanes.values() for event in lane]
    if not events:
        return ()
    step = Phase(_WHOLE_STEP, min(e.start_s for e in events), max(e.stop_s for e in events), lanes)
    lane = binding_lane(step)
    return (make_bound(step, lane, max(step.busy_s.values()), _advise_plan(step, lane, lanes["compute"]), {}),)


def _advise_plan(step: Phase, lane: str, compute: Sequence[Event]) -> str:
    if lane == IDLE:
        return "overhead between operations, not the link; larger micro-batches make it count for less"
    if lane != "compute":
        return "a faster link, or a plan that recomputes instead of moving, would save up to that"
    again_s, update_s = _recompute_s(compute), sum_s(event for event in compute if event.kind == "update")
    parts: list[str] = []
    if again_s:
        parts.append(f"{format_seconds(again_s)} of it recompute, which a plan that keeps or moves more would save")
    if update_s > NEGLIGIBLE_SHARE * step.span_s:
        parts.append(f"{format_seconds(update_s)} of it the update")
    return ", and ".join(parts) or "it recomputes nothing and hides its copies, so no other plan is faster"


def _recompute_s(compute: Iterable[Event]) -> float:
    """Return the seconds of recomputation: forwards of layers after the first backward of their micro-batch."""
    in_backward: set[int] = set()
    again: list[Event] = []
    for event in compute:
        if event.kind == "backward":
            in_backward.add(event.k)
        elif event.kind == "forward" and event.k in in_backward:
            again.append(event)
    return sum_s(again)


# ---- advice ----------------------------------------------------------------------------------------------------

Advice = tuple[str, dict[str, Any]]


class _Adviser:
    """Advice for a phase, given the other phases and the settings."""

    def __init__(self, phases: Mapping[str, Phase], visit_work: VisitWork, settings: Mapping[str, Any]) -> None:
        self.phases, self.visit_work, self.settings = phases, visit_work, settings
        self._per_visit_kinds = (
            _PER_VISIT_KINDS if settings.get("reduce") == "ordered" else (*_PER_VISIT_KINDS, "exchange")
        )
        ks = [event.k for group in visit_work.groups for events in group.values() for event in events]
        self.micro_batches: int = settings.get("micro_batches") or 1 + max((0, *ks))

    def find_bound(self, phase: Phase) -> Bound:
        lane = binding_lane(phase)
        advice, settings = self._advise(phase, lane)
        return make_bound(phase, lane, phase.floor_s, advice + self._suggest_bf16(lane), settings)

    def _suggest_bf16(self, lane: str) -> str:
        """Suggest to send half the bytes over the network, unless that is set."""
        changes = {"gather": ("precision", "precision='bf16'"), "reduce": ("wire", "Workers(wire='bf16')")}
        name, change = changes.get(lane, ("", ""))
        return f"; {change} would send half of it" if self.settings.get(name) == "fp32" else ""

    def _advise(self, phase: Phase, lane: str) -> Advice:
        if lane == OTHERS:
            return _advise_stragglers(phase.waited_s), {}
        if lane == "reduce" and self.settings.get("reduce") == "ordered" and self.micro_batches > 1:
            return (
                f"Workers(reduce='sum') would send 1/{self.micro_batches} of it, with other rounding than one worker's",
                {},
            )
        if lane == IDLE and phase.name in ALL_PHASES[1:-1]:
            return "overhead between operations, not the link; larger micro-batches make it count for less", {}
        if lane == IDLE:
            return "work that no lane records, such as waking a thread", {}
        if lane == "compute":
            if phase.idle_s <= NEGLIGIBLE_SHARE / 5 * phase.span_s:
                return "nothing to gain from the link", {}
            return f"at most {format_seconds(phase.idle_s)} to gain from anything else", {}
        if phase.name == "fill":
            return "no layer can compute before the first is loaded; a larger batch makes this count for less", {}
        return self._advise_tail(phase, lane) if phase.name == "tail" else self._advise_overlap(phase, lane)

    def _advise_tail(self, phase: Phase, lane: str) -> Advice:
        late_s = phase.layer_seconds(lane, self.visit_work.early_layers)
        backward = self.phases.get("backward")
        if lane == "eps" and backward is not None and self.settings.get("update") == "deferred":
            hidden_s = min(late_s, max(0.0, backward.span_s - backward.busy_s["eps"]))
            if self.settings.get("max_grad_norm") is not None:
                why = "clipping needs every gradient first"
                return f"{why}; without it, update='eager' would hide {format_seconds(hidden_s)}", {}
            return f"update='eager' would hide {format_seconds(hidden_s)} of it under backward", {"update": "eager"}
        if late_s > 0.5 * phase.exposed_s[lane]:
            return (
                f"{format_seconds(late_s)} of it is left over from backward: the advice for backward helps here, too",
                {},
            )
        return "the first layer's gradient is the last, so nothing hides it; a larger batch makes it count for less", {}

    def _advise_overlap(self, phase: Phase, lane: str) -> Advice:
        saved_s = phase.span_s - phase.exposed_s[IDLE] - phase.floor_s
        if self.settings.get("ahead") == 0 and not has_link(self.settings) and _LOCAL_LANES.issuperset(phase.busy_s):
            return "without a link, copies use the cores of compute, so nothing would hide them", {}
        if self.settings.get("ahead") == 0 and saved_s > NEGLIGIBLE_SHARE * phase.span_s:
            return f"ahead=1 would save up to {format_seconds(saved_s)}", {"ahead": 1}
        load = self._lane_work(phase, lane)
        if load.fixed_s + load.growing_s <= load.compute_s * (1 + 1e-9):
            return self._advise_bursts(phase, lane, load)
        needed = micro_batches_to_hide(load.compute_s, load.fixed_s, load.growing_s, self.micro_batches)
        if needed is None:
            return self._advise_growing(lane, load)
        faster = f", or {self._required_speed(lane, load)}," if needed > _MAX_GROWTH * self.micro_batches else ""
        if self.settings.get("schedule") == "depth_first":  # further micro-batches load and push nothing
            times = f"{needed / self.micro_batches:.3g} times the rows"
            return f"micro-batches of {times}{faster} would hide it: only one of them computes meanwhile", {}
        more = f"{_format_count(needed)} of this size instead of {self.micro_batches}"
        times = f"{needed / self.micro_batches:.3g} times the batch"
        return f"{more}{faster} would hide it ({times})", {"micro_batches": needed}

    def _lane_work(self, phase: Phase, lane: str) -> _LaneWork:
        """Sum the lane's work in a phase, and the compute that can hide it."""
        visits = self.visit_work.in_phase(phase.name)
        # The EPS starts after the first visit with backward; copies hide under their own visits
        backward = (i for i, visit in enumerate(visits) if any(e.kind == "backward" for e in visit["compute"]))
        follows = lane in ("eps", "reduce")
        hosts = visits[1 + next(backward, 0) :] if follows else [visit for visit in visits if visit[lane]]
        events = [event for visit in hosts for event in visit[lane]]
        return _LaneWork(
            compute_s=sum_s(event for visit in hosts for event in visit["compute"]),
            fixed_s=sum_s(event for event in events if not self._scales_with_micro_batches(event)),
            growing_s=sum_s(event for event in events if self._scales_with_micro_batches(event)),
            nbytes=sum(event.nbytes for event in events),
            copies=len(events),
        )

    def _advise_bursts(self, phase: Phase, lane: str, lane_work: _LaneWork) -> Advice:
        """Advise on work that fits under compute in total, but was exposed."""
        work_s = format_seconds(lane_work.fixed_s + lane_work.growing_s)
        fits = f"its {work_s} would fit under {format_seconds(lane_work.compute_s)} of compute"
        ahead, exposed = self.settings.get("ahead"), format_seconds(phase.exposed_s[lane])
        if (closer := self._closer_stash(lane)) and lane_work.growing_s:  # the stash also queues behind other copies
            advice = f"{fits}, but compute waits for the stash: stash={closer!r} would save up to {exposed}"
            return advice, {"stash": closer}
        if lane in ("h2d", "gather") and ahead:
            return f"{fits}, but it starts too late: ahead={ahead + 1} would start it sooner", {"ahead": ahead + 1}
        return f"{fits}, but its time is unevenly spread, and no setting changes that", {}

    def _advise_growing(self, lane: str, lane_work: _LaneWork) -> Advice:
        """Advise on work that grows with micro-batches at least as fast as compute."""
        why = f"{format_seconds(lane_work.growing_s)} of its work grows with the micro-batches, as fast as compute or faster"
        closer = self._closer_stash(lane)
        if closer is None or lane == "eps":
            return f"{why}: only {self._required_speed(lane, lane_work)} would hide it", {}
        settings: dict[str, Any] = {"stash": closer}
        needed = micro_batches_to_hide(lane_work.compute_s, lane_work.fixed_s, 0.0, self.micro_batches)
        and_more = ""
        if needed is not None and needed > self.micro_batches:
            settings["micro_batches"] = needed
            and_more = f" with {_format_count(needed)} of this size instead of {self.micro_batches}"
        return f"{why}: stash={closer!r}{and_more}, or {self._required_speed(lane, lane_work)}, would hide it", settings

    def _closer_stash(self, lane: str) -> str | None:
        """Return the place of the stash that avoids a lane; None if the stash does not use the lane."""
        stash = self.settings.get("stash")
        if lane in DISK_LANES:
            return "host" if stash == "disk" else None
        return "device" if stash in ("host", "disk") else None

    def _required_speed(self, lane: str, lane_work: _LaneWork) -> str:
        """Describe the speed at which the lane's work would be hidden."""
        if lane == "eps":
            return "a faster optimizer"
        link = "network" if lane in NETWORK_LANES else "disk" if lane in DISK_LANES else "link"
        latency_s = self.settings.get("latency_s") or 0.0 if link == "link" else 0.0
        copying_s = lane_work.compute_s - lane_work.copies * latency_s
        if copying_s <= 0 or not lane_work.nbytes:
            return f"a {link} with less latency than {format_seconds(latency_s)}" if latency_s else f"a faster {link}"
        now = self.settings.get(f"{lane}_bytes_per_s") or lane_work.nbytes / (lane_work.fixed_s + lane_work.growing_s)
        return f"a {link} of {format_bytes(lane_work.nbytes / copying_s)}/s instead of {format_bytes(now)}/s"

    def _scales_with_micro_batches(self, event: Event) -> bool:
        return event.k >= 0 or event.kind not in self._per_visit_kinds


def _advise_stragglers(waited_s: Mapping[int, float]) -> str:
    last = max(waited_s, key=lambda rank: waited_s[rank])
    return (
        f"the wait for worker {last} is {format_seconds(waited_s[last])}: give all workers equally many rows and equally fast "
        "machines, or see its trace for its work meanwhile"
    )


@dataclass(frozen=True)
class _LaneWork:
    """Work of a lane, and the compute of the visits that can hide it."""

    compute_s: float
    fixed_s: float
    growing_s: float  # with the number of micro-batches
    nbytes: int
    copies: int


def sum_s(events: Iterable[Event]) -> float:
    """Return the total seconds of events."""
    return math.fsum(event.stop_s - event.start_s for event in events)


def _format_count(micro_batches: int) -> str:
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
