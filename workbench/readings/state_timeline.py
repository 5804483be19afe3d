"""The state of the relay at any event or time of a step, computed from the columns of its trace.

The states of a finished step are exact. A running step has only the events that have ended: the layer that computed last counts
as computing, and a lane shows its last event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from l2l_core.schedule_rules import weight_slots
from l2l_core.trace import CATEGORIES, LANES, PLACES, Trace
from workbench.readings.algorithm_text import line_index
from workbench.readings.gradient_timeline import GradientTimeline
from workbench.readings.layer_copies import LayerCopies, SlotContent, SlotTimeline
from workbench.readings.layer_names import number_layers
from workbench.readings.ordered_events import OrderedEvents
from workbench.readings.saved_activations import KeptGraphs, StashCount
from workbench.readings.step_state import LaneActivity, Phase, SlotState, StepState
from workbench.readings.trace_columns import Columns
from workbench.readings.visit_timeline import ComputeState, VisitTimeline


class PeakBytes(NamedTuple):
    """Largest device bytes, and largest stash bytes at either place."""

    device: int = 0
    stash: int = 0


class StateTimeline:
    """The states of a step over time, from arrays that are computed once.

    Args:
        columns: events and samples of the step.
        keys: keys of the layers in order.
        micro_batches, ahead, resident, keep, stash, schedule: settings of the step; by default micro-batches are counted.
        previous: the previous step of the same layers, from which a running step takes the order of visits. A
            `StateTimeline` can be reused for every frame.
        live: True if the step has not finished, so that `columns` has only the events that have ended.
    """

    def __init__(
        self,
        columns: Columns,
        keys: Sequence[str],
        *,
        micro_batches: int | None = None,
        ahead: int = 1,
        resident: int = 0,
        keep: int = 0,
        stash: str = "device",
        schedule: object = "breadth_first",
        previous: StateTimeline | Columns | None = None,
        live: bool = False,
    ) -> None:
        self.keys, self.live, self.stash, self.schedule = tuple(keys), live, stash, schedule
        if live and isinstance(previous, Columns):
            previous = StateTimeline(previous, keys, ahead=ahead, resident=resident, schedule=schedule)
        earlier = previous if live and isinstance(previous, StateTimeline) else None
        self._previous = earlier
        self._columns, self._events = columns, OrderedEvents(columns, self.keys)
        self.count = len(self._events)
        self.end_s = columns.end_s
        self.micro_batches = micro_batches or int(columns.k.max(initial=0)) + 1

        self._loads = LayerCopies(self._events, "load")
        self._pushes = LayerCopies(self._events, "push")
        depth_first = schedule == "depth_first"
        earlier_visits = earlier._visits if earlier and earlier.schedule == schedule else None
        self._visits = VisitTimeline(self._events, live, earlier_visits, self.micro_batches if depth_first else 1)
        self._slots = SlotTimeline(self._loads, weight_slots(ahead, resident))
        self._kept_graphs = KeptGraphs(self._events, self._loads, keep, ahead, resident)
        # Layers that were visited but not pushed have no trained parameters.
        frozen = {*earlier._visits.layers}.difference(earlier._pushes.layers) if earlier else ()
        self._gradients = GradientTimeline(
            self._events, self._visits, self._pushes, live, frozen, accumulates_all=depth_first
        )
        self._stash_count = StashCount(self._events, self.micro_batches, live)

        self._pass_events = self._events.of_kind("forward", "backward", "loss")
        backward, compute = self._events.of_kind("backward"), self._events.lanes["compute"]
        self._first_backward = int(backward[0]) if len(backward) else self.count
        self._compute_end_s = float(self._events.stop_s[compute].max(initial=0.0))
        self._samples = {place: columns.samples_at(place) for place in PLACES}
        self._sample_s = {place: columns.sample_s[rows] for place, rows in self._samples.items()}
        self._peaks = self._find_peaks()

    @classmethod
    def of(cls, trace: Trace, keys: Sequence[str] | None = None) -> StateTimeline:
        """Read a finished step; `keys` defaults to all layers in the trace, including those that did not run."""
        columns, settings = Columns.of(trace), trace.settings
        if keys is None:
            used = {e.layer for e in trace.events if e.kind in ("load", "forward") and e.layer != "shell"}
            keys = list(number_layers(trace.names))
            keys += sorted(used.difference(keys))
        return cls(
            columns,
            keys,
            micro_batches=settings.get("micro_batches"),
            ahead=settings.get("ahead", 1),
            resident=settings.get("resident", 0),
            keep=settings.get("keep", 0),
            stash=settings.get("stash", "device"),
            schedule=settings.get("schedule", "breadth_first"),
        )

    def visit_starts(self) -> list[int]:
        """Return the first event of each visit."""
        return self._visits.rows.tolist()

    def at_event(self, i: int) -> StepState:
        """Return the state just after event `i` has started, 0 <= i < count, in order of start."""
        if not 0 <= i < self.count:
            raise ValueError(f"event {i}: the step has {self.count} events, numbered from 0")
        return self._state_at(i, float(self._events.start_s[i]))

    def at_time(self, t_s: float) -> StepState:
        """Return the state at a time, in seconds since the step began."""
        return self._state_at(int(np.searchsorted(self._events.start_s, t_s, side="right")) - 1, t_s)

    def busiest_event(self) -> int:
        """Return an event in the middle of backward with as many busy lanes as possible."""
        rows = self._events.of_kind("backward")
        if not len(rows):
            return max(0, self.count // 2)
        if self.schedule == "depth_first":  # pushes begin in the last micro-batch
            rows = rows[self._events.k[rows] == self._events.k[rows].max()]
        rows = rows[len(rows) // 4 : max(len(rows) * 3 // 4, len(rows) // 4 + 1)]
        candidates = np.arange(rows[0], rows[-1] + 1)
        times = self._events.start_s[candidates]
        busy = np.zeros(len(times), np.int64)
        for spans in (self._loads, self._pushes):
            busy += 2 * _covered(spans.start_s, spans.stop_s, times)
            margin_s = (spans.stop_s - spans.start_s) / 4  # prefer copies that are half done
            busy += _covered(spans.start_s + margin_s, spans.stop_s - margin_s, times)
        for lane in ("compute", "eps"):
            rows = self._events.lanes[lane]
            busy += 3 * _covered(self._events.start_s[rows], self._events.stop_s[rows], times)
        best = candidates[busy == busy.max()]
        return int(best[len(best) // 2])

    def _find_peaks(self) -> PeakBytes:
        peaks = self._previous._peaks if self._previous else PeakBytes()
        device, stash = peaks.device, peaks.stash
        for place, rows in self._samples.items():
            sampled = self._columns.sample_bytes[rows]
            stash = max(stash, int(sampled[:, CATEGORIES.index("stash")].max(initial=0)))
            if place == "device":
                device = max(device, int(sampled.sum(axis=1).max(initial=0)))
        return PeakBytes(device, stash)

    # -- one state -----------------------------------------------------------------------------------------------------

    def _state_at(self, i: int, t_s: float) -> StepState:
        lanes = {lane: self._lane_activity(lane, i, t_s) for lane in LANES}
        slots = tuple(self._slot_state(content, t_s) for content in self._slots.at(t_s))
        phase, kind, k = self._phase_at(i, t_s)
        computing = ComputeState(None)
        if phase not in ("tail", "idle"):
            computing = self._visits.compute_state(t_s, {slot.layer: slot.share for slot in slots})
        gradients, eps = self._gradients.at(t_s), lanes["eps"]
        breadth_first = self.schedule != "depth_first"
        accumulating = next(iter(gradients.accumulating), None) if breadth_first else None
        if not breadth_first and kind == "backward" and computing.layer in gradients.accumulating:
            accumulating = computing.layer
        stashed = self._stash_count.at(t_s)
        line = self._line_of(i) if phase != "idle" else None
        if self.live and kind:  # the current event is unknown, so the line is that of the layer
            line = self._line_of(self._last_pass_event(i))
        lines = {self._line_of(self._last_event(lane, i)): lane for lane in reversed(LANES) if lanes[lane] is not None}
        k = computing.first_k if computing.first_k is not None and k >= 0 else k
        num_events = self.count
        if self.live:
            num_events = max(self.count, self._previous.count) if self._previous else 0
        return StepState(
            event=i,
            num_events=num_events,
            t_s=t_s,
            phase=phase,
            lanes=lanes,
            slots=slots,
            layer=computing.layer,
            waits_for=computing.waits_for,
            k=-1 if computing.layer is None else k,
            micro_batches=self.micro_batches,
            kind=kind,
            accumulating=accumulating,
            waiting_gradients=tuple(key for key in gradients.accumulating if key != accumulating),
            pushing=gradients.pushing,
            arrived=gradients.arrived,
            eps_layer=eps.layer if eps is not None else None,
            eps_kind=eps.kind if eps is not None else "",
            updated=gradients.updated,
            num_stashed=stashed if breadth_first else 0,
            stash=self.stash,
            num_graphs=0 if breadth_first else stashed,
            device=self._bytes_at("device", t_s),
            host=self._bytes_at("host", t_s),
            device_peak_bytes=self._peaks.device,
            stash_peak_bytes=self._peaks.stash,
            schedule=self.schedule,
            line=line,
            graph_kept=phase == "backward" and self._is_kept(self._last_pass_event(i), i, computing.layer),
            other_lines=tuple(
                sorted((number, lane) for number, lane in lines.items() if number is not None and number != line)
            ),
        )

    def _is_kept(self, row: int, i: int, layer: str | None) -> bool:
        """Return True if the event `row`, or its layer, is running with a kept graph."""
        return (row == i or self._events.kind_and_layer(row)[1] == layer) and self._kept_graphs.at(row)

    def _last_event(self, lane: str, i: int) -> int:
        return self._events.last_started(self._events.lanes[lane], lane, i)

    def _last_pass_event(self, i: int) -> int:
        """Return the forward, backward or loss event that started last, -1 if none has."""
        return self._events.last_started(self._pass_events, "compute", i)

    def _lane_activity(self, lane: str, i: int, t_s: float) -> LaneActivity | None:
        row, events = self._last_event(lane, i), self._events
        if row < 0:
            return None
        start_s, stop_s = float(events.start_s[row]), float(events.stop_s[row])
        if self.live:
            # An event is recorded when it ends. Until then the last one is shown, for about the length of a visit.
            if t_s > stop_s + self._visits.typical_s:
                return None
            progress = None
        elif (t_s >= stop_s and row != i) or (row == i and t_s > stop_s):
            return None
        else:
            progress = min(1.0, (t_s - start_s) / (stop_s - start_s)) if stop_s > start_s else 0.0
        return LaneActivity(*events.kind_and_layer(row), int(events.k[row]), int(events.nbytes[row]), progress)

    def _line_of(self, row: int) -> int | None:
        if row < 0:
            return None
        return line_index(*self._events.kind_and_layer(row), row >= self._first_backward, self.schedule)

    def _bytes_at(self, place: str, t_s: float) -> dict[str, int]:
        j = int(np.searchsorted(self._sample_s[place], t_s, side="right")) - 1
        if j < 0:
            return {}
        row = self._columns.sample_bytes[self._samples[place][j]].tolist()
        return {category: nbytes for category, nbytes in zip(CATEGORIES, row, strict=True) if nbytes}

    def _slot_state(self, content: SlotContent | None, t_s: float) -> SlotState:
        if content is None:
            return SlotState(None, 0.0)
        return SlotState(self.keys[content.layer], self._loads.share(content.load, t_s))

    def _phase_at(self, i: int, t_s: float) -> tuple[Phase, str, int]:
        """Return the phase, and the kind and micro-batch of the last forward, backward or loss event."""
        if i < 0 or (not self.live and t_s > self.end_s):
            return ("fill" if self.live and self.count else "idle"), "", -1
        row = self._last_pass_event(i)
        if row < 0:
            return "fill", "", -1
        kind, _ = self._events.kind_and_layer(row)
        phase: Phase = "backward" if kind == "backward" else "forward"
        if not self.live and t_s >= self._compute_end_s and self._last_event("compute", i) != i:
            phase = "tail"
        return phase, kind, int(self._events.k[row])


def _covered(
    start_s: NDArray[np.float64], stop_s: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return a mask of the times inside a span; spans are in order of start."""
    if not len(start_s):
        return np.zeros(len(times), bool)
    j = np.searchsorted(start_s, times, side="right") - 1
    return (j >= 0) & (times < stop_s[np.maximum(j, 0)])
