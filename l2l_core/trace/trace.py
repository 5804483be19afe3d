"""The trace of one step: events on lanes, memory over time, and the overlap of copies with compute.

Tables, pictures, reports and exports read only a `Trace`. Every lane adds its events, with times in seconds since the step
began.

Overlap is the formula of Holistic Trace Analysis, |communication and computation| / |communication|, on the copy lanes
(https://github.com/facebookresearch/HolisticTraceAnalysis, analyzers/communication_analysis.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from l2l_core.plan import StepPlan
from l2l_core.trace.events import ALL_LANES, DISK_LANES, PLACES, Event, MemorySample, StepFailure, WorkerInfo
from l2l_core.trace.formatting import format_bytes
from l2l_core.trace.intervals import Interval, intersect, merge, total_length

if TYPE_CHECKING:  # methods that analyse or write files import these modules when they are called
    from l2l_core.analysis import Bound, Wait


class Trace:
    """The events and memory samples of one step; lanes write while readers follow.

    Invariant: both lists only grow, so a cursor into them stays valid while the step runs.

    Args:
        step: number of steps before it; in texts, where steps are counted from 1, it is step `step + 1`.
        device: name of the device.
        names: dotted names of layers by key, for exports.
        clock: returns seconds since the step began: the virtual clock of a simulation. Default: real time since construction.
        settings: settings of the step as plain values: the fields of `RelayConfig`, or the name of a plan, and the figures
            of the device (`Device.figures`).
        failed: the failure, if the step did not finish; such a trace is not analysed.
        worker: the worker that recorded it.

    Example:
        >>> trace = relay.step(batch).trace
        >>> [event.layer for event in trace.lanes["h2d"] if event.kind == "load"][:3]
        ['shell', 'L000', 'L001']
        >>> trace.peak_bytes("device") == relay.step(batch).peak_device_bytes
        True
    """

    def __init__(
        self,
        *,
        step: int = 0,
        device: str = "",
        names: Mapping[str, str] | None = None,
        clock: Callable[[], float] | None = None,
        settings: Mapping[str, Any] | None = None,
        failed: StepFailure | None = None,
        worker: WorkerInfo = WorkerInfo(),  # noqa: B008 - a value
    ) -> None:
        self.step = step
        self.device = device
        self.names = dict(names or {})
        self.settings = dict(settings or {})
        self.failed = failed
        self.worker = worker
        self.began_s = began_s = time.perf_counter()  # lanes subtract it from their own clock readings
        self.clock = clock or (lambda: time.perf_counter() - began_s)  # without `self`: no reference cycle
        self._events: list[Event] = []
        self._samples: list[MemorySample] = []
        self._last_sample: dict[str, Mapping[str, int]] = {}
        self._sample_lock = threading.Lock()

    @classmethod
    def of(cls, events: Iterable[Event], memory: Iterable[MemorySample], **header: Any) -> Trace:
        """Make a trace of recorded events and samples, in order of arrival; `header` has the constructor's arguments."""
        trace = cls(**header)
        trace._events.extend(events)
        trace._samples.extend(memory)
        return trace

    # ---- written while the step runs ---------------------------------------------------------------------------

    def now(self) -> float:
        """Return the seconds since the step began."""
        return self.clock()

    def add(self, event: Event) -> None:
        """Append an event, from any thread."""
        assert event.lane in ALL_LANES, f"{event}: lane {event.lane!r} is none of {ALL_LANES}"
        assert -math.inf < event.start_s <= event.stop_s < math.inf, (
            f"{event.label()!r} on {event.lane} stops at {event.stop_s} s, before it starts at {event.start_s} s, "
            "or a time is not finite"
        )
        self._events.append(event)  # list.append is atomic, so this hot path needs no lock

    def sample(self, place: str, bytes_by_category: Mapping[str, int]) -> None:
        """Record the bytes in use at `place`, from any thread; a sample equal to the last one is dropped."""
        assert place in PLACES, f"memory sampled at {place!r}, which is none of {PLACES}"
        with self._sample_lock:
            if self._last_sample.get(place) == bytes_by_category:
                return
            copy = self._last_sample[place] = dict(bytes_by_category)
            self._samples.append(MemorySample(self.clock(), place, copy))

    def mark_failed(self, failure: StepFailure, device_bytes: Mapping[str, int] | None = None) -> None:
        """Record the failure of the step, and the device's bytes at that time if given."""
        with self._sample_lock:
            if device_bytes is not None:
                last_s = self._samples[-1].t_s if self._samples else 0.0
                self._samples.append(MemorySample(max(failure.t_s, last_s), "device", dict(device_bytes)))
            self.failed = failure

    def check_finished(self) -> None:
        """Raise ValueError unless the step finished."""
        if self.failed is not None:
            raise ValueError(
                f"step {self.step + 1} {self.failed}, so its trace is incomplete and has no valid figures: "
                "take the trace of a finished step, as `relay.step(batch).trace`"
            )

    def events_since(self, i: int) -> tuple[list[Event], int]:
        """Return the events from cursor `i` on, in order of arrival, and the next cursor."""
        assert i >= 0, f"cursor {i} into a trace of {len(self._events)} events"
        new = self._events[i:]
        return new, i + len(new)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of events and memory samples so far, which are the ends of both cursors."""
        return len(self._events), len(self._samples)

    # ---- events and overlap ------------------------------------------------------------------------------------

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, sorted by start (then stop, then arrival)."""
        return tuple(sorted(self._events, key=lambda event: (event.start_s, event.stop_s)))

    @property
    def lane_names(self) -> tuple[str, ...]:
        """Lanes of the worker, and of a shelf on disk."""
        return (*self.worker.lanes, *(DISK_LANES if "shelf" in self.settings else ()))

    @property
    def lanes(self) -> dict[str, tuple[Event, ...]]:
        """Events of every lane, sorted by start; empty lanes included."""
        events = self.events
        return {lane: tuple(event for event in events if event.lane == lane) for lane in self.lane_names}

    @property
    def span_s(self) -> float:
        """Seconds from the first start to the last stop, 0.0 without events."""
        events = self.events_since(0)[0]
        return max(e.stop_s for e in events) - min(e.start_s for e in events) if events else 0.0

    def busy_s(self, lane: str) -> float:
        """Return the seconds in which `lane` had work: the length of the union of its events."""
        return total_length(self._busy_intervals(lane))

    def exposed_s(self, lane: str) -> float:
        """Return the seconds in which `lane` had work and compute had none."""
        busy = self._busy_intervals(lane)
        return max(0.0, total_length(busy) - total_length(intersect(busy, self._busy_intervals("compute"))))

    def overlap(self) -> float:
        """Return the fraction of copy time (both directions) hidden under compute; 1.0 without copies."""
        copies = self._busy_intervals("h2d", "d2h")
        hidden = intersect(copies, self._busy_intervals("compute"))
        return min(1.0, total_length(hidden) / total_length(copies)) if copies else 1.0

    def bound_by(self) -> tuple[Bound, ...]:
        """Return the limiting lane of each phase, its exposed time, and the setting that would help; see `analysis/bounds.py`.

        A step of a plan has one result for the whole step (`find_plan_bounds`). Empty without events and for a
        failed step. `print` writes a sentence: "forward: h2d exposes 420 ms of 1.9 s; 6 micro-batches ...".
        """
        from l2l_core.analysis import find_bounds, find_plan_bounds

        if self.failed is not None:
            return ()
        return find_plan_bounds(self) if "plan" in self.settings else find_bounds(self)

    def waits(self) -> tuple[Wait, ...]:
        """Return the waits of this worker for others, see `analysis/worker_traces.py`; empty without workers."""
        from l2l_core.analysis import find_waits

        return find_waits(self)

    def _busy_intervals(self, *lanes: str) -> list[Interval]:
        for lane in lanes:
            if lane not in self.lane_names:
                raise ValueError(f"no lane {lane!r}; the lanes are {', '.join(self.lane_names)}")
        return merge((e.start_s, e.stop_s) for e in self.events_since(0)[0] if e.lane in lanes)

    # ---- memory ------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> tuple[MemorySample, ...]:
        """Samples of both places in order of time."""
        return tuple(self._samples)

    def samples_since(self, i: int) -> list[MemorySample]:
        """Return the memory samples from the `i`-th on, in order of time."""
        assert i >= 0, f"cursor {i} into {len(self._samples)} samples"
        return self._samples[i:]

    def peak_sample(self, place: str) -> MemorySample | None:
        """Return the first sample with the largest total at `place`, None without samples."""
        if place not in PLACES:
            raise ValueError(f"no place {place!r}; the places are {', '.join(PLACES)}")
        return max((s for s in self.memory if s.place == place), key=lambda s: s.total, default=None)

    def peak_bytes(self, place: str) -> int:
        """Return the largest total at `place` in bytes, 0 without samples."""
        peak = self.peak_sample(place)
        return peak.total if peak else 0

    # ---- text and files ----------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the clock and the lock, so that workers can exchange traces."""
        names = ("step", "device", "names", "settings", "failed", "worker")
        header = {name: getattr(self, name) for name in names}
        return partial(Trace.of, **header), (self._events[:], self._samples[:])

    def __repr__(self) -> str:
        failed = f", {self.failed}" if self.failed is not None else ""
        where = f"step {self.step + 1} on {self.device or '?'}"
        return f"<Trace of {where}: {len(self._events)} events, {self.span_s:.6g} s{failed}>"

    def summary(self) -> str:
        """Return a few lines of text: span and overlap, busy and exposed seconds per lane, peak bytes per place."""
        span_s, wide = self.span_s, max(8, *map(len, self.lane_names))
        lines = [
            f"step {self.step + 1} on {self.device or '?'}: {span_s:.4g} s, {len(self._events)} events, "
            f"{self.overlap():.1%} of copy time hidden under compute"
        ]
        lines += [f"  {self.failed}"] if self.failed is not None else []
        for lane in self.lane_names:
            busy_s = self.busy_s(lane)
            share = busy_s / span_s if span_s else 0.0
            lines.append(f"  {lane:<{wide}} busy {busy_s:9.4g} s ({share:6.1%}), exposed {self.exposed_s(lane):9.4g} s")
        for wait in self.waits():
            lines.append(
                f"  {wait.where:<{wide}} waited {wait.seconds:6.4g} s for worker {wait.last}, {wait.exposed_s:.4g} s of it "
                "exposed"
            )
        for place in PLACES:
            if (peak := self.peak_sample(place)) is not None:
                parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in peak.bytes_by_category.items() if n)
                lines.append(f"  {place:<{wide}} peak {format_bytes(peak.total)} at {peak.t_s:.4g} s ({parts})")
        return "\n".join(lines)

    def to_chrome(self, path: str | Path, *, compress: bool | None = None) -> None:
        """Write Chrome trace JSON for Perfetto and Holistic Trace Analysis: `.json`, or `.json.gz` compressed."""
        from l2l_core.trace.trace_files import write_chrome

        write_chrome([self], Path(path), compress)

    def to_memory_snapshot(self, path: str | Path) -> None:
        """Write a `.pickle` for PyTorch's memory viewer, https://pytorch.org/memory_viz; see `memory_snapshot.py`."""
        from l2l_core.trace.memory_snapshot import write_memory_snapshot

        write_memory_snapshot(self, Path(path))

    def to_jsonl(self, path: str | Path) -> None:
        """Write JSON lines that `from_jsonl` reads exactly: a header, events in order of arrival, memory."""
        from l2l_core.trace.trace_files import write_jsonl

        rows = [{"type": "event", **event._asdict()} for event in self.events_since(0)[0]]
        rows += [{"type": "memory", **asdict(sample)} for sample in self.memory]
        header = {"step": self.step, "device": self.device, "names": self.names, "settings": self.settings}
        header |= {"failed": asdict(self.failed)} if self.failed is not None else {}
        header |= {"worker": asdict(self.worker)} if self.worker.count > 1 else {}
        write_jsonl(Path(path), header, rows)

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Trace:
        """Read a file of `to_jsonl`.

        Raises:
            ValueError: the file is damaged, incomplete, or of a version that this release cannot read.
        """
        from l2l_core.trace.trace_files import build_record, read_jsonl

        trace = cls()

        def read_header(row: dict[str, Any]) -> None:
            trace.step, trace.device, trace.names = row["step"], row["device"], dict(row["names"])
            trace.settings = dict(row["settings"])
            trace.failed = build_record(StepFailure, row["failed"]) if "failed" in row else None
            trace.worker = build_record(WorkerInfo, row["worker"]) if "worker" in row else WorkerInfo()

        def read_event(row: dict[str, Any]) -> None:
            trace.add(build_record(Event, row))

        def read_sample(row: dict[str, Any]) -> None:
            sample = build_record(MemorySample, row)
            assert sample.place in PLACES, f"memory sampled at {sample.place!r}, which is none of {PLACES}"
            trace._samples.append(sample)

        read_jsonl(Path(path), {"trace": read_header, "event": read_event, "memory": read_sample})
        return trace


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one training step.

    Attributes:
        loss: mean loss over the batch.
        seconds: wall time of the step.
        samples: rows of the batch.
        trace: events and memory of the step.
        peak_device_bytes: highest device bytes during the step.
        bytes_loaded, bytes_pushed: bytes of weights copied to the device, and of gradients copied back.
        objective: how the losses of micro-batches were put together, in words.
        extras: what the loss returned beside the scalar, on the host, without gradients: tensors of micro-batches are
            concatenated along dim 0, scalars stacked to shape (K,), other values listed. Of this worker's rows only. None if it
            returned no extras.
        verified: result of the comparison with the same step in core, or why there was none; empty if none was due.
        plan: the actions that ran, in the order of issue; None with schedule="depth_first", where autograd decides it.
        grad_norm: norm of all gradients together, before they are clipped. With `max_grad_norm` it is that of
            `torch.nn.utils.clip_grad_norm_` to the bit, otherwise to rounding. None with several workers and no clipping.

    Example:
        >>> result = relay.step(batch)
        >>> result.samples, result.bytes_pushed  # rows, bytes of gradients
        (8, 26048)
    """

    loss: float
    seconds: float
    samples: int
    trace: Trace
    peak_device_bytes: int
    bytes_loaded: int
    bytes_pushed: int
    objective: str = ""
    extras: Any = field(default=None, repr=False, compare=False)
    verified: str = ""
    grad_norm: float | None = None
    plan: StepPlan | None = field(default=None, repr=False)
