"""Where the gradient of each layer is: being added up, on its way to the host, in the EPS, or in the weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from workbench.readings.layer_copies import LayerCopies
from workbench.readings.ordered_events import OrderedEvents
from workbench.readings.step_state import PushState
from workbench.readings.visit_timeline import VisitTimeline

MAX_LISTED = 8  # gradients of which some may still be on the device; there are buffers for two


class GradientSpan(NamedTuple):
    """A layer's gradient on the device: when it comes to be, is complete, has left; `push` is its copy, -1 if not seen."""

    begun_s: float
    complete_s: float
    pushed_s: float
    layer: int
    push: int


class GradientState(NamedTuple):
    """Gradients at one time, as in `Moment`; by key."""

    accumulating: tuple[str, ...]
    pushing: tuple[PushState, ...]
    arrived: frozenset[str]
    updated: tuple[str, ...]


class GradientTimeline:
    """The gradients of a step over time.

    Args:
        events, visits, pushes: of the step.
        live: whether it is still under way, so that pushes are still to come.
        frozen: layers that were not pushed in the step before.
        gather: whether those of all layers add up on the device until the last micro-batch, as depth first.
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
        follow = _spans_by_layer if accumulates_all else _spans_by_visit
        self._gradients = list(follow(events, visits, pushes, live, frozen))
        self._max_listed = len(self._gradients) if accumulates_all else MAX_LISTED
        self._begun_s = [one.begun_s for one in self._gradients]
        updates = events.of_layers("update")
        updates = updates[np.argsort(events.stop_s[updates], kind="stable")]
        self._update_stop_s = events.stop_s[updates]
        self._updates = [self._keys[rank] for rank in events.position[updates].tolist()]
        by_stop = np.argsort(pushes.stop_s, kind="stable")
        self._arrival_s = pushes.stop_s[by_stop]
        self._arrivals = [self._keys[pushes.layers[push]] for push in by_stop.tolist()]

    def at(self, t_s: float) -> GradientState:
        """Say where the gradients are at a time."""
        adding, leaving = [], []
        stop = int(np.searchsorted(self._begun_s, t_s, side="right"))
        for one in self._gradients[max(0, stop - self._max_listed) : stop]:
            if t_s < one.complete_s:
                adding.append(self._keys[one.layer])
            elif t_s < one.pushed_s:
                share = self._pushes.share(one.push, t_s) if one.push >= 0 else 0.0
                leaving.append(PushState(self._keys[one.layer], share))
        updated = tuple(self._updates[: int(np.searchsorted(self._update_stop_s, t_s, "right"))])
        arrived = frozenset(self._arrivals[: int(np.searchsorted(self._arrival_s, t_s, "right"))])
        return GradientState(tuple(adding), tuple(leaving), arrived.difference(updated), updated)


def _spans_by_visit(
    events: OrderedEvents, visits: VisitTimeline, pushes: LayerCopies, live: bool, frozen: Collection[int]
) -> Iterator[GradientSpan]:
    """The gradients, in the order in which they come to be: one for each visit with a backward, unless it is frozen."""
    by_layer: dict[int, list[int]] = {}
    for push, layer in enumerate(pushes.layers):
        by_layer.setdefault(layer, []).append(push)
    rows = events.of_layers("backward")
    numbers, first = np.unique(np.searchsorted(visits.rows, rows, side="right") - 1, return_index=True)
    for number, begun_s in zip(numbers.tolist(), events.start_s[rows[first]].tolist(), strict=True):
        layer = visits.layers[number]
        push = next((p for p in by_layer.get(layer, ()) if pushes.stop_s[p] >= begun_s), -1)
        over_s = float(visits.stop_s[number]) if not live or number + 1 < len(visits.layers) else np.inf
        if push >= 0:
            # less than the whole copy means that pieces are still to come
            gone_s = float(pushes.stop_s[push]) if pushes.share(push, np.inf) >= 1.0 else np.inf
            yield GradientSpan(begun_s, over_s, max(gone_s, over_s), layer, push)
        elif live and number + 2 >= len(visits.layers) and layer not in frozen:  # its push is not seen yet
            yield GradientSpan(begun_s, over_s, np.inf, layer, -1)


def _spans_by_layer(
    events: OrderedEvents, visits: VisitTimeline, pushes: LayerCopies, live: bool, frozen: Collection[int]
) -> Iterator[GradientSpan]:
    """The gradients where micro-batch after micro-batch adds to all of them, in the order in which they come to be."""
    push_of = {layer: push for push, layer in enumerate(pushes.layers)}
    rows = events.of_layers("backward")
    ranks = events.position[rows]
    for at in np.sort(np.unique(ranks, return_index=True)[1]).tolist():
        layer, begun_s = int(ranks[at]), float(events.start_s[rows[at]])
        push = push_of.get(layer, -1)
        if push >= 0:
            over_s = float(events.stop_s[rows[ranks == layer]].max())
            gone_s = float(pushes.stop_s[push]) if pushes.share(push, np.inf) >= 1.0 else np.inf
            yield GradientSpan(begun_s, over_s, max(gone_s, over_s), layer, push)
        elif live and layer not in frozen:
            yield GradientSpan(begun_s, np.inf, np.inf, layer, -1)
