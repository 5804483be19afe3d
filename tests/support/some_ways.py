"""Rows of a table of ways to train, made up: numbers that are easy to check."""

from __future__ import annotations

from l2l_core.strategies import Operation, Plan, StrategyResult
from l2l_core.trace import Event, MemorySample, Trace

ROWS = (
    StrategyResult("Plain", 9_000_000, 0, 4, 0.010),
    StrategyResult("Full <b>", 3_000_000, 0, 8, 0.016),
    StrategyResult("Offload", 5_000_000, 4_000_000, 4, 0.020),
    StrategyResult("Rotor", why="Rotor has no plan within 1 B"),
    StrategyResult("Relay", 2_000_000, 7_000_000, 7, 0.040),
)


def recomputing() -> StrategyResult:
    """Two stages, of which the first runs again; 4 ms, at most 90 bytes."""
    kinds = [("forward", "a"), ("forward", "loss"), ("backward", "loss"), ("forward", "a"), ("backward", "a")]
    times = [0.0, 0.001, 0.0015, 0.002, 0.003, 0.004]
    events = [Event("compute", k, *times[i : i + 2], layer=a, k=0) for i, (k, a) in enumerate(kinds)]
    held = [(0.0, 10), (0.001, 40), (0.001, 20), (0.0015, 60), (0.0015, 50), (0.002, 90), (0.002, 30), (0.004, 30)]
    samples = [MemorySample(t, "device", {"weights": 10, "activations": n - 10}) for t, n in [*held, (0.004, 70)]]
    plan = Plan("Full", (Operation("Fck", 0), Operation("Fall", 1)), 2, 90, 0, 0.004)
    trace = Trace.of(events, samples, names={"a": "a", "loss": "loss"})
    return StrategyResult("Full <b>", 90, 0, 2, 0.004, trace=trace, plan=plan)
