"""Limits of a step: the largest depth that fits the memories, and the number of micro-batches that hides the link."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from l2l_core.analysis import OVERLAPPING, VisitWork, micro_batches_to_hide
from l2l_core.config import Compress, RelayConfig
from l2l_core.forecast.memory_timeline import MemoryTimeline
from l2l_core.forecast.profile_transforms import extrapolate_profile
from l2l_core.forecast.representatives import order_from_middle, repeat_middle
from l2l_core.forecast.shelf_costs import ShelfCosts
from l2l_core.schedule_rules import kept_layer_count, weight_slots
from l2l_core.simulator import COPY_LANES, MAX_EVENTS, SHELL, Cluster, Profile, simulate, simulate_step
from l2l_core.trace import DISK_LANES, Trace

_MAX_DEPTH = 1 << 20  # layers; a larger depth counts as no limit
_LANES_TO_HIDE = (*COPY_LANES, *DISK_LANES)
_PER_VISIT_KINDS = ("load", "push", "read", "write")  # independent of the number of micro-batches
_MIN_SIMULATED = 64  # micro-batches simulated at any depth


@dataclass(frozen=True, slots=True)
class DepthBudget:
    """Memory for a search of the largest depth."""

    device_bytes: int | None  # limit
    host_bytes: int | None  # limit
    fixed_host_bytes: int  # masters, optimizer state and gradients of the present depth
    layer_bytes: Mapping[str, int]  # the share of each layer in them, by key in stack order


def largest_depth(profile: Profile, representatives: Sequence[int], budget: DepthBudget) -> int | None:
    """Return the most layers that fit both limits, None without a limit; deeper stacks repeat the middle layer.

    The step is `extrapolate_profile(profile, representatives)`, with the stash alone in its host memory. If all of its layers
    keep their graphs, and deeper stacks would not, the number is too low: nothing was measured of a layer that is recomputed.
    """
    if budget.device_bytes is None and budget.host_bytes is None:
        return None
    timeline, keys = MemoryTimeline(profile), list(budget.layer_bytes)
    spare = order_from_middle(keys, keys[-1]) or keys  # deeper stacks repeat the first of them
    # The number of kept graphs does not depend on the depth: more layers cost as much as the recomputed ones.
    recomputed = keys[: len(keys) - kept_layer_count(profile.settings, len(keys))]
    spare.sort(key=lambda key: key not in recomputed)
    slot_bytes = _extra_slot_bytes(profile, len(keys))

    def fits(depth: int) -> bool:
        more = depth - len(keys)
        copies = {spare[0]: 1 + more} if more >= 0 else dict.fromkeys(spare[:-more], 0)
        need = timeline.rise("device", representatives, copies).peak + slot_bytes(depth)
        if budget.device_bytes is not None and need > budget.device_bytes:
            return False
        if budget.host_bytes is None:
            return True
        added = sum((count - 1) * budget.layer_bytes[key] for key, count in copies.items())
        stash = timeline.rise("host", representatives, copies).peak
        return budget.fixed_host_bytes + added + stash <= budget.host_bytes

    if fits(_MAX_DEPTH):
        return None
    return bisect_left(range(1, _MAX_DEPTH), True, key=lambda depth: not fits(depth))


def _extra_slot_bytes(profile: Profile, layers: int) -> Callable[[int], int]:
    """Return a function from a depth to the bytes of its additional slots, or of missing ones: none breadth first."""
    settings = profile.settings
    if settings.get("schedule", "breadth_first") == "breadth_first":
        return lambda depth: 0
    costs = [cost for key, cost in profile.layers.items() if key != SHELL]
    weights, gradient = (max(nbytes) for nbytes in zip(*((c.load_bytes, c.push_bytes) for c in costs), strict=True))
    wire = Compress.of(settings.get("compress"))
    if wire is not None and gradient:
        # On the device gradients are whole; with feedback there is a residual, and its value before the step.
        gradient = max(cost.block_bytes for cost in costs if cost.push_bytes)
        whole = settings.get("update", "eager") != "eager" or settings.get("rollback", False)
        gradient *= 1 + wire.feedback * (1 + whole)
    fewest, slots = weight_slots(settings["ahead"]), weight_slots(settings["ahead"], settings["resident"])
    return lambda depth: weights * (max(depth, fewest) - slots) + gradient * (depth - layers)


def hiding_micro_batches(
    profile: Profile, config: RelayConfig, figures: Mapping[str, Any], shelf: ShelfCosts | None = None
) -> int | None:
    """Return the smallest number of micro-batches with which neither link nor disk binds forward or backward; or None.

    Short steps are simulated; for longer ones `micro_batches_to_hide` computes the number.
    """
    bare = profile.map_memory(lambda memory: ())  # bounds depend on events alone
    events_per_turn = 20 if config.stash == "disk" else 2  # at least
    most = max(_MIN_SIMULATED, MAX_EVENTS // (events_per_turn * len(profile.stays)))

    def trace_of(count: int) -> Trace:
        settings = replace(config, micro_batches=count)
        longer = extrapolate_profile(bare, repeat_middle(bare.micro_batches, count))
        if shelf is None:
            return simulate(longer, settings, figures)
        with_disk = {**figures, **shelf.figures()}
        return simulate_step(longer, settings, with_disk, Cluster(count=1), shelf=shelf.make_virtual_backend()).trace

    def is_hidden(trace: Trace) -> bool:
        return not any(b.phase in OVERLAPPING and b.lane in _LANES_TO_HIDE for b in trace.bound_by())

    if config.schedule == "depth_first":  # the profile gives no costs for other numbers
        return config.micro_batches if is_hidden(simulate(bare, config, figures)) else None
    low, high = 0, 1  # low is not hidden, or 0
    while not is_hidden(trace := trace_of(high)):
        if high == most:
            return _extrapolate_hiding(trace, most)
        low, high = high, min(2 * high, most)
    return bisect_left(range(high), True, lo=low + 1, key=lambda count: is_hidden(trace_of(count)))


def _extrapolate_hiding(trace: Trace, micro_batches: int) -> int | None:
    work = VisitWork(trace.lanes, trace.settings)
    needed = micro_batches + 1
    for phase in OVERLAPPING:
        for lane in (lane for lane in _LANES_TO_HIDE if lane in trace.lanes):
            visits = [visit for visit in work.in_phase(phase) if visit[lane]]
            if not visits:
                continue
            events = [event for visit in visits for event in visit[lane]]
            # A push with the number of a micro-batch has its own gradient, so the time grows with the number of them.
            fixed_s = sum(e.stop_s - e.start_s for e in events if e.kind in _PER_VISIT_KINDS and e.k < 0)
            whole_s = sum(e.stop_s - e.start_s for e in events)
            compute_s = sum(e.stop_s - e.start_s for visit in visits for e in visit["compute"])
            found = micro_batches_to_hide(compute_s, fixed_s, whole_s - fixed_s, micro_batches)
            if found is None:
                return None
            needed = max(needed, found)
    return needed
