"""Which layer is in which weight slot of the device, deduced from loads and visits. It reads no clock and draws nothing.

The rule is that of `l2l_core/step/traffic/slots.py`: a load takes an empty slot, or else the one whose layer is wanted
again last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from workbench.readings.copies import Copies
from workbench.readings.visits import Visits


class Held(NamedTuple):
    """What a slot holds: a layer and the number of the load that brought it, -1 if none was seen."""

    layer: int
    load: int


class Residency:
    """The slots over time.

    Invariant: `states[j]` holds from `times[j]` until `times[j + 1]`, and names no layer twice.

    Args:
        loads, visits: of the step.
        slots: how many there are.
    """

    def __init__(self, loads: Copies, visits: Visits, slots: int) -> None:
        self._uses: dict[int, list[int]] = {}
        for position, layer in enumerate([*visits.layers, *visits.expected]):
            self._uses.setdefault(layer, []).append(position)
        stops = visits.stop_s.tolist()
        held: list[Held | None] = [None] * slots
        self.times: list[float] = []
        self.states: list[tuple[Held | None, ...]] = []
        begun = zip(loads.start_s.tolist(), loads.layers, strict=True)
        happened = [(start, 0, layer, number) for number, (start, layer) in enumerate(begun)]
        happened += [(start, 1, layer, -1) for start, layer in zip(visits.start_s.tolist(), visits.layers, strict=True)]
        for t_s, is_visit, layer, load in sorted(happened):
            there = next((i for i, one in enumerate(held) if one is not None and one.layer == layer), None)
            if there is not None and is_visit:
                continue
            # a load that begins when a visit is over was made for the next one
            position = bisect_right(stops, t_s)
            held[self._room(held, position) if there is None else there] = Held(layer, load)
            self.times.append(t_s)
            self.states.append(tuple(held))
        self._empty: tuple[Held | None, ...] = (None,) * slots

    def at(self, t_s: float) -> tuple[Held | None, ...]:
        """What the slots hold at a time."""
        j = bisect_right(self.times, t_s) - 1
        return self.states[j] if j >= 0 else self._empty

    def _room(self, held: Sequence[Held | None], position: int) -> int:
        def rank(i: int) -> tuple[float, float]:
            one = held[i]
            if one is None:
                return (float("inf"), 1.0)
            uses = self._uses.get(one.layer, [])
            j = bisect_left(uses, position)
            # of those that are not wanted again the one that was used first goes first
            return (float(uses[j]) if j < len(uses) else float("inf"), -float(uses[j - 1]) if j else 0.0)

        return max(range(len(held)), key=rank)
