"""Device memory over a step: samples at every compute event, activations counted once and replayed afterwards.

Slots, stash and gradients are booked exactly in every step. Activations are counted operation by operation only while
`Stash.metering` is on; that costs time. From such a step a `Metered` is kept, and later steps of the same shape book
what it says: each event's highest activation bytes while it runs, and what was left afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from l2l_core.devices import Ledger
from l2l_core.step.traffic.clock import Clock
from l2l_core.trace import Trace

_OWNER = "the micro-batch at work"


class NewHabit(RuntimeError):
    """The model does what it did not do in the metered pass, on which this one has relied. Metered anew, it may be right."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, which it did not in the first step of this shape, on which later ones rely. Nothing was trained, and the "
            "next step looks at everything anew: make this step again. RelayConfig(meter='always') looks every time"
        )


@dataclass(slots=True)
class Metered:
    """What a metered pass has learned.

    Attributes:
        events: activation bytes per compute event (highest during, left after), in order.
        worst: highest bytes by event label without k, for events out of order.
        gives_aside: keys of layers that give out differentiable tensors otherwise than as outputs.
        read_early: keys of layers whose weights are read, depth first, before their first call.
    """

    events: list[tuple[str, int, int]] = field(default_factory=list)
    worst: dict[str, int] = field(default_factory=dict)
    gives_aside: set[str] = field(default_factory=set)
    read_early: set[str] = field(default_factory=set)

    def joined(self, other: Metered) -> Metered:
        """Join what this pass and another one have learned; the order of events is that of this one."""
        worst = {label: max(m.worst.get(label, 0) for m in (self, other)) for label in {**self.worst, **other.worst}}
        return Metered(self.events, worst, self.gives_aside | other.gives_aside, self.read_early | other.read_early)


class Meter:
    """Samples memory into a trace, and either counts activations or replays what an earlier one has recorded.

    Args:
        device, host: ledgers to sample.
        trace: gets the samples.
        replay: what a metered step has learned; None while metering, which fills `metered`.
        keeps: whether graphs are kept, and pile up.
    """

    def __init__(self, device: Ledger, host: Ledger, trace: Trace, replay: Metered | None, keeps: bool = False) -> None:
        self._device, self._host, self._trace, self._replay, self._keeps = device, host, trace, replay, keeps
        self.metered = Metered()
        trace.settings["metered"] = replay is None  # such a step takes longer
        self._label = ""
        self._at = 0
        self._booked = 0
        self._beside = 0  # bytes of other kinds at the begin of the event
        self._seen: dict[str, int] = {}  # by place, at which of its changes it was sampled last
        self.sample()

    @property
    def learns(self) -> bool:
        """Whether this pass is metered, so that others may rely on it."""
        return self._replay is None

    @property
    def latest(self) -> Metered:
        """What describes this step: what is replayed, or what was counted."""
        return self.metered if self._replay is None else self._replay

    def enter(self, kind: str, layer: str, k: int) -> None:
        """A compute event begins."""
        self._label = f"{kind} {layer}"
        self._device.doing = lambda: self._name(kind, layer, k)
        self._device.forget_high()
        if self._replay is not None:
            self._book(self._expected(self._replay)[1])
        elif self._keeps:
            self._beside = self._besides_activations()

    def _name(self, kind: str, layer: str, k: int) -> str:
        """Name a compute event for people: "forward of h.3 (L003), micro-batch 1"."""
        whole = {"shell": "the model's code outside of layers"}.get(kind, kind)
        name = self._trace.names.get(layer, "")
        of = "" if layer == "shell" else f" of {name} ({layer})" if name else f" of {layer}"
        return f"{whole}{of}" + (f", micro-batch {k}" if k >= 0 else "")

    def leave(self) -> None:
        """The compute event ends."""
        high = self._device.take_high()
        self._trace.sample("device", high)
        self._seen.pop("device", None)  # what was noted last is the most there was, and not what there is
        if self._replay is None:
            during, after = high.get("activations", 0), self._activations()
            if self._keeps:
                # A replay books activations for the whole event, beside an output that becomes stash in it. Where graphs pile up
                # that is the peak, so they are what is missing to the highest total.
                during = max(sum(high.values()) - max(self._beside, self._besides_activations()), after)
            self.metered.events.append((self._label, during, after))
            self.metered.worst[self._label] = max(during, self.metered.worst.get(self._label, 0))
        else:
            self._book(self._expected(self._replay)[2])
        self._at += 1
        self.sample()

    def _activations(self) -> int:
        return self._device.by_category().get("activations", 0)

    def _besides_activations(self) -> int:
        return self._device.total - self._activations()

    def sample(self) -> None:
        """Note what fills both memories now, if that has changed."""
        for ledger in (self._device, self._host):
            if (changes := ledger.changes) != self._seen.get(ledger.place):
                self._seen[ledger.place] = changes
                self._trace.sample(ledger.place, ledger.by_category())

    def close(self) -> None:
        """Take back what was booked from what was learned."""
        self._book(0)
        self._device.doing = lambda: ""

    def _expected(self, known: Metered) -> tuple[str, int, int]:
        if self._at < len(known.events) and known.events[self._at][0] == self._label:
            return known.events[self._at]
        return self._label, known.worst.get(self._label, 0), 0

    def _book(self, nbytes: int) -> None:
        if nbytes > self._booked:
            self._device.book("activations", _OWNER, nbytes - self._booked)
        elif nbytes < self._booked:
            self._device.release("activations", _OWNER, self._booked - nbytes)
        self._booked = nbytes


def timed(meter: Meter, clock: Clock, kind: str, layer: str, k: int, visit: int = -1) -> Callable[[], None]:
    """Start a compute event, for the trace and for the meter; calling the result ends it."""
    meter.enter(kind, layer, k)
    clock.start(kind, layer, k, visit)

    def end() -> None:
        clock.stop()
        meter.leave()

    return end
