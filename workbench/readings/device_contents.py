"""Which layer is in which weight slot of the device, as loads say it. It reads no clock and draws nothing."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from workbench.readings.layer_copies import LayerCopies


class SlotContent(NamedTuple):
    """What a slot holds: a layer and the number of the load that brought it."""

    layer: int
    load: int


class SlotTimeline:
    """The slots over time.

    Invariant: `states[j]` holds from `times[j]` until `times[j + 1]`, and names no layer twice.

    Args:
        loads: of the step, each into a slot.
        slots: how many there are at least.
    """

    def __init__(self, loads: LayerCopies, slots: int) -> None:
        self._empty_slots: tuple[SlotContent | None, ...] = (None,) * max(slots, 1 + max(loads.slots, default=-1))
        held = list(self._empty_slots)
        self.times: list[float] = loads.start_s.tolist()  # ascending, as events are: `at` bisects
        self.states: list[tuple[SlotContent | None, ...]] = []
        for load, (layer, slot) in enumerate(zip(loads.layers, loads.slots, strict=True)):
            held[slot] = SlotContent(layer, load)
            self.states.append(tuple(held))

    def at(self, t_s: float) -> tuple[SlotContent | None, ...]:
        """Say what the slots hold at a time."""
        j = bisect_right(self.times, t_s) - 1
        return self.states[j] if j >= 0 else self._empty_slots
