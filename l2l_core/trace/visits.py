"""Compute events grouped by visit: one stay of a layer on the device, with all its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core.trace.events import Event

_OF_LAYERS = ("forward", "backward")  # compute events of layers


def group_by_visit(compute: Sequence[Event]) -> list[list[Event]]:
    """Group compute events by stay, in order; the first group has the events before the first layer."""
    groups: list[list[Event]] = [[]]
    last = None
    for event in compute:
        if event.kind in _OF_LAYERS and event.stay != last:
            groups.append([])
            last = event.stay
        groups[-1].append(event)
    return groups


def turn_of(groups: Sequence[Sequence[Event]]) -> int:
    """Return the index of the first group with backward work, their number if there is none."""
    turns = (i for i, group in enumerate(groups) if i and any(e.kind in ("loss", "backward") for e in group))
    return next(turns, len(groups))


def find_last_backward_start(groups: Sequence[Sequence[Event]]) -> int:
    """Return the index of the group in which the last micro-batch starts backward; depth first, each has its own."""
    kinds = [[event.kind for event in group] for group in groups]
    turns = (i for i, of in enumerate(kinds) if i and of[0] == "forward" and {"loss", "backward"} & {*of})
    return max(turns, default=turn_of(groups))
