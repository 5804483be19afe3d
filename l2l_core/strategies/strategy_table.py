"""Ways beside one another: what each needs, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from l2l_core.strategies.plan import Plan
from l2l_core.trace import Trace, format_bytes


@dataclass(frozen=True)
class StrategyResult:
    """What a step in one way needs.

    Attributes:
        name: of the way.
        peak_device_bytes: metered, with weights, gradients and optimizer state as far as they are on the device.
        peak_host_bytes: metered: what waits there, and with a relay the EPS.
        layer_forwards: how often layers run forward, all micro-batches together.
        seconds: simulated on the device's link, updates on the device left out.
        why: where there is no such step, the reason; the numbers are zero then.
        trace: the simulated step, which takes `seconds`; with bytes as exact as metered ones. None of torch's checkpoint.
        plan: that was followed; None of what has none: a relay, torch's checkpoint.
    """

    name: str
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    layer_forwards: int = 0
    seconds: float = 0.0
    why: str = ""
    trace: Trace | None = field(default=None, repr=False, compare=False)
    plan: Plan | None = field(default=None, repr=False)


class Strategy(Protocol):
    """Is something that a step can be made by."""

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Make a step on a copy, and say what it needed."""


class StrategyBench(Protocol):
    """Makes steps on copies of one model."""

    def run_policy(self, policy: Any) -> StrategyResult:
        """Make one by the plan of a policy."""

    def run_relay(self, name: str, keep: int, ahead: int, stash: str) -> StrategyResult:
        """Make one by relay."""

    def run_wrapped(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> StrategyResult:
        """Make one by plain training, with every layer's forward in a wrap."""


@dataclass(frozen=True)
class StrategyTable:
    """Rows in the order in which they were asked for.

    Attributes:
        rows: one per way.
        memory_bytes: of the device; None without a budget.
    """

    rows: Sequence[StrategyResult]
    memory_bytes: int | None = None

    def fits(self, row: StrategyResult) -> bool:
        """Whether there is such a step, and the device has room for it."""
        return not row.why and (self.memory_bytes is None or row.peak_device_bytes <= self.memory_bytes)

    def pareto(self) -> list[StrategyResult]:
        """List the rows that no other beats: none is as fast with less on the device, or as small and faster."""
        made = [row for row in self.rows if not row.why]
        return [row for row in made if not any(_dominates(other, row) for other in made)]

    def __str__(self) -> str:
        front = self.pareto()
        header = ("way", "device, metered", "host, metered", "layer forwards", "seconds, simulated", "")
        lines = [header, *(self._cells(row, row in front) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        budget = "" if self.memory_bytes is None else f"device memory: {format_bytes(self.memory_bytes)}\n"
        return budget + "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:5], widths[1:]), line[5]]).rstrip()
            for line in lines
        )

    def _cells(self, row: StrategyResult, in_front: bool) -> tuple[str, ...]:
        if row.why:
            return row.name, "", "", "", "", row.why
        said = [*(["no other beats it"] if in_front else []), *([] if self.fits(row) else ["does not fit"])]
        device, host = format_bytes(row.peak_device_bytes), format_bytes(row.peak_host_bytes)
        return row.name, device, host, str(row.layer_forwards), f"{row.seconds:.4g}", ", ".join(said)


def _dominates(one: StrategyResult, other: StrategyResult) -> bool:
    mine, theirs = (one.seconds, one.peak_device_bytes), (other.seconds, other.peak_device_bytes)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
