"""Simulation against measurement: recorded steps replayed on a virtual clock, and what a replay costs.

    python benchmarks/replay.py

8 configurations of a 6-layer GPT-2 on the emulated device: stash on the device and on the host, 2 and 4 micro-batches, a
link and none, ahead 0, 1 and 2. `replay` simulates a step from its own trace. `forecast`, for information, simulates it
from a step that ran without link limits and one layer ahead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from _common import make_batch, make_gpt2, report, show

from l2l_core import EmulatedDevice, Machine, Profile, Relay, RelayConfig, Shapes, StepResult, simulate

LENGTH = 128
LANES = ("compute", "h2d", "d2h", "eps")
CONFIGURATIONS = (  # stash, micro-batches, share of compute time that the link takes, ahead
    ("device", 2, 0.0, 1),
    ("device", 4, 0.5, 1),
    ("device", 4, 0.9, 1),
    ("device", 4, 0.9, 0),
    ("device", 2, 0.9, 2),
    ("host", 2, 0.5, 1),
    ("host", 4, 0.9, 1),
    ("host", 4, 0.5, 0),
)


def steps(
    config: RelayConfig, device: EmulatedDevice, layers: int, width: int, rows: int, count: int
) -> list[StepResult]:
    """The last `count` steps of a fresh relay."""
    batch, optimizer = make_batch(rows * config.micro_batches, LENGTH), partial(torch.optim.AdamW, lr=1e-4, fused=True)
    with Relay(make_gpt2(layers, width, LENGTH), optimizer, device=device, config=config) as relay:
        return [relay.step(batch) for _ in range(count + 2)][2:]


def same_events(result: StepResult, config: RelayConfig, device: EmulatedDevice) -> bool:
    """Whether the replay has the same events, lane by lane, and the same peak."""
    replay = simulate(Profile.of(result.trace), config, device)
    pairs = [(replay.lanes[lane], result.trace.lanes[lane]) for lane in LANES]
    shapes = [[[(e.kind, e.layer, e.k, e.nbytes, e.visit) for e in events] for events in pair] for pair in pairs]
    return all(a == b for a, b in shapes) and replay.peak_bytes("device") == result.trace.peak_bytes("device")


def speed() -> list[dict[str, Any]]:
    """Milliseconds of a simulation by number of events."""
    machine = Machine(flops_per_s=1e14, update_params_per_s=1e9, h2d_bytes_per_s=2e10, d2h_bytes_per_s=2e10)
    rows = []
    for depth, micro_batches in ((24, 4), (96, 16), (250, 32), (1000, 32)):
        shapes = Shapes(
            layer_params=[7_000_000] * depth,
            shell_params=30_000_000,
            tokens=8192,
            boundary_bytes=1 << 24,
            micro_batches=micro_batches,
        )
        profile, seconds = Profile.of_shapes(shapes, machine), []
        for _ in range(7):
            began_s = time.perf_counter()
            trace = simulate(profile, RelayConfig(micro_batches=micro_batches))
            seconds.append(time.perf_counter() - began_s)
        rows.append(
            {
                "layers": depth,
                "micro_batches": micro_batches,
                "events": len(trace.events),
                "median_ms": 1e3 * statistics.median(seconds),
            }
        )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=3, help="rows per micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    size = (args.layers, args.width, args.rows)

    rows = []
    free: dict[tuple[str, int], StepResult] = {}
    for stash, micro_batches, share, ahead in CONFIGURATIONS:
        if (stash, micro_batches) not in free:
            config = RelayConfig(micro_batches=micro_batches, stash=stash)
            measured = steps(config, EmulatedDevice(), *size, args.steps)
            free[stash, micro_batches] = sorted(measured, key=lambda r: r.trace.span_s)[len(measured) // 2]
        base = free[stash, micro_batches].trace
        limits = {}
        if share:
            compute_s = base.busy_s("compute")
            nbytes = {lane: sum(e.nbytes for e in base.lanes[lane]) for lane in ("h2d", "d2h")}
            limits = {f"{lane}_bytes_per_s": n / compute_s / share for lane, n in nbytes.items()}
        config, device = RelayConfig(micro_batches=micro_batches, stash=stash, ahead=ahead), EmulatedDevice(**limits)
        results = steps(config, device, *size, args.steps)
        replays = [simulate(Profile.of(r.trace), config, device).span_s / r.trace.span_s for r in results]
        forecast_s = simulate(Profile.of(base), config, device).span_s
        rows.append(
            {
                "stash": stash,
                "micro_batches": micro_batches,
                "link": share or "none",
                "ahead": ahead,
                "measured_s": statistics.median(r.trace.span_s for r in results),
                "replay": statistics.median(replays),
                "replay_min": min(replays),
                "replay_max": max(replays),
                "same_events": all(same_events(result, config, device) for result in results),
                "forecast": statistics.median(forecast_s / r.trace.span_s for r in results),
            }
        )
    worst = max(abs(row["replay"] - 1) for row in rows)
    speeds = speed()
    report("replay", {"settings": vars(args), "worst_error": worst, "replays": rows, "speed": speeds})
    show(list(speeds[0]), [list(row.values()) for row in speeds])
    show(list(rows[0]), [list(row.values()) for row in rows])
    print(f"worst error of a median replay: {worst:.1%}")


if __name__ == "__main__":
    main()
