"""Which visits of backward found the graph of their forward still there, so that nothing was recomputed in them."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

import numpy as np

from l2l_core.schedule_rules import kept_layer_count
from workbench.readings.layer_copies import LayerCopies
from workbench.readings.ordered_events import OrderedEvents


class KeptGraphs:
    """Reads it off the order of events: a layer that was loaded again since its forward has lost its graph, as the engine has it.

    What is not in events is not known: a layer that leaves traces in its run is recomputed in spite of the settings.

    Args:
        events: of the step.
        loads: of its layers.
        keep, ahead, resident: settings of the step.
    """

    def __init__(self, events: OrderedEvents, loads: LayerCopies, keep: int, ahead: int, resident: int) -> None:
        self._events, self._loads = events, loads
        self._settings = {"keep": keep, "ahead": ahead, "resident": resident}

    def at(self, row: int) -> bool:
        """Say whether an event is of backward, and of a layer whose graph was kept."""
        events = self._events
        if row < 0 or events.kind_and_layer(row)[0] != "backward":
            return False
        visits, firsts = len(self._forward_starts), self._forward_starts
        behind = int(events.visit[row]) - visits  # visits of forward between it and the turn
        if not 0 <= behind < kept_layer_count(self._settings, visits):
            return False
        forward = firsts[visits - 1 - behind]
        if behind == 0 and self._settings["keep"] < 1 and events.stay[forward] != events.stay[row]:
            return False  # the graph at the turn is there only as long as the micro-batch goes on to its loss
        since_s, until_s = float(events.start_s[forward]), float(events.start_s[row])
        copies = self._load_starts_s.get(int(events.position[row]), [])
        return bisect_right(copies, since_s) == bisect_right(copies, until_s)

    @cached_property
    def _forward_starts(self) -> list[int]:
        """By visit of forward, its first event."""
        rows = self._events.of_layers("forward")
        return rows[np.unique(self._events.visit[rows], return_index=True)[1]].tolist()

    @cached_property
    def _load_starts_s(self) -> dict[int, list[float]]:
        """By place in the stack, when each load of the layer began."""
        found: dict[int, list[float]] = {}
        for rank, start_s in zip(self._loads.layers, self._loads.start_s.tolist(), strict=True):
            found.setdefault(rank, []).append(start_s)
        return found
