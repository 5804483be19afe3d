"""What is read off the trace of a step, be it forecast, simulated or measured: bytes at the peaks, and what binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from l2l_core.analysis import Bound
from l2l_core.trace import Trace


@dataclass(frozen=True, eq=False, kw_only=True)
class StepFigures:
    """A step and its figures, each worked out when it is first asked for.

    Attributes:
        trace: of the step.
        basis: where its costs come from, in words.
    """

    trace: Trace
    basis: str

    @cached_property
    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device at its peak, by category."""
        return _peak(self.trace, "device")

    @cached_property
    def host_bytes(self) -> Mapping[str, int]:
        """Bytes on the host at its peak, by category."""
        return _peak(self.trace, "host")

    @property
    def peak_device_bytes(self) -> int:
        """Bytes on the device at its peak, all categories together."""
        return sum(self.device_bytes.values())

    @property
    def peak_host_bytes(self) -> int:
        """Bytes on the host at its peak, all categories together."""
        return sum(self.host_bytes.values())

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """What binds each phase. Of a step of thousands of events this takes longer than all else."""
        return self.trace.bound_by()

    @cached_property
    def bound(self) -> Bound | None:
        """What binds the phase that loses most, or if none loses a twentieth of the step, the longest; None without events."""
        span_s = self.trace.span_s
        losing = [bound for bound in self.bounds if bound.lane != "compute" and bound.exposed_s > 0.05 * span_s]
        if losing:
            return max(losing, key=lambda bound: bound.exposed_s)
        return max(self.bounds, key=lambda bound: bound.span_s, default=None)


def _peak(trace: Trace, place: str) -> Mapping[str, int]:
    sample = trace.peak_sample(place)
    return dict(sample.bytes_by_category) if sample is not None else {}
