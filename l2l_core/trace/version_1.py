"""Files of version 1, in which events do not say to which stay, slot and copy they belong: it is deduced.

Traces under way and files of today say it, so that nobody else has to guess.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from l2l_core.rules import weight_slots
from l2l_core.trace.events import Event

UNSAID = {"stay": -1, "slot": -1, "piece": 0, "pieces": 1}


def with_all_said(events: Sequence[Event], ahead: int) -> list[Event]:
    """Return the same events in the same order, with stays, slots and pieces, of a step that ran so many layers ahead."""
    return _with_slots(_with_pieces(_with_stays(events)), weight_slots(ahead))


def _with_stays(events: Sequence[Event]) -> list[Event]:
    """With the stays of compute events.

    A stay begins with another layer, with another visit of a shared one, and at the turn where a graph comes back: there
    the last layer's forward and backward take turns in one stay, unless its graphs were dropped meanwhile.
    """
    told = list(events)
    moved = {(e.visit, e.k) for e in told if e.kind in ("fetch", "stash")}
    stay, last = -1, None
    for i in _by_start(told):
        event = told[i]
        if event.lane != "compute":
            continue
        if event.kind in ("forward", "backward"):
            if last is None or last.layer != event.layer:
                stay += 1
            elif last.kind == event.kind:
                stay += last.visit != event.visit
            elif event.kind == "backward":
                stay += last.k != event.k or (event.visit, event.k) in moved
            last = event
        told[i] = event._replace(stay=stay)
    return told


def _with_pieces(events: Sequence[Event]) -> list[Event]:
    """With the pieces of copies: those of one layer that follow one another are one copy."""
    told = list(events)
    for kind in ("load", "push"):
        rows = [i for i in _by_start(told) if told[i].kind == kind and told[i].k < 0]
        for _, group in groupby(rows, key=lambda i: told[i].layer):
            copy = list(group)
            for piece, i in enumerate(copy):
                told[i] = told[i]._replace(piece=piece, pieces=len(copy))
    return told


def _with_slots(events: Sequence[Event], slots: int) -> list[Event]:
    """With the slots of loads: an empty one, or else the one whose layer is wanted again last."""
    told, order = list(events), _by_start(events)
    stays: dict[int, tuple[str, float]] = {}  # layer, and when it was over
    for event in (told[i] for i in order):
        if event.kind in ("forward", "backward"):
            before = stays.get(event.stay, (event.layer, 0.0))[1]
            stays[event.stay] = event.layer, max(before, event.stop_s)
    uses, stops = defaultdict(list), [stop_s for _, stop_s in stays.values()]
    for position, (layer, _) in enumerate(stays.values()):
        uses[layer].append(position)
    held: list[str] = [""] * slots

    def wanted(slot: int, position: int) -> float:
        following = uses[held[slot]]
        at = bisect_left(following, position)
        return following[at] if at < len(following) else float("inf")

    for i in order:
        event = told[i]
        if event.kind != "load" or event.layer not in uses:
            continue
        if event.piece == 0 and event.layer not in held:
            # a load that begins when a stay is over was made for the next one
            position = bisect_right(stops, event.start_s)
            held[max(range(slots), key=lambda slot: wanted(slot, position))] = event.layer
        if event.layer in held:
            told[i] = event._replace(slot=held.index(event.layer))
    return told


def _by_start(events: Sequence[Event]) -> list[int]:
    return sorted(range(len(events)), key=lambda i: (events[i].start_s, events[i].stop_s))
