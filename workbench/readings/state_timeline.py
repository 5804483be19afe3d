"""The state of the relay at one event or at one time, deduced from a trace's columns alone. It draws nothing.

A finished step is known exactly. Of a step under way only what is over is known: the layer that computed last still
counts as computing, and a lane shows what it did last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from l2l_core.schedule_rules import weight_slots
from l2l_core.trace import CATEGORIES, LANES, PLACES, Trace
from workbench.readings.algorithm_text import line_index
from workbench.readings.device_contents import SlotContent, SlotTimeline
from workbench.readings.gradient_timeline import GradientTimeline
from workbench.readings.kept import KeptGraphs
from workbench.readings.layer_copies import LayerCopies
from workbench.readings.layer_names import number_layers
from workbench.readings.ordered_events import OrderedEvents
from workbench.readings.stashed import StashCount
from workbench.readings.step_state import LaneActivity, Phase, SlotState, StepState
from workbench.readings.trace_columns import Columns
from workbench.readings.visit_timeline import ComputeState, VisitTimeline


class PeakBytes(NamedTuple):
    """The most bytes that are known of: on the device, and of stash at either place."""

    device: int = 0
    stash: int = 0


class StateTimeline:
    """Every moment of a step; arrays are made once, so that a moment costs far less than a millisecond.

    Args:
        columns: events and samples of the step.
        keys: the stack, in order.
        micro_batches, ahead, resident, keep, stash, schedule: settings of the step; micro-batches are counted if not given.
        before: the step before, of the same stack: it says how many bytes a layer loads and in which order layers come.
            As `Moments` it need not be prepared again for each frame.
        live: whether the step is still under way, so that `columns` holds only what is over.
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
        schedule: str = "breadth_first",
        previous: StateTimeline | Columns | None = None,
        live: bool = False,
    ) -> None:
        self.keys, self.live, self.stash, self.schedule = tuple(keys), live, stash, schedule
        if isinstance(previous, Columns):
            previous = (
                StateTimeline(previous, keys, ahead=ahead, resident=resident, schedule=schedule) if live else None
            )
        self._previous = earlier = previous if live else None
        self._columns, self._events = columns, OrderedEvents(columns, self.keys)
        self.count = len(self._events)
        self.end_s = columns.end_s
        self.micro_batches = micro_batches or int(columns.k.max(initial=0)) + 1

        self._loads = LayerCopies(self._events, "load")
        self._pushes = LayerCopies(self._events, "push")
        depth_first = schedule == "depth_first"
        alike = earlier._visits if earlier and earlier.schedule == schedule else None
        self._visits = VisitTimeline(self._events, live, alike, self.micro_batches if depth_first else 1)
        self._slots = SlotTimeline(self._loads, weight_slots(ahead, resident))
        self._kept_graphs = KeptGraphs(self._events, self._loads, keep, ahead, resident)
        # Visited in backward and not pushed: of such a layer no push is still to come.
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
        """Read a finished step; without `keys`, of all layers of its time: the trace's names, those that sat the step out too."""
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
        """List the events with which a visit begins."""
        return self._visits.rows.tolist()

    def at_event(self, i: int) -> StepState:
        """Return the moment just after event `i` has started, 0 <= i < count, by time of start."""
        if not 0 <= i < self.count:
            raise ValueError(f"event {i}: the step has {self.count} events, numbered from 0")
        return self._state_at(i, float(self._events.start_s[i]))

    def at_time(self, t_s: float) -> StepState:
        """Return the moment at a time, in seconds since the step began."""
        return self._state_at(int(np.searchsorted(self._events.start_s, t_s, side="right")) - 1, t_s)

    def busiest_event(self) -> int:
        """Choose an event in mid-backward at which as many lanes as possible are at work; 0 if there is none."""
        runs = self._events.of_kind("backward")
        if not len(runs):
            return max(0, self.count // 2)
        if self.schedule == "depth_first":  # before, nothing is pushed
            runs = runs[self._events.k[runs] == self._events.k[runs].max()]
        runs = runs[len(runs) // 4 : max(len(runs) * 3 // 4, len(runs) // 4 + 1)]
        candidates = np.arange(runs[0], runs[-1] + 1)
        times = self._events.start_s[candidates]
        busy = np.zeros(len(times), np.int64)
        for spans in (self._loads, self._pushes):
            busy += 2 * _covered(spans.start_s, spans.stop_s, times)
            margin_s = (spans.stop_s - spans.start_s) / 4  # well under way shows best
            busy += _covered(spans.start_s + margin_s, spans.stop_s - margin_s, times)
        for lane in ("compute", "eps"):
            rows = self._events.lanes[lane]
            busy += 3 * _covered(self._events.start_s[rows], self._events.stop_s[rows], times)
        best = candidates[busy == busy.max()]
        return int(best[len(best) // 2])

    def _find_peaks(self) -> PeakBytes:
        totals, stashes = [0], [0]
        for place, rows in self._samples.items():
            sampled = self._columns.sample_bytes[rows]
            stashes.append(int(sampled[:, CATEGORIES.index("stash")].max(initial=0)))
            if place == "device":
                totals.append(int(sampled.sum(axis=1).max(initial=0)))
        earlier = self._previous._peaks if self._previous else PeakBytes()
        return PeakBytes(max(*totals, earlier.device), max(*stashes, earlier.stash))

    # -- one moment ----------------------------------------------------------------------------------------------------

    def _state_at(self, i: int, t_s: float) -> StepState:
        lanes = {lane: self._lane_activity(lane, i, t_s) for lane in LANES}
        slots = tuple(self._slot_state(held, t_s) for held in self._slots.at(t_s))
        phase, kind, k = self._phase_at(i, t_s)
        computing = ComputeState(None)
        if phase not in ("tail", "idle"):
            computing = self._visits.compute_state(t_s, {slot.layer: slot.share for slot in slots})
        gradients, eps = self._gradients.at(t_s), lanes["eps"]
        at_work = (
            gradients.accumulating
            if self.schedule == "breadth_first"
            else (computing.layer,)
            if kind == "backward"
            else ()
        )
        adding = next((key for key in gradients.accumulating if key in at_work), None)
        waiting = self._stash_count.at(t_s)
        line = self._line_of(i) if phase != "idle" else None
        if self.live and kind:  # what happens in a moment's time is not known, so the line follows the layer
            line = self._line_of(self._last_pass_event(i))
        beside = {self._line_of(self._last_event(lane, i)): lane for lane in reversed(LANES) if lanes[lane] is not None}
        return StepState(
            event=i,
            num_events=self.count if not self.live else max(self.count, self._previous.count) if self._previous else 0,
            t_s=t_s,
            phase=phase,
            lanes=lanes,
            slots=slots,
            layer=computing.layer,
            waits_for=computing.waits_for,
            k=-1 if computing.layer is None else computing.first_k if computing.first_k is not None and k >= 0 else k,
            micro_batches=self.micro_batches,
            kind=kind,
            accumulating=adding,
            waiting_gradients=tuple(key for key in gradients.accumulating if key != adding),
            pushing=gradients.pushing,
            arrived=gradients.arrived,
            eps_layer=eps.layer if eps is not None else None,
            eps_kind=eps.kind if eps is not None else "",
            updated=gradients.updated,
            num_stashed=waiting if self.schedule == "breadth_first" else 0,
            stash=self.stash,
            num_graphs=waiting if self.schedule == "depth_first" else 0,
            device=self._bytes_at("device", t_s),
            host=self._bytes_at("host", t_s),
            device_peak_bytes=self._peaks.device,
            stash_peak_bytes=self._peaks.stash,
            schedule=self.schedule,
            line=line,
            graph_kept=phase == "backward" and self._is_kept(self._last_pass_event(i), i, computing.layer),
            other_lines=tuple(sorted((number, lane) for number, lane in beside.items() if number != line)),
        )

    def _is_kept(self, row: int, i: int, layer: str | None) -> bool:
        """Whether the pass's last event is at work, or its layer still is, and with a graph that was kept."""
        return (row == i or self._events.kind_and_layer(row)[1] == layer) and self._kept_graphs.at(row)

    def _last_event(self, lane: str, i: int) -> int:
        return self._events.last_started(self._events.lanes[lane], lane, i)

    def _last_pass_event(self, i: int) -> int:
        """The forward, backward or loss event that started last, -1 if there is none."""
        return self._events.last_started(self._pass_events, "compute", i)

    def _lane_activity(self, lane: str, i: int, t_s: float) -> LaneActivity | None:
        row, events = self._last_event(lane, i), self._events
        if row < 0:
            return None
        start_s, stop_s = float(events.start_s[row]), float(events.stop_s[row])
        if self.live:
            # What a lane does now is told when it is over: until then what it did last stands for it, about a visit long.
            if t_s > stop_s + self._visits.typical_s:
                return None
            progress = None
        elif (t_s >= stop_s and row != i) or (row == i and t_s > stop_s):
            return None
        else:
            progress = min(1.0, (t_s - start_s) / (stop_s - start_s)) if stop_s > start_s else 0.0
        return LaneActivity(*events.kind_and_layer(row), int(events.k[row]), int(events.nbytes[row]), progress)

    def _line_of(self, row: int) -> int | None:
        return (
            line_index(*self._events.kind_and_layer(row), row >= self._first_backward, self.schedule)
            if row >= 0
            else None
        )

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
        """The phase, and the kind and micro-batch of what the pass did last."""
        if i < 0 or (not self.live and t_s > self.end_s):
            return ("idle" if not (self.live and self.count) else "fill"), "", -1
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
    """Whether some span covers each time; spans in order of start."""
    if not len(start_s):
        return np.zeros(len(times), bool)
    j = np.searchsorted(start_s, times, side="right") - 1
    return (j >= 0) & (times < stop_s[np.maximum(j, 0)])
