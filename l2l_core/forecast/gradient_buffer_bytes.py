"""Bytes of host buffers for gradients that the EPS needs at once, computed from a schedule.

A buffer is taken when its push is issued and freed when its gradient has been used. Buffers of one size are reused and stay
in their pool, so each size counts with its own maximum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from l2l_core.simulator import SHELL, BlockShards, Profile
from l2l_core.trace import Trace

# By bytes of a buffer: the times at which buffers are taken (1) or freed (-1).
BufferChanges = defaultdict[int, list[tuple[float, int]]]


def gradient_buffer_bytes(profile: Profile, trace: Trace) -> int:
    """Return the bytes of all gradient buffers in a step; `profile` names the gradients that leave per micro-batch."""
    issued_s, used_s = _push_times(trace), _update_times(trace)
    # Compressed gradients are unpacked on arrival.
    sizes = {key: layer.block_bytes for key, layer in profile.layers.items() if layer.push_bytes and key in used_s}
    summed: BufferChanges = defaultdict(list)
    for layer, nbytes in sizes.items():
        summed[nbytes] += [(issued_s[layer], 1), (used_s[layer], -1)]
    return _total_bytes(_per_micro_batch_changes(profile, trace)) + _total_bytes(summed)


def worker_gradient_buffer_bytes(profile: Profile, trace: Trace, shards: Mapping[str, Sequence[BlockShards]]) -> int:
    """Return the bytes of a worker's gradient buffers: gradients before the exchange, those received, and its sums."""
    rank, count = trace.worker.rank, trace.worker.count
    is_ordered = trace.settings.get("reduce") == "ordered"
    changes = _per_micro_batch_changes(profile, trace, is_ordered)
    pending = Counter(block for block, _ in _part_bytes(profile))
    blocks = {shard.key: shard for each in shards.values() for shard in each}
    issued_s, used_s = _push_times(trace), _update_times(trace)
    for event in trace.lanes["reduce"]:
        if event.kind != "exchange":
            continue
        numels, kept = blocks[event.layer].gradient_numels, pending[event.layer]
        own, whole, start_s = 4 * numels[rank], 4 * sum(numels), event.start_s - event.stalled_s
        # Workers exchange every micro-batch's gradient, or one sum; the others are freed once added.
        sent = profile.micro_batches if is_ordered else 1
        taken = (start_s, sent - kept) if kept or is_ordered else (issued_s[event.layer], 1)
        changes[whole] += [taken, (event.stop_s, -sent)]
        changes[count * own] += [(start_s, sent), (event.stop_s, -sent)]
        changes[own] += [(event.stop_s, 1), (used_s[event.layer], -1)]
    return _total_bytes(changes)


def _part_bytes(profile: Profile) -> dict[tuple[str, int], int]:
    """Return the bytes of per-micro-batch gradients, by block and micro-batch."""
    turns = profile.turns
    return {(part.block, turn.k): part.block_bytes for turn in turns for op in turn.ops for part in op.gradient_parts}


def _per_micro_batch_changes(profile: Profile, trace: Trace, is_ordered: bool = False) -> BufferChanges:
    """Count one buffer for every block and micro-batch, and those that wait to be added to it.

    The first buffer becomes the sum. It exists all the time, or, if workers send every micro-batch's gradient (`is_ordered`),
    from its push until the exchange.
    """
    changes: BufferChanges = defaultdict(list)
    if not is_ordered:
        for nbytes in _part_bytes(profile).values():
            changes[nbytes].append((-math.inf, 1))
    seen: set[tuple[str, int]] = set()
    pushes = [event for event in trace.lanes["d2h"] if event.kind == "push" and event.k >= 0]
    reduces = [event for event in trace.lanes["eps"] if event.kind == "reduce" and event.k >= 0]
    stops_s: dict[int, list[float]] = defaultdict(list)
    for event in trace.lanes["compute"]:
        stops_s[event.k].append(event.stop_s)
    for push, reduce in zip(pushes, reduces, strict=is_ordered):
        # The buffer is taken at the end of the compute event: the push may have waited for the lane.
        ends, is_added = stops_s[push.k], (reduce.layer, reduce.k) in seen
        if is_ordered or is_added:
            changes[reduce.nbytes].append((ends[bisect_right(ends, push.start_s) - 1], 1))
        if is_added:
            changes[reduce.nbytes].append((reduce.stop_s, -1))
        seen.add((reduce.layer, reduce.k))
    return changes


def _push_times(trace: Trace) -> dict[str, float]:
    """Return by layer when the push of its whole gradient is issued."""
    issued_s: dict[str, float] = {}
    for event in trace.lanes["compute"]:
        if event.kind in ("backward", "loss"):
            issued_s[event.layer] = issued_s[SHELL] = event.stop_s  # the shell's gradient leaves at the very end
    return issued_s


def _update_times(trace: Trace) -> dict[str, float]:
    """Return by block when it has been updated."""
    return {event.layer: event.stop_s for event in trace.lanes["eps"] if event.kind == "update"}


def _total_bytes(changes: BufferChanges) -> int:
    """Return the bytes of the most buffers of each size at once."""
    # At equal times, buffers are freed before others are taken.
    most = {nbytes: max(accumulate((n for _, n in sorted(each)), initial=0)) for nbytes, each in changes.items()}
    return sum(nbytes * count for nbytes, count in most.items())
