"""Where things stand in a timeline: it has as many lanes as the worker whose step it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from l2l_core.trace import LANES

WIDTH, LEFT, RIGHT = 960, 96, 944  # px; time lies between LEFT and RIGHT
TOP, LANE, PITCH = 30, 34, 44  # px: of the first lane, height of a lane, from lane to lane
FIGURE_ROW = 44  # px


@dataclass(frozen=True)
class TimelineLayout:
    """The heights of a timeline's parts, in pixels from the top.

    Args:
        lanes: that are drawn, from the top.
    """

    lanes: Sequence[str]

    @property
    def rows(self) -> Iterator[tuple[str, float]]:
        """Every lane and the y of its upper edge."""
        return ((lane, TOP + i * PITCH) for i, lane in enumerate(self.lanes))

    @property
    def axis(self) -> float:
        """The line below the lanes."""
        return TOP + (len(self.lanes) - 1) * PITCH + LANE + 8

    @property
    def legend(self) -> float:
        """The baseline of the kinds of events."""
        return self.axis + 44

    @property
    def figures(self) -> float:
        """The baseline of the names of figures; those of the network have a row of their own."""
        return self.axis + 84

    @property
    def text(self) -> float:
        """Where what is said begins: the height of a timeline that says nothing."""
        return self.axis + 118 + (FIGURE_ROW if len(self.lanes) > len(LANES) else 0)
