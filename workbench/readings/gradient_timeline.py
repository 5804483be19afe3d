"""State of the gradient of each layer over time: accumulating, being pushed, on the host, or applied."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from workbench.readings.layer_copies import LayerCopies
from workbench.readings.ordered_events import OrderedEvents
from workbench.readings.step_state import PushState
from workbench.readings.visit_timeline import VisitTimeline

MAX_LISTED = 8  # last gradients to examine; the device has buffers for two


class GradientSpan(NamedTuple):
    """Times of a gradient on the device; `push` is the index of its copy, or -1."""

    begun_s: float
    complete_s: float
    pushed_s: float
    layer: int
    push: int


class GradientState(NamedTuple):
    """The gradients at one time by key, as in `StepState`."""

    accumulating: tuple[str, ...]
    pushing: tuple[PushState, ...]
    arrived: frozenset[str]
    updated: tuple[str, ...]


class GradientTimeline:
    """The gradients of a step over time.

    Args:
        events, visits, pushes: of the step.
        live: True if the step has not finished, so that pushes may follow.
        frozen: layers that were not pushed in the previous step.
        accumulates_all: True if the gradients of all layers stay on the device until the last micro-batch, as depth first.
    """

    def __init__(
        self,
        events: OrderedEvents,
        visits: VisitTimeline,
        pushes: LayerCopies,
        live: bool,
        frozen: Collection[int] = (),
        accumulates_all: bool = False,
    ) -> None:
        self._keys, self._pushes = events.keys, pushes
        find_spans = _spans_by_layer if accumulates_all else _spans_by_visit
        self._gradients = list(find_spans(events, visits, pushes, live, frozen))
        self._max_listed = len(self._gradients) if accumulates_all else MAX_LISTED
        self._begun_s = [one.begun_s for one in self._gradients]
        updates = events.of_layers("update")
        updates = updates[np.argsort(events.stop_s[updates], kind="stable")]
        self._update_stop_s = events.stop_s[updates]
        self._updates = [self._keys[int(position)] for position in events.position[updates].tolist()]
        by_stop = np.argsort(pushes.stop_s, kind="stable")
        self._arrival_s = pushes.stop_s[by_stop]
        self._arrivals = [self._keys[pushes.layers[int(push)]] for push in by_stop.tolist()]

    def at(self, t_s: float) -> GradientState:
        """Return the state of the gradients at a time."""
        accumulating, pushing = [], []
        stop = int(np.searchsorted(self._begun_s, t_s, side="right"))
        for one in self._gradients[max(0, stop - self._max_listed) : stop]:
            if t_s < one.complete_s:
                accumulating.append(self._keys[one.layer])
            elif t_s < one.pushed_s:
                share = self._pushes.share(one.push, t_s) if one.push >= 0 else 0.0
                pushing.append(PushState(self._keys[one.layer], share))
        updated = tuple(self._updates[: int(np.searchsorted(self._update_stop_s, t_s, "right"))])
        arrived = frozenset(self._arrivals[: int(np.searchsorted(self._arrival_s, t_s, "right"))])
        return GradientState(tuple(accumulating), tuple(pushing), arrived.difference(updated), updated)


def _spans_by_visit(
    events: OrderedEvents, visits: VisitTimeline, pushes: LayerCopies, live: bool, frozen: Collection[int]
) -> Iterator[GradientSpan]:
    """Yield the gradients in order of their start: one per visit with a backward, except of frozen layers."""
    by_layer: dict[int, list[int]] = {}
    for push, layer in enumerate(pushes.layers):
        by_layer.setdefault(layer, []).append(push)
    rows = events.of_layers("backward")
    numbers, first = np.unique(np.searchsorted(visits.rows, rows, side="right") - 1, return_index=True)
    for number, begun_s in zip(numbers.tolist(), events.start_s[rows[first]].tolist(), strict=True):
        layer = visits.layers[number]
        push = next((p for p in by_layer.get(layer, ()) if pushes.stop_s[p] >= begun_s), -1)
        complete_s = float(visits.stop_s[number]) if not live or number + 1 < len(visits.layers) else np.inf
        if push >= 0:
            yield GradientSpan(begun_s, complete_s, max(_pushed_s(pushes, push), complete_s), layer, push)
        elif live and number + 2 >= len(visits.layers) and layer not in frozen:  # its push has no event yet
            yield GradientSpan(begun_s, complete_s, np.inf, layer, -1)


def _spans_by_layer(
    events: OrderedEvents, visits: VisitTimeline, pushes: LayerCopies, live: bool, frozen: Collection[int]
) -> Iterator[GradientSpan]:
    """Yield the gradients in order of their start: one per layer, to which all micro-batches add."""
    push_of = {layer: push for push, layer in enumerate(pushes.layers)}
    rows = events.of_layers("backward")
    positions = events.position[rows]
    for first in np.sort(np.unique(positions, return_index=True)[1]).tolist():
        layer, begun_s = int(positions[first]), float(events.start_s[rows[first]])
        push = push_of.get(layer, -1)
        if push >= 0:
            complete_s = float(events.stop_s[rows[positions == layer]].max())
            yield GradientSpan(begun_s, complete_s, max(_pushed_s(pushes, push), complete_s), layer, push)
        elif live and layer not in frozen:
            yield GradientSpan(begun_s, np.inf, np.inf, layer, -1)


def _pushed_s(pushes: LayerCopies, push: int) -> float:
    """Return the end of a push; infinity if pieces of it are missing."""
    return float(pushes.stop_s[push]) if pushes.share(push, np.inf) >= 1.0 else np.inf
