"""Compute events: their times, without those for which compute is stalled, and the memory during each.

Memory is sampled at every event. Slots, stash and gradients are booked exactly in every step. Counting activations operation
by operation is slow, so only a metered step does it. Its `MeterRecord` has each event's peak activation bytes and the bytes
left after it; later steps of the same kind book those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from l2l_core.devices import Device, Ledger
from l2l_core.trace import Event, Trace

_OWNER = "the micro-batch at work"


class ComputeClock:
    """Adds compute events of a device to a trace.

    Invariant: at most one event is open. A stall splits an event in two, so that stalled time is not compute time.
    """

    def __init__(self, device: Device, trace: Trace) -> None:
        self._device, self._trace = device, trace
        self._event: tuple[str, str, int, int] = "", "", -1, -1  # kind, layer, micro-batch, visit
        self._stalled_s = 0.0  # since the last event
        self._is_stalled = False
        self.stay = -1  # number of the present layer's stay on the device; -1 before the first one
        self._stop: Callable[[], None] | None = None

    def start(self, kind: str, layer: str, k: int, visit: int = -1) -> None:
        """Open an event."""
        assert self._stop is None, f"{kind} of {layer} begins within {self._event}"
        self._event = kind, layer, k, visit
        # Bound now: a GPU reports the times later, during another event.
        t0, add, stalled_s, stay = self._trace.began_s, self._trace.add, self._stalled_s, self.stay
        self._stalled_s = 0.0
        self._stop = self._device.start_timer(
            lambda a, b: add(Event("compute", kind, a - t0, b - t0, layer, k, 0, visit, stalled_s, stay)),
            f"{kind} {layer} k={k}",
        )

    def stop(self) -> None:
        """Close the open event, if any."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Run a block in which compute waits: an open event ends before it and continues after it."""
        if self._is_stalled:  # within another stall
            yield
            return
        self._is_stalled, is_open = True, self._stop is not None
        self.stop()
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._is_stalled = False
            self._stalled_s += time.perf_counter() - began_s
        if is_open:
            self.start(*self._event)


class StaleMeterError(RuntimeError):
    """The model does something that it did not do in the metered step."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, which it did not do in the first step of this shape, and later steps rely on that one. Nothing was "
            "trained, and the next step is metered again: repeat this step. RelayConfig(meter='always') meters every step"
        )


@dataclass(slots=True)
class MeterRecord:
    """Measurements of a metered pass."""

    # Of each compute event, in order: label, peak activation bytes, bytes left after it
    events: list[tuple[str, int, int]] = field(default_factory=list)
    peak_by_label: dict[str, int] = field(default_factory=dict)  # for events in another order
    side_output_layers: set[str] = field(default_factory=set)  # keys
    stateful_layers: set[str] = field(default_factory=set)  # keys of those whose runs change their plain attributes
    early_read_layers: set[str] = field(default_factory=set)  # keys of those read before their first call, depth first

    def merge(self, other: MeterRecord) -> MeterRecord:
        """Combine two records; the order of events is that of this one."""
        labels = {**self.peak_by_label, **other.peak_by_label}
        return MeterRecord(
            self.events,
            {label: max(r.peak_by_label.get(label, 0) for r in (self, other)) for label in labels},
            self.side_output_layers | other.side_output_layers,
            self.stateful_layers | other.stateful_layers,
            self.early_read_layers | other.early_read_layers,
        )


class MemoryMeter:
    """Samples memory into a trace, and counts activations or replays the record of a metered step."""

    def __init__(
        self, device: Ledger, host: Ledger, trace: Trace, replay: MeterRecord | None, keeps_graphs: bool = False
    ) -> None:
        self._device, self._host, self._trace = device, host, trace
        self._replay, self._keeps_graphs = replay, keeps_graphs
        self.new_record = MeterRecord()
        trace.settings["metered"] = self.is_metering  # such a step takes longer
        self._label = ""
        self._event_index = 0
        self._booked = 0
        self._other_bytes = 0  # bytes other than activations when the event began
        self._sampled: dict[str, int] = {}  # ledger's change counter at the last sample, by place
        self.sample()

    @property
    def is_metering(self) -> bool:
        """Whether this pass is metered."""
        return self._replay is None

    @property
    def record(self) -> MeterRecord:
        """The replayed record, or the one that this pass makes."""
        return self.new_record if self._replay is None else self._replay

    def begin_event(self, kind: str, layer: str, k: int) -> None:
        """Begin a compute event."""
        self._label = f"{kind} {layer}"
        self._device.activity = lambda: self._event_name(kind, layer, k)
        self._device.reset_high_water()
        if self._replay is not None:
            self._book(self._expected(self._replay)[1])
        elif self._keeps_graphs:
            self._other_bytes = self._other_bytes_now()

    def _event_name(self, kind: str, layer: str, k: int) -> str:
        """Name a compute event for messages: "forward of h.3 (L003), micro-batch 1"."""
        whole = {"shell": "the model's code outside of layers"}.get(kind, kind)
        name = self._trace.names.get(layer, "")
        of = "" if layer == "shell" else f" of {name} ({layer})" if name else f" of {layer}"
        return f"{whole}{of}" + (f", micro-batch {k}" if k >= 0 else "")

    def end_event(self) -> None:
        """End the compute event."""
        high = self._device.take_high_water()
        self._trace.sample("device", high)
        self._sampled.pop("device", None)  # the last sample is a peak, not the present state
        if self._replay is None:
            during, after = high.get("activations", 0), self._activations()
            if self._keeps_graphs:
                # A replay books activations for the whole event, together with outputs that become stash during it. While graphs
                # pile up the event has the peak of the step, so activations are what the other bytes leave of its total.
                during = max(sum(high.values()) - max(self._other_bytes, self._other_bytes_now()), after)
            self.new_record.events.append((self._label, during, after))
            self.new_record.peak_by_label[self._label] = max(during, self.new_record.peak_by_label.get(self._label, 0))
        else:
            self._book(self._expected(self._replay)[2])
        self._event_index += 1
        self.sample()

    def amend_event(self) -> None:
        """Count bytes that were freed after the last compute event as freed by it, not by the next one."""
        if self._replay is None and self.new_record.events:
            label, during, _ = self.new_record.events[-1]
            self.new_record.events[-1] = label, during, self._activations()
            self.sample()

    def _activations(self) -> int:
        return self._device.by_category().get("activations", 0)

    def _other_bytes_now(self) -> int:
        return self._device.total - self._activations()

    def sample(self) -> None:
        """Sample both memories, if they have changed."""
        for ledger in (self._device, self._host):
            if (changes := ledger.changes) != self._sampled.get(ledger.place):
                self._sampled[ledger.place] = changes
                self._trace.sample(ledger.place, ledger.by_category())

    def close(self) -> None:
        """Release the replayed activations."""
        self._book(0)
        self._device.activity = lambda: ""

    def _expected(self, record: MeterRecord) -> tuple[str, int, int]:
        if self._event_index < len(record.events) and record.events[self._event_index][0] == self._label:
            return record.events[self._event_index]
        return self._label, record.peak_by_label.get(self._label, 0), 0

    def _book(self, nbytes: int) -> None:
        if nbytes > self._booked:
            self._device.book("activations", _OWNER, nbytes - self._booked)
        elif nbytes < self._booked:
            self._device.release("activations", _OWNER, self._booked - nbytes)
        self._booked = nbytes


def time_event(
    meter: MemoryMeter, clock: ComputeClock, kind: str, layer: str, k: int, visit: int = -1
) -> Callable[[], None]:
    """Start a compute event in trace and meter; return a function that ends it."""
    meter.begin_event(kind, layer, k)
    clock.start(kind, layer, k, visit)

    def end() -> None:
        clock.stop()
        meter.end_event()

    return end
