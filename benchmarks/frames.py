"""Cost of a frame at size: each picture of a step of 1,000 layers and 32 micro-batches, whole and under way.

    python benchmarks/frames.py
    python benchmarks/frames.py --layers 96 --micro-batches 8

The events are made by hand: every call with its stash or fetch, every visit with the load of the next layer, its push, reduce
and update, and two memory samples per call. A frame should take less than 50 ms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

from _common import report, show

from l2l_core.trace import Event, MemorySample, Trace
from workbench.pictures import draw_memory, draw_relay, draw_timeline
from workbench.readings import Columns, StateTimeline

TURN_S = 1e-3
SHARE = 0.75  # of a step that is under way


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    last, running = (make_trace(args.layers, args.micro_batches) for _ in range(2))
    began_s = time.perf_counter()
    whole = Columns.of(last)
    read_ms = 1e3 * (time.perf_counter() - began_s)
    keys = list(last.names)
    events, samples = (int(SHARE * count) for count in running.counts)
    part = Columns.of(running, events, samples)
    now_s = part.end_s
    step = StateTimeline.of(last, keys)
    sweep: dict[str, Any] = {"before": whole, "now_s": now_s, "span_s": whole.end_s, "keys": keys}
    settings = last.settings

    def live() -> str:
        moments = StateTimeline(part, keys, **settings, previous=step, live=True)
        return draw_relay(moments.at_time(now_s), keys)

    frames: dict[str, Callable[[], str]] = {
        "timeline, whole": lambda: draw_timeline(whole, keys=keys),
        "memory, whole": lambda: draw_memory(whole, keys=keys, in_core_bytes=10**11),
        "relay, one event": lambda: draw_relay(step.at_event(step.count // 2), keys),
        "timeline, under way": lambda: draw_timeline(part, **sweep),
        "memory, under way": lambda: draw_memory(part, **sweep, in_core_bytes=10**11),
        "relay, under way": live,
    }
    found = {name: measure(draw, args.rounds) for name, draw in frames.items()}
    print(f"{last.counts[0]:,} events, {last.counts[1]:,} samples, read once in {read_ms:.0f} ms")
    show(("picture", "median ms", "kB"), [(name, row["ms"], row["bytes"] / 1000) for name, row in found.items()])
    live_ms = sum(row["ms"] for name, row in found.items() if name.endswith("under way"))
    print(f"a frame with all three, under way: {live_ms:.1f} ms")
    report("frames", {"settings": vars(args), "read_ms": read_ms, "live_frame_ms": live_ms, "frames": found})


def measure(draw: Callable[[], str], rounds: int) -> dict[str, float]:
    """Median milliseconds of a picture, and its size."""
    svg, spent = draw(), []
    for _ in range(rounds):
        began_s = time.perf_counter()
        draw()
        spent.append(1e3 * (time.perf_counter() - began_s))
    return {"ms": sorted(spent)[rounds // 2], "bytes": len(svg.encode())}


def make_trace(layers: int, micro_batches: int) -> Trace:
    """A whole step with the stash on the host."""
    keys = [f"L{i:03d}" for i in range(layers)]
    order = [*range(layers), *range(layers - 2, -1, -1)]
    events = [event for visit in range(len(order)) for event in _visit(keys, order, visit, layers, micro_batches)]
    calls = [event for event in events if event.lane == "compute"]
    memory = [sample for i, event in enumerate(calls) for sample in _samples(event.stop_s, i)]
    settings = {"micro_batches": micro_batches, "ahead": 1, "stash": "host"}
    return Trace.of(events, memory, settings=settings, names={key: f"layers.{i}" for i, key in enumerate(keys)})


def _visit(keys: list[str], order: list[int], visit: int, layers: int, micro_batches: int) -> Iterator[Event]:
    key, is_backward = keys[order[visit]], visit >= layers
    began_s = visit * micro_batches * TURN_S
    if visit + 1 < len(order):
        yield Event("h2d", "load", began_s, began_s + 0.6 * micro_batches * TURN_S, keys[order[visit + 1]], -1, 10**7)
    for k in range(micro_batches):
        t = began_s + k * TURN_S
        kind = "backward" if is_backward else "forward"
        yield Event("compute", kind, t, t + 0.9 * TURN_S, key, k, 0, visit, 0.0, visit)
        lane, kind = ("h2d", "fetch") if is_backward else ("d2h", "stash")
        yield Event(lane, kind, t + 0.3 * TURN_S, t + 0.5 * TURN_S, key, k, 10**5, visit)
    if is_backward:
        t = began_s + micro_batches * TURN_S
        yield Event("d2h", "push", t, t + 0.5 * micro_batches * TURN_S, key, -1, 10**7, visit)
        yield Event("eps", "reduce", t + 16 * TURN_S, t + 18 * TURN_S, key, -1, 10**7)
        yield Event("eps", "update", t + 18 * TURN_S, t + 28 * TURN_S, key, -1, 10**7)


def _samples(t_s: float, call: int) -> Iterator[MemorySample]:
    held = {"weights": 2 * 10**7, "gradients": 10**7, "activations": 10**7 + call % 32 * 1000, "stash": 10**6}
    yield MemorySample(t_s, "device", held)
    yield MemorySample(t_s, "host", {"weights": 10**10, "optimizer": 2 * 10**10, "stash": call * 10**4})


if __name__ == "__main__":
    main()
