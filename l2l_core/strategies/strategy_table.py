"""Table of strategies: the needs of each, and the ones on the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from l2l_core.strategies.plan import Plan
from l2l_core.trace import Trace, format_bytes


@dataclass(frozen=True)
class StrategyResult:
    """Bytes and seconds of a step by one strategy.

    Attributes:
        name: name of the strategy.
        peak_device_bytes: metered, including weights, gradients and optimizer state on the device.
        peak_host_bytes: metered: offloaded tensors, and with a relay the EPS.
        layer_forwards: number of forward runs of layers, in all micro-batches together.
        seconds: simulated on the device's link, without updates on the device.
        why: reason why no step is possible; the numbers are zero then.
        trace: the simulated step, which takes `seconds`; None for torch's checkpoint.
        plan: the plan of the step; None for a relay and torch's checkpoint.

    Example:
        See `StrategyTable`.
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
    """A way to make a training step.

    Example:
        See `StrategyTable`.
    """

    def measure(self, bench: StrategyBench) -> StrategyResult:
        """Run a step on a copy of the model and return its needs."""
        ...


class StrategyBench(Protocol):
    """Interface of `Lab` for strategies: steps on copies of one model."""

    def run_policy(self, policy: Any) -> StrategyResult:
        """Run a step by the plan of a policy."""
        ...

    def run_relay(self, name: str, keep: int, ahead: int, stash: str) -> StrategyResult:
        """Run a step by relay."""
        ...

    def run_wrapped(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> StrategyResult:
        """Run a step of plain training with every layer's forward in a wrapper."""
        ...


@dataclass(frozen=True)
class StrategyTable:
    """Results of strategies, in the given order.

    Attributes:
        rows: one for each strategy.
        memory_bytes: budget of the device; None for no limit.

    Example:
        >>> from l2l_core.strategies import Full, Lab, Plain
        >>> relay.close()  # a model has one trainer at a time
        >>> lab = Lab(model, (torch.randn(64, 16), torch.randint(4, (64,))), loss=nn.CrossEntropyLoss())
        >>> table = lab.compare([Plain(), Full()])
        >>> [(row.name, row.layer_forwards) for row in table.rows]
        [('Plain', 6), ('Full', 12)]
        >>> table.rows[0].peak_device_bytes > table.rows[1].peak_device_bytes
        True
    """

    rows: Sequence[StrategyResult]
    memory_bytes: int | None = None

    def fits(self, row: StrategyResult) -> bool:
        """Return True if the step is possible and fits the device."""
        return not row.why and (self.memory_bytes is None or row.peak_device_bytes <= self.memory_bytes)

    def pareto(self) -> list[StrategyResult]:
        """Return the rows that no other row dominates in seconds and device bytes."""
        possible = [row for row in self.rows if not row.why]
        return [row for row in possible if not any(_dominates(other, row) for other in possible)]

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
        notes = ", ".join(["no other beats it"] * in_front + ["does not fit"] * (not self.fits(row)))
        device, host = format_bytes(row.peak_device_bytes), format_bytes(row.peak_host_bytes)
        return row.name, device, host, str(row.layer_forwards), f"{row.seconds:.4g}", notes


def _dominates(one: StrategyResult, other: StrategyResult) -> bool:
    mine, theirs = (one.seconds, one.peak_device_bytes), (other.seconds, other.peak_device_bytes)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
