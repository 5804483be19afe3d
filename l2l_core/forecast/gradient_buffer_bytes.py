"""Gradients in host memory: how many bytes of buffers the EPS needs at once, read off a schedule.

A buffer is taken when its push is issued, and free again when its gradient has been used. Buffers of one size serve one
another; they stay in their pool, so each size counts with its own highest number.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from l2l_core.simulator import SHELL, BlockShards, Profile
from l2l_core.trace import Trace

BufferChanges = defaultdict[
    int, list[tuple[float, int]]
]  # by bytes of a buffer: when one is taken, 1, or given back, -1


def gradient_buffer_bytes(profile: Profile, trace: Trace) -> int:
    """Add up the bytes of all buffers of gradients that the EPS needs in a step.

    Args:
        profile: whose parts are the gradients that leave micro-batch by micro-batch.
        trace: of a step with these parts; without them one by one, as `aggregated` profiles have it, less is known.
    """
    return _total_bytes(_per_micro_batch_changes(profile, trace)) + _total_bytes(_summed_changes(profile, trace))


def worker_gradient_buffer_bytes(profile: Profile, trace: Trace, shards: Mapping[str, Sequence[BlockShards]]) -> int:
    """Add up the same for a worker: whole gradients until they are exchanged, what comes of others, and its own sums.

    Args:
        profile: of the step.
        trace: of the worker.
        shares: what all of them hold of each layer.
    """
    rank, count = trace.worker.rank, trace.worker.count
    if trace.settings.get("reduce") == "ordered":
        return _total_bytes(_ordered_changes(profile, trace, shards))
    changes = _per_micro_batch_changes(profile, trace)
    kept = Counter(block for block, _ in _part_bytes(profile))
    blocks = {share.key: share for each in shards.values() for share in each}
    issued_s, used_s = _push_times(trace), _update_times(trace)
    for event in (event for event in trace.lanes["reduce"] if event.kind == "exchange"):
        own = 4 * blocks[event.layer].gradient_numels[rank]
        came_s, whole = event.start_s - event.stalled_s, 4 * sum(blocks[event.layer].gradient_numels)
        # All that are kept but one are free when they have been added up, and the one when it has been sent
        many = kept[event.layer]
        changes[whole] += [(came_s, 1 - many)] if many else [(issued_s[event.layer], 1)]
        changes[whole] += [(event.stop_s, -1)]
        changes[count * own] += [(came_s, 1), (event.stop_s, -1)]
        changes[own] += [(event.stop_s, 1), (used_s[event.layer], -1)]
    return _total_bytes(changes)


def _part_bytes(profile: Profile) -> dict[tuple[str, int], int]:
    """Bytes of gradients that are kept apart, by block and micro-batch."""
    turns = profile.turns
    return {(part.block, turn.k): part.block_bytes for turn in turns for op in turn.ops for part in op.gradient_parts}


def _per_micro_batch_changes(profile: Profile, trace: Trace) -> BufferChanges:
    """One buffer for every block and micro-batch, and those that are under way to be added to it."""
    changes: BufferChanges = defaultdict(list)
    for nbytes in _part_bytes(profile).values():
        changes[nbytes].append((-math.inf, 1))
    pushes = [event for event in trace.lanes["d2h"] if event.kind == "push" and event.k >= 0]
    reduces = [event for event in trace.lanes["eps"] if event.kind == "reduce" and event.k >= 0]
    issued = _compute_stops(trace)
    seen: set[tuple[str, int]] = set()
    for push, reduce in zip(pushes, reduces, strict=False):
        if (reduce.layer, reduce.k) in seen:  # the first one's buffer becomes the sum, and is counted above
            # Taken when its compute event ended: the push itself may have waited for the lane.
            stops_s = issued[push.k]
            changes[reduce.nbytes] += [(stops_s[bisect_right(stops_s, push.start_s) - 1], 1), (reduce.stop_s, -1)]
        seen.add((reduce.layer, reduce.k))
    return changes


def _ordered_changes(profile: Profile, trace: Trace, shards: Mapping[str, Sequence[BlockShards]]) -> BufferChanges:
    """Gradients of a worker that sends each micro-batch's: all of a block's wait for the exchange, and as many come of others."""
    rank, count, rounds = trace.worker.rank, trace.worker.count, profile.micro_batches
    changes: BufferChanges = defaultdict(list)
    blocks = {share.key: share for each in shards.values() for share in each}
    pushes = [event for event in trace.lanes["d2h"] if event.kind == "push" and event.k >= 0]
    reduces = [event for event in trace.lanes["eps"] if event.kind == "reduce" and event.k >= 0]
    used_s, issued, waiting = _update_times(trace), _compute_stops(trace), Counter[tuple[str, int]]()
    for push, reduce in zip(pushes, reduces, strict=True):
        stops_s = issued[push.k]
        taken_s = stops_s[bisect_right(stops_s, push.start_s) - 1]  # when its compute event ended, as in `_apart`
        changes[reduce.nbytes].append((taken_s, 1))
        if (reduce.layer, reduce.k) in waiting:  # what is added to another one is free again
            changes[reduce.nbytes].append((reduce.stop_s, -1))
        waiting[reduce.layer, reduce.k] += 1
    for event in (event for event in trace.lanes["reduce"] if event.kind == "exchange"):
        share, here = blocks[event.layer], sum(block == event.layer for block, _ in waiting)
        whole, own, came_s = (
            4 * sum(share.gradient_numels),
            4 * share.gradient_numels[rank],
            event.start_s - event.stalled_s,
        )
        changes[whole] += [(came_s, rounds - here), (event.stop_s, -rounds)]
        changes[count * own] += [(came_s, rounds), (event.stop_s, -rounds)]
        changes[own] += [(event.stop_s, 1), (used_s[event.layer], -1)]
    return changes


def _compute_stops(trace: Trace) -> dict[int, list[float]]:
    """When compute events that give gradients end, by micro-batch."""
    stops_s: dict[int, list[float]] = defaultdict(list)
    for event in trace.lanes["compute"]:
        stops_s[event.k].append(event.stop_s)
    return stops_s


def _summed_changes(profile: Profile, trace: Trace) -> BufferChanges:
    """Gradients that leave already summed."""
    issued_s, used_s = _push_times(trace), _update_times(trace)
    # What is packed on the way is unpacked where it comes
    sizes = {key: layer.block_bytes for key, layer in profile.layers.items() if layer.push_bytes and key in used_s}
    changes: BufferChanges = defaultdict(list)
    for layer, nbytes in sizes.items():
        changes[nbytes] += [(issued_s[layer], 1), (used_s[layer], -1)]
    return changes


def _total_bytes(changes: BufferChanges) -> int:
    """Bytes of as many buffers of each size as there are at once."""
    return sum(nbytes * _max_running_sum(events) for nbytes, events in changes.items())


def _push_times(trace: Trace) -> dict[str, float]:
    """When the whole gradient of each layer begins to leave."""
    issued_s: dict[str, float] = {}
    for event in trace.lanes["compute"]:
        if event.kind in ("backward", "loss"):
            issued_s[event.layer] = issued_s[SHELL] = event.stop_s  # the shell's gradient leaves at the very end
    return issued_s


def _update_times(trace: Trace) -> dict[str, float]:
    """When each block has been updated."""
    return {event.layer: event.stop_s for event in trace.lanes["eps"] if event.kind == "update"}


def _max_running_sum(changes: list[tuple[float, int]]) -> int:
    """Highest running sum; what ends at a moment is over before anything begins at it."""
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
