"""Cost of tracing: steps with trace, meter and memory samples against the same steps with doubles that do nothing.

    python benchmarks/tracing.py
    python benchmarks/tracing.py --rounds 9 --stash host

Two models: GPT-2 blocks 768 wide, with a target of at most 2 % of a step for tracing, and blocks 64 wide as
information. Steps replay the activation profile of the first one (`meter="on_change"`). Steps in turn show costs only
down to the noise of the machine, so the cost is also counted: how often a step calls trace and meter, times the
seconds of each call in isolation on ledgers as full as those of the step, over the step's seconds.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from _common import alternate, make_batch, make_gpt2, medians, ratio, report, show, spread

from l2l_core import EmulatedDevice, Event, Relay, RelayConfig, Trace
from l2l_core.devices import Ledger
from l2l_core.step import RelayParts, pass_runtime
from l2l_core.step.micro_batch import StepContext
from l2l_core.step.traffic import ComputeClock, MemoryMeter, MeterRecord

make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class SilentTrace(Trace):
    """Keeps nothing."""

    def add(self, event: Event) -> None:
        """Nothing."""

    def sample(self, place: str, bytes_by_category: Any) -> None:
        """Nothing."""


class SilentMeter:
    """Samples nothing and books no activations; hands on what was metered, so that the next step need not meter."""

    def __init__(
        self, device: Ledger, host: Ledger, trace: Trace, replay: MeterRecord | None, keeps_graphs: bool = False
    ) -> None:
        self.record, self.is_metering = replay, replay is None

    def sample(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class NosyMeter(MemoryMeter):
    """Keeps a copy of each ledger's books at their fullest."""

    fullest: dict[str, Counter[tuple[str, str]]]

    def sample(self) -> None:
        """Sample, and look."""
        super().sample()
        for ledger in (self._device, self._host):
            if len(ledger._owned) > len(self.fullest.get(ledger.place, ())):
                self.fullest[ledger.place] = ledger._owned.copy()


def _untimed(self: StepContext, kind: str, layer: str, k: int, visit: int = -1) -> Callable[[], None]:
    return _nothing


def _nothing() -> None:
    pass


@contextmanager
def replaced(owner: Any, name: str, double: Any) -> Iterator[None]:
    """Put a double in the place of a class's or module's member."""
    real = getattr(owner, name)
    setattr(owner, name, double)
    try:
        yield
    finally:
        setattr(owner, name, real)


def step_silently(relay: Relay, batch: Any) -> None:
    """A step without tracing."""
    with (
        replaced(StepContext, "time_event", _untimed),
        replaced(pass_runtime, "MemoryMeter", SilentMeter),
        replaced(RelayParts, "new_trace", lambda self, config, step=0: SilentTrace()),
    ):
        relay.step(batch)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 64])
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of the widest model; narrower ones get more")
    parser.add_argument("--stash", default="device", choices=["device", "host"])
    args = parser.parse_args()

    results = {width: measure(width, args) for width in args.widths}
    show(
        ("width", "step, ms", "traced / silent", "min", "max", "counted, share of a step"),
        [
            (width, 1e3 * r["median_s"]["traced"], *r["ratio"].values(), f"{r['counted_share']:.3%}")
            for width, r in results.items()
        ],
    )
    for width, found in results.items():
        print(f"{width} wide:")
        show(
            ("call", "times per step", "us each", "ms per step"),
            [(name, n, 1e6 * s, 1e3 * n * s) for name, (n, s) in found["calls"].items()],
        )
    report("tracing", {"settings": vars(args), "by_width": results})


def measure(width: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways for one model."""
    model, batch = make_gpt2(args.layers, width, args.length), make_batch(args.rows * args.micro_batches, args.length)
    config = RelayConfig(micro_batches=args.micro_batches, stash=args.stash)
    with Relay(model, make_optimizer, EmulatedDevice(), config=config) as relay:
        relay.step(batch)  # metered

        sides = {"traced": partial(relay.step, batch), "silent": partial(step_silently, relay, batch)}
        rounds = args.rounds * (1 if width == max(args.widths) else 5)
        seconds = alternate(sides, rounds)
        counted = count_calls(relay, batch)
    total_s = sum(n * s for n, s in counted.values())
    return {
        "median_s": medians(seconds),
        "ratio": ratio(seconds, "traced", "silent"),
        "calls": counted,
        "counted_share": total_s / medians(seconds)["traced"],
    }


# -- counted -----------------------------------------------------------------------------------------------------------


def count_calls(relay: Relay, batch: Any) -> dict[str, tuple[int, float]]:
    """How often a step does what, and the seconds of doing it once."""
    NosyMeter.fullest = {}
    with replaced(pass_runtime, "MemoryMeter", NosyMeter):
        trace = relay.step(batch).trace
    compute = len(trace.lanes["compute"])
    return {
        "compute event": (compute, time_compute_event(relay)),
        "event of another lane": (len(trace.events) - compute, time_event()),
    }


def time_compute_event(relay: Relay, times: int = 2000) -> float:
    """Seconds to begin and end a compute event, memory samples included, while it computes nothing."""
    ledgers = [Ledger(place, "copy") for place in ("device", "host")]
    for ledger in ledgers:
        for (category, owner), nbytes in NosyMeter.fullest[ledger.place].items():
            ledger.book(category, owner, nbytes)
    trace = Trace()
    known = MeterRecord([("forward L000", 1000 + i % 7, i % 5) for i in range(times)])  # changes: every sample is kept
    meter, clock = MemoryMeter(*ledgers, trace, known), ComputeClock(relay.device, trace)
    run = SimpleNamespace(meter=meter, clock=clock)  # the attributes that `time_event` reads
    return time_call(lambda: StepContext.time_event(run, "forward", "L000", 0, 0)(), times)  # type: ignore[arg-type]


def time_event(times: int = 20_000) -> float:
    """Seconds to make an event and add it."""
    trace = Trace()
    return time_call(lambda: trace.add(Event("h2d", "load", 0.0, 1.0, "L000", -1, 1000)), times)


def time_call(call: Callable[[], Any], times: int) -> float:
    """Median seconds of a call over ten batches."""
    seconds = []
    for _ in range(10):
        began_s = time.perf_counter()
        for _ in range(times // 10):
            call()
        seconds.append((time.perf_counter() - began_s) / (times // 10))
    return spread(seconds)["median"]


if __name__ == "__main__":
    main()
