"""Device memory over a step: samples at every compute event, activations counted once and replayed afterwards.

Slots, stash and gradients are booked exactly in every step. Activations are counted operation by operation only while
`Stash.metering` is on; that costs time. From such a step a `Metered` is kept, and later steps of the same shape book
what it says: each event's highest activation bytes while it runs, and what was left afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from l2l_core.devices import Ledger
from l2l_core.step.traffic.compute_clock import ComputeClock
from l2l_core.trace import Trace

_OWNER = "the micro-batch at work"


class StaleMeterError(RuntimeError):
    """The model does what it did not do in the metered pass, on which this one has relied. Metered anew, it may be right."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, which it did not in the first step of this shape, on which later ones rely. Nothing was trained, and the "
            "next step looks at everything anew: make this step again. RelayConfig(meter='always') looks every time"
        )


@dataclass(slots=True)
class MeterRecord:
    """What a metered pass has learned.

    Attributes:
        events: activation bytes per compute event (highest during, left after), in order.
        worst: highest bytes by event label without k, for events out of order.
        gives_aside: keys of layers that give out differentiable tensors otherwise than as outputs.
        read_early: keys of layers whose weights are read, depth first, before their first call.
    """

    events: list[tuple[str, int, int]] = field(default_factory=list)
    peak_by_label: dict[str, int] = field(default_factory=dict)
    side_output_layers: set[str] = field(default_factory=set)
    early_read_layers: set[str] = field(default_factory=set)

    def merge(self, other: MeterRecord) -> MeterRecord:
        """Join what this pass and another one have learned; the order of events is that of this one."""
        worst = {
            label: max(m.peak_by_label.get(label, 0) for m in (self, other))
            for label in {**self.peak_by_label, **other.peak_by_label}
        }
        return MeterRecord(
            self.events,
            worst,
            self.side_output_layers | other.side_output_layers,
            self.early_read_layers | other.early_read_layers,
        )


class MemoryMeter:
    """Samples memory into a trace, and either counts activations or replays what an earlier one has recorded.

    Args:
        device, host: ledgers to sample.
        trace: gets the samples.
        replay: what a metered step has learned; None while metering, which fills `metered`.
        keeps: whether graphs are kept, and pile up.
    """

    def __init__(
        self, device: Ledger, host: Ledger, trace: Trace, replay: MeterRecord | None, keeps_graphs: bool = False
    ) -> None:
        self._device, self._host, self._trace, self._replay, self._keeps_graphs = (
            device,
            host,
            trace,
            replay,
            keeps_graphs,
        )
        self.new_record = MeterRecord()
        trace.settings["metered"] = replay is None  # such a step takes longer
        self._label = ""
        self._event_index = 0
        self._booked = 0
        self._other_bytes = 0  # bytes of other kinds at the begin of the event
        self._sampled: dict[str, int] = {}  # by place, at which of its changes it was sampled last
        self.sample()

    @property
    def is_metering(self) -> bool:
        """Whether this pass is metered, so that others may rely on it."""
        return self._replay is None

    @property
    def record(self) -> MeterRecord:
        """What describes this step: what is replayed, or what was counted."""
        return self.new_record if self._replay is None else self._replay

    def begin_event(self, kind: str, layer: str, k: int) -> None:
        """A compute event begins."""
        self._label = f"{kind} {layer}"
        self._device.activity = lambda: self._event_name(kind, layer, k)
        self._device.reset_high_water()
        if self._replay is not None:
            self._book(self._expected(self._replay)[1])
        elif self._keeps_graphs:
            self._other_bytes = self._other_bytes_now()

    def _event_name(self, kind: str, layer: str, k: int) -> str:
        """Name a compute event for people: "forward of h.3 (L003), micro-batch 1"."""
        whole = {"shell": "the model's code outside of layers"}.get(kind, kind)
        name = self._trace.names.get(layer, "")
        of = "" if layer == "shell" else f" of {name} ({layer})" if name else f" of {layer}"
        return f"{whole}{of}" + (f", micro-batch {k}" if k >= 0 else "")

    def end_event(self) -> None:
        """The compute event ends."""
        high = self._device.take_high_water()
        self._trace.sample("device", high)
        self._sampled.pop("device", None)  # what was noted last is the most there was, and not what there is
        if self._replay is None:
            during, after = high.get("activations", 0), self._activations()
            if self._keeps_graphs:
                # A replay books activations for the whole event, beside an output that becomes stash in it. Where graphs pile up
                # that is the peak, so they are what is missing to the highest total.
                during = max(sum(high.values()) - max(self._other_bytes, self._other_bytes_now()), after)
            self.new_record.events.append((self._label, during, after))
            self.new_record.peak_by_label[self._label] = max(during, self.new_record.peak_by_label.get(self._label, 0))
        else:
            self._book(self._expected(self._replay)[2])
        self._event_index += 1
        self.sample()

    def _activations(self) -> int:
        return self._device.by_category().get("activations", 0)

    def _other_bytes_now(self) -> int:
        return self._device.total - self._activations()

    def sample(self) -> None:
        """Note what fills both memories now, if that has changed."""
        for ledger in (self._device, self._host):
            if (changes := ledger.changes) != self._sampled.get(ledger.place):
                self._sampled[ledger.place] = changes
                self._trace.sample(ledger.place, ledger.by_category())

    def close(self) -> None:
        """Take back what was booked from what was learned."""
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
    """Start a compute event, for the trace and for the meter; calling the result ends it."""
    meter.begin_event(kind, layer, k)
    clock.start(kind, layer, k, visit)

    def end() -> None:
        clock.stop()
        meter.end_event()

    return end
