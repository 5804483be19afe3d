"""Gradients in host memory: how many bytes of buffers the EPS needs at once, read off a schedule.

A buffer is taken when its push is issued, and free again when its gradient has been used. Buffers of one size serve one
another; they stay in their pool, so each size counts with its own highest number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from l2l_core.forecast.costs import SHELL
from l2l_core.forecast.profile import Profile
from l2l_core.trace import Trace


def gradient_buffer_bytes(profile: Profile, trace: Trace) -> int:
    """Add up the bytes of all buffers of gradients that the EPS needs in a step.

    Args:
        profile: whose parts are the gradients that leave micro-batch by micro-batch.
        trace: of a step with these parts; without them one by one, as `aggregated` profiles have it, less is known.
    """
    return _apart_bytes(profile, trace) + _whole_bytes(profile, trace)


def _apart_bytes(profile: Profile, trace: Trace) -> int:
    """One buffer for every block and micro-batch, and those that are under way to be added to it."""
    parts = [(part.block, turn.k, part.block_bytes) for turn in profile.turns for op in turn.ops for part in op.parts]
    kept = sum(nbytes for *_, nbytes in set(parts))
    pushes = [event for event in trace.lanes["d2h"] if event.kind == "push" and event.k >= 0]
    reduces = [event for event in trace.lanes["eps"] if event.kind == "reduce" and event.k >= 0]
    issued = _issues(trace)
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for push, reduce in zip(pushes, reduces, strict=False):
        if (reduce.layer, reduce.k) in seen:  # the first one's buffer becomes the sum, and is among `kept`
            # Taken when its compute event ended: the push itself may have waited for the lane.
            stops_s = issued[push.k]
            changes[reduce.nbytes] += [(stops_s[bisect_right(stops_s, push.start_s) - 1], 1), (reduce.stop_s, -1)]
        seen.add((reduce.layer, reduce.k))
    return kept + sum(nbytes * _most(events) for nbytes, events in changes.items())


def _issues(trace: Trace) -> dict[int, list[float]]:
    """When compute events that give gradients end, by micro-batch."""
    stops_s: dict[int, list[float]] = defaultdict(list)
    for event in trace.lanes["compute"]:
        stops_s[event.k].append(event.stop_s)
    return stops_s


def _whole_bytes(profile: Profile, trace: Trace) -> int:
    """Gradients that leave already summed: highest number at once, by size."""
    issued_s: dict[str, float] = {}
    for event in trace.lanes["compute"]:
        if event.kind in ("backward", "loss"):
            issued_s[event.layer] = issued_s[SHELL] = event.stop_s  # the shell's gradient leaves at the very end
    used_s = {event.layer: event.stop_s for event in trace.lanes["eps"] if event.kind == "update"}
    sizes = {key: layer.push_bytes for key, layer in profile.layers.items() if layer.push_bytes and key in used_s}
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for layer, nbytes in sizes.items():
        changes[nbytes] += [(issued_s[layer], 1), (used_s[layer], -1)]
    return sum(nbytes * _most(events) for nbytes, events in changes.items())


def _most(changes: list[tuple[float, int]]) -> int:
    """Highest running sum; what ends at a moment is over before anything begins at it."""
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
