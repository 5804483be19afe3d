"""Choice of weight slots: the layers to load next, and the slots that they take."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from l2l_core.plan.actions import Action


def forward_then_backward(layers: Sequence[str]) -> list[str]:
    """Return the visits of a step that visits `layers` in forward; backward begins with the layer that is loaded."""
    return [*layers, *reversed(layers[:-1])]


class SlotChoice:
    """Weight slots and the expected visits.

    While a layer computes, the next `ahead` layers are loaded. A load takes the slot of the layer whose next visit is
    farthest away (Belady's rule), so the last layers of forward are still in their slots when backward begins.

    Args:
        ahead: layers to load ahead.
        slots: number of weight slots.
        expected: keys of the layers in the expected order of visits.
        announces: whether to announce loads one visit before they are issued.
    """

    def __init__(self, ahead: int, slots: int, expected: Sequence[str], announces: bool = False) -> None:
        self._ahead, self._announces = ahead, announces
        self._slots: list[str | None] = [None] * slots  # the layer in each
        self._position = 0
        self._set_expected(list(expected))

    def replan(self, rest: Sequence[str]) -> None:
        """Replace the visits after the one that just ended."""
        self._set_expected([*self._expected[: self._position], *rest])

    def begin_visit(self, layer: str) -> Iterator[Action]:
        """Yield the loads that are issued before a visit of `layer`."""
        position = self._next_visit(layer)
        if position is None:
            self._set_expected([*self._expected[: self._position], layer, *self._expected[self._position :]])
        else:
            self._position = position
        upcoming = self._expected[self._position : self._position + self._ahead + 2]
        if self._announces:
            yield Action("A", layers=tuple(key for key in dict.fromkeys(upcoming) if key not in self._slots))
        window = list(dict.fromkeys(upcoming[: self._ahead + 1]))
        for wanted in window:
            if wanted not in self._slots:
                free = [slot for slot, held in enumerate(self._slots) if held not in window]
                slot = max(free, key=self._next_use)  # the first of several
                self._slots[slot] = wanted
                yield Action("L", wanted, slot=slot)

    def end_visit(self) -> None:
        """Go on to the next expected visit."""
        self._position += 1

    def _set_expected(self, expected: list[str]) -> None:
        self._expected = expected
        self._visits: defaultdict[str, list[int]] = defaultdict(list)  # positions in `expected`, by layer
        for position, layer in enumerate(expected):
            self._visits[layer].append(position)

    def _next_visit(self, layer: str) -> int | None:
        visits = self._visits[layer]
        index = bisect_left(visits, self._position)
        return visits[index] if index < len(visits) else None

    def _next_use(self, slot: int) -> int:
        held, end = self._slots[slot], len(self._expected)
        if held is None:
            return end + 1  # before the slot of a layer that is expected no more
        position = self._next_visit(held)
        return end if position is None else position
