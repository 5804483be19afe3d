"""How far a step could go: the depth that fits the memories, and the micro-batches that hide the link."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from l2l_core.analysis import OVERLAPPING, VisitWork, micro_batches_to_hide
from l2l_core.config import Compress, RelayConfig
from l2l_core.forecast.memory_timeline import MemoryTimeline
from l2l_core.forecast.profile_extrapolation import extrapolate_profile, map_memory
from l2l_core.forecast.representatives import order_from_middle, repeat_middle
from l2l_core.forecast.shelf_costs import ShelfCosts
from l2l_core.schedule_rules import kept_layer_count, weight_slots
from l2l_core.simulator import COPY_LANES, MAX_EVENTS, SHELL, Cluster, Profile, simulate, simulate_step
from l2l_core.trace import DISK_LANES, Trace

_MAX_DEPTH = 1 << 20  # layers; what fits so many has no limit worth a number
_LANES_TO_HIDE = (*COPY_LANES, *DISK_LANES)  # lanes that compute should hide
_PER_VISIT_KINDS = ("load", "push", "read", "write")  # per visit, however many micro-batches
_MIN_SIMULATED = 64  # micro-batches that are tried in simulations, whatever the depth


@dataclass(frozen=True, slots=True)
class DepthBudget:
    """Bytes that there are, None without a limit; and what stands on the host whatever the micro-batches.

    Attributes:
        device_bytes, host_bytes: that there are.
        standing_bytes: masters, optimizer state and gradients, of the present depth.
        layer_bytes: of each layer's share in them, by key in stack order.
    """

    device_bytes: int | None
    host_bytes: int | None
    fixed_host_bytes: int
    layer_bytes: Mapping[str, int]


def largest_depth(profile: Profile, representatives: Sequence[int], budget: DepthBudget) -> int | None:
    """Find the most layers that fit both budgets, None without a limit; deeper stacks have more layers like the middle one.

    Args:
        profile: of a few micro-batches, with the stash alone in its host memory.
        stands: as in `stretch`.
        budgets: and what is taken of them.
    """
    walk = MemoryTimeline(profile)
    keys = list(budget.layer_bytes)
    if budget.device_bytes is None and budget.host_bytes is None:
        return None
    spare = (
        order_from_middle(keys, keys[-1]) or keys
    )  # deeper stacks repeat the first of them; forward turns at the last layer
    # A step keeps the graphs of as many layers however deep it is, so that further ones are like those that it recomputes.
    recomputed = keys[: len(keys) - kept_layer_count(profile.settings, len(keys))]
    slots_bytes = _extra_slot_bytes(profile, len(keys))
    spare.sort(key=lambda key: key not in recomputed)

    def fits(depth: int) -> bool:
        more = depth - len(keys)
        copies = {spare[0]: 1 + more} if more >= 0 else dict.fromkeys(spare[:-more], 0)
        need = walk.rise("device", representatives, copies).peak + slots_bytes(depth)
        if budget.device_bytes is not None and need > budget.device_bytes:
            return False
        if budget.host_bytes is None:
            return True
        added = sum((count - 1) * budget.layer_bytes[key] for key, count in copies.items())
        return budget.fixed_host_bytes + added + walk.rise("host", representatives, copies).peak <= budget.host_bytes

    if fits(_MAX_DEPTH):
        return None
    return bisect_left(
        range(1, _MAX_DEPTH), True, key=lambda depth: not fits(depth)
    )  # the first that fits no more, less one


def _extra_slot_bytes(profile: Profile, layers: int) -> Callable[[int], int]:
    """Say what slots of another depth take more of the device: nothing in a relay, where layers wait for their turn."""
    settings = profile.settings
    if settings.get("schedule", "breadth_first") == "breadth_first":
        return lambda depth: 0
    costs = [cost for key, cost in profile.layers.items() if key != SHELL]
    weights, pushed = (max(nbytes) for nbytes in zip(*((c.load_bytes, c.push_bytes) for c in costs), strict=True))
    wire, gradient = Compress.of(settings.get("compress")), pushed
    if wire is not None:  # on the device they are whole, and feedback keeps as much, and as it was before the step
        gradient = max(cost.block_bytes for cost in costs if cost.push_bytes) if pushed else 0
        whole = settings.get("update") == "deferred" or settings.get("rollback", False)
        gradient *= 1 + wire.feedback * (1 + whole)
    slots = weight_slots(settings["ahead"], settings["resident"])
    return lambda depth: weights * max(0, depth - slots) + gradient * (depth - layers)


def hiding_micro_batches(
    profile: Profile, config: RelayConfig, figures: Mapping[str, Any], shelf: ShelfCosts | None = None
) -> int | None:
    """Find the least number of micro-batches with which neither link nor disk binds forward or backward; None if there is none.

    Numbers are tried in simulations as long as those are short; beyond, the arithmetic of `micro_batches_to_hide` decides.
    """
    bare = map_memory(profile, lambda memory: ())  # what binds is a matter of events; samples would only be added up
    events = 2 if config.stash != "disk" else 20  # of a turn, at least: what goes to a file is replayed turn by turn
    most = max(_MIN_SIMULATED, MAX_EVENTS // (events * len(profile.stays)))

    def trace_of(count: int) -> Trace:
        asked, stretched = (
            replace(config, micro_batches=count),
            extrapolate_profile(bare, repeat_middle(bare.micro_batches, count)),
        )
        if shelf is None:
            return simulate(stretched, asked, figures)
        return simulate_step(
            stretched, asked, {**figures, **shelf.figures()}, Cluster(count=1), shelf=shelf.make_virtual_backend()
        ).trace

    def is_hidden(trace: Trace) -> bool:
        return not any(b.phase in OVERLAPPING and b.lane in _LANES_TO_HIDE for b in trace.bound_by())

    if config.schedule == "depth_first":  # what repeats there is no turn of a stay: of other numbers nothing is known
        return config.micro_batches if is_hidden(simulate(bare, config, figures)) else None
    low, high = 0, 1  # low does not hide, or is none at all
    while not is_hidden(trace := trace_of(high)):
        if high == most:
            return _extrapolate_hiding(trace, most)
        low, high = high, min(2 * high, most)
    return bisect_left(range(high), True, lo=low + 1, key=lambda count: is_hidden(trace_of(count)))


def _extrapolate_hiding(trace: Trace, micro_batches: int) -> int | None:
    work = VisitWork(trace.lanes, trace.settings)
    needed = 1
    for phase in OVERLAPPING:
        for lane in (lane for lane in _LANES_TO_HIDE if lane in trace.lanes):
            visits = [visit for visit in work.in_phase(phase) if visit[lane]]
            if not visits:
                continue  # the lane has nothing to do in this phase, so there is nothing to hide
            events = [event for visit in visits for event in visit[lane]]
            # With a micro-batch's number a push is that of its own gradient, and grows with the number of them.
            fixed_s = sum(e.stop_s - e.start_s for e in events if e.kind in _PER_VISIT_KINDS and e.k < 0)
            whole_s = sum(e.stop_s - e.start_s for e in events)
            compute_s = sum(e.stop_s - e.start_s for visit in visits for e in visit["compute"])
            found = micro_batches_to_hide(compute_s, fixed_s, whole_s - fixed_s, micro_batches)
            if found is None:
                return None
            needed = max(needed, found)
    return max(needed, micro_batches + 1)
