"""A step's memory in the format of `torch.cuda.memory._snapshot()`, for PyTorch's memory viewer.

A trace has bytes by category, not allocations. Every rise of a category becomes one allocation, named after the events that
ran then; every fall frees the latest allocations of the category, the last of them in part. Sizes and times are those of
the trace, addresses are made up. Device 0 of the viewer is the device, device 1 the host.

The viewer (https://docs.pytorch.org/docs/main/torch_cuda_memory.html) reads pickles of protocols 2 to 4 with Python's
built-in types, and needs at least one event of the category "unknown".
"""

from __future__ import annotations

import pickle
from bisect import bisect_right, insort
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from l2l_core.trace.events import CATEGORIES, MemorySample
from l2l_core.trace.trace import Trace

JsonObject = dict[str, Any]

BASE_ADDRESS = 1 << 40  # of the first place; the second begins at twice this address


def write_memory_snapshot(trace: Trace, path: Path) -> None:
    """Write `memory_snapshot(trace)` to a file."""
    if path.suffix != ".pickle":
        raise ValueError(f"cannot export to {str(path)!r}: memory snapshots are files *.pickle")
    with path.open("wb") as file:
        pickle.dump(memory_snapshot(trace), file, protocol=4)


def memory_snapshot(trace: Trace) -> JsonObject:
    """Return the snapshot as plain values: one segment per place, in its final state, and its history."""
    arenas = [_Arena(trace, place, number) for number, place in enumerate(("device", "host"))]
    for arena in arenas:
        arena.replay_samples([sample for sample in trace.memory if sample.place == arena.place])
    return {"segments": [arena.segment() for arena in arenas], "device_traces": [arena.actions() for arena in arenas]}


class _Allocation(NamedTuple):
    """Bytes in use."""

    start: int
    stop: int
    category: str
    frames: tuple[str, ...]  # category and events, for the viewer's stack


class _Arena:
    """One place as an allocator: first fit in one segment.

    Invariant: `_allocations` is sorted by address without overlaps; `_by_category` has the same, oldest first.
    """

    def __init__(self, trace: Trace, place: str, number: int) -> None:
        self.place, self._number, self._names = place, number, trace.names
        self._begin = BASE_ADDRESS * (1 + number)
        self._end = self._begin
        self._allocations: list[_Allocation] = []
        self._by_category: dict[str, list[_Allocation]] = defaultdict(list)
        self._actions: list[JsonObject] = []
        self._lanes = {lane: events for lane, events in trace.lanes.items() if events}
        self._starts = {lane: [event.start_s for event in events] for lane, events in self._lanes.items()}

    def replay_samples(self, samples: list[MemorySample]) -> None:
        """Allocate and free until the bytes of each sample are in use."""
        used: dict[str, int] = defaultdict(int)
        for sample in samples:
            time_us = round(sample.t_s * 1e6)
            moves = [(sample.bytes_by_category.get(c, 0) - used[c], c) for c in {**dict.fromkeys(CATEGORIES), **used}]
            for change, category in sorted(moves):  # frees first
                if change < 0:
                    self._free(category, -change, time_us)
                elif change > 0:
                    start, frames = self._find_gap(change), (category, *self._active_events(sample.t_s))
                    self._alloc(_Allocation(start, start + change, category, frames), time_us)
                used[category] += change

    def segment(self) -> JsonObject:
        """Return the blocks in use at the end, and the gaps between them."""
        blocks: list[JsonObject] = []
        address = self._begin
        for block in self._allocations:
            if block.start > address:
                blocks.append(_block_row(address, block.start, "inactive", ()))
            blocks.append(_block_row(block.start, block.stop, "active_allocated", block.frames))
            address = block.stop
        if self._end > address:
            blocks.append(_block_row(address, self._end, "inactive", ()))
        in_use = sum(block.stop - block.start for block in self._allocations)
        return {
            "device": self._number,
            "address": self._begin,
            "total_size": self._end - self._begin,
            "allocated_size": in_use,
            "active_size": in_use,
            "requested_size": in_use,
            "stream": 0,
            "segment_type": "large",
            "blocks": blocks,
            "frames": _frames((self.place,)),
        }

    def actions(self) -> list[JsonObject]:
        """Return the allocation of the segment, and every allocation and release in it."""
        made = _Allocation(self._begin, self._end, "unknown", (self.place,))
        return [_action_row("segment_alloc", made, 0), *self._actions] if self._actions else []

    def _alloc(self, block: _Allocation, time_us: int) -> None:
        insort(self._allocations, block)
        self._by_category[block.category].append(block)
        self._end = max(self._end, block.stop)
        self._actions.append(_action_row("alloc", block, time_us))

    def _free(self, category: str, nbytes: int, time_us: int) -> None:
        while nbytes:
            block = self._by_category[category].pop()
            self._allocations.remove(block)
            size = block.stop - block.start
            self._actions += [_action_row(action, block, time_us) for action in ("free_requested", "free_completed")]
            if size > nbytes:  # the rest stays where it is
                self._alloc(block._replace(stop=block.stop - nbytes), time_us)
            nbytes -= min(size, nbytes)

    def _find_gap(self, nbytes: int) -> int:
        """Return the address of the first gap that is large enough."""
        address = self._begin
        for block in self._allocations:
            if block.start - address >= nbytes:
                break
            address = block.stop
        return address

    def _active_events(self, t_s: float) -> tuple[str, ...]:
        """Return the events that run on each lane at a time, for compute also the last one before."""
        names: list[str] = []
        for lane, events in self._lanes.items():
            index = bisect_right(self._starts[lane], t_s) - 1
            if index >= 0 and (t_s <= events[index].stop_s or lane == "compute"):
                event = events[index]
                names.append(f"{lane}: {event._replace(layer=self._names.get(event.layer, event.layer)).label()}")
        return tuple(names)


def _action_row(action: str, block: _Allocation, time_us: int) -> JsonObject:
    return {
        "action": action,
        "addr": block.start,
        "size": block.stop - block.start,
        "stream": 0,
        "time_us": time_us,
        "category": block.category,
        "frames": _frames(block.frames),
    }


def _block_row(start: int, stop: int, state: str, names: tuple[str, ...]) -> JsonObject:
    size = stop - start
    return {
        "address": start,
        "size": size,
        "requested_size": size if names else 0,
        "state": state,
        "frames": _frames(names),
    }


def _frames(names: tuple[str, ...]) -> list[JsonObject]:
    """Return the names as a Python stack for the viewer, innermost frame first."""
    return [{"filename": "relay", "line": 0, "name": str(name)} for name in names]
