"""How near the EPS's updates come to the bandwidth of the memory, alone and while backward computes.

    python benchmarks/optimizer.py
    python benchmarks/optimizer.py --width 64 --layers 24    (small layers: what an update costs beside its bytes)

Fused AdamW in float32 reads w, m, v, g and writes w, m, v: 28 bytes per parameter. Against it, in every round, a plain
`copy_` of a big tensor on one thread (bytes read + bytes written), and fused AdamW over one flat tensor per layer. The
EPS's update events are taken from traces: alone (gradients handed to the store while nothing else runs), and in steps
of the relay that leave the EPS a core or compute on all. A lane that shares its core gets only part of it, so bytes
per second of the lane's own processor time are given as well.

The first step makes the optimizer's state and is given apart. A step cannot hide the update of the last layer in
backward, and that of the shell; no other part of the EPS lane should be exposed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from _common import make_batch, make_gpt2, ratio, report, show, spread, threads
from torch import nn

from l2l_core import EmulatedDevice, Event, Relay, RelayConfig, StepResult, Trace
from l2l_core.devices import Copy
from l2l_core.eps import store as eps_store
from l2l_core.eps.blocks import Block, BlockGradient, Unit

BYTES_PER_PARAM = 28  # float32: read w, m, v, g; write w, m, v
PER_WEIGHT_BYTE = BYTES_PER_PARAM // 4

make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


@dataclass
class Clock:
    """Processor seconds that the EPS's thread spent in updates, and the number of readings."""

    seconds: float = 0.0
    calls: int = 0
    check_s: float = 0.0  # wall seconds of the test for finite gradients, which no event shows
    layers: set[str] = field(default_factory=set)


class Done:
    """A push that is over."""

    def join(self) -> None:
        """Nothing to wait for."""


@contextmanager
def clocked(relay: Relay) -> Iterator[Clock]:
    """Measure the EPS's thread during the block; the store is as it was afterwards."""
    store, clock = relay.store, Clock(layers={unit.key for unit in relay.stack})
    update, check = store._update, eps_store.check_finite

    def timed_update(block: Block) -> None:
        began_s = time.thread_time()
        update(block)
        if block.key in clock.layers:
            clock.seconds += time.thread_time() - began_s
            clock.calls += 1

    def timed_check(unit: Unit, block: Block, gradient: BlockGradient) -> float:
        began_s = time.perf_counter()
        norm = check(unit, block, gradient)
        clock.check_s += time.perf_counter() - began_s
        return norm

    store._update, eps_store.check_finite = timed_update, timed_check  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        del store._update  # the method of the class again
        eps_store.check_finite = check


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copy-mb", type=int, default=256)
    args = parser.parse_args()

    cores = os.cpu_count() or 1
    model = make_gpt2(args.layers, args.width, args.length)
    batch = make_batch(args.rows * args.micro_batches, args.length)
    config = RelayConfig(micro_batches=args.micro_batches)
    with Relay(model, make_optimizer, EmulatedDevice(), config=config) as relay:
        first = relay.step(batch)
        sides = make_sides(relay, batch, args.copy_mb, cores)
        rates: dict[str, list[float]] = {}
        rows: dict[str, list[dict[str, float]]] = {}
        for round_ in range(-1, args.rounds):
            for name, side in sides.items():
                measured = side()
                if round_ >= 0:
                    rates.setdefault(name, []).append(measured["bytes_per_s"])
                    rows.setdefault(name, []).append(measured)
        numel = relay.stack[0].numel
    results = {name: {key: spread(m[key] for m in ms) for key in ms[0]} for name, ms in rows.items()}
    shares = {name: ratio(rates, name, "copy, 1 thread") for name in rates}
    show_rates(results, shares)
    show_hiding(results)
    first_rate = rate(updates(first, {unit.key for unit in relay.stack})) / 1e9
    print(f"{numel:,} parameters per layer. First step, which makes the state: {first_rate:.2f} GB/s", end="\n\n")
    report(
        "optimizer",
        {"settings": vars(args), "params_per_layer": numel, "first_gb_per_s": first_rate, "sides": results}
        | {"share_of_copy": shares},
    )


def make_sides(relay: Relay, batch: object, copy_mb: int, cores: int) -> dict[str, Callable[[], dict[str, float]]]:
    """Measurements of each round; every side gives bytes per second and further figures."""
    counts = sorted({1, cores})
    source = torch.ones(copy_mb * 250_000)
    target = torch.zeros_like(source)
    layer_sizes = [unit.slot_numel(torch.float32) for unit in relay.stack]
    flats = [[nn.Parameter(torch.ones(numel))] for numel in layer_sizes]
    blocks = [[nn.Parameter(torch.ones_like(view)) for view in unit.blocks[0].views] for unit in relay.stack]
    sides: dict[str, Callable[[], dict[str, float]]] = {}
    for count in counts:
        sides[f"copy, {plural(count)}"] = partial(time_copy, target, source, count)
    for name, tensors in (("flat", flats), ("per parameter", blocks)):
        for each in tensors:
            for param in each:
                param.grad = torch.ones_like(param)
        for count in counts:
            sides[f"AdamW {name}, {plural(count)}"] = partial(time_adamw, list(map(make_optimizer, tensors)), count)
    sides["EPS alone"] = partial(time_eps_alone, relay)
    for count in reversed(counts):
        sides[f"EPS under backward on {plural(count)}"] = partial(time_step, relay, batch, count)
    return sides


def plural(count: int) -> str:
    """A number of threads."""
    return f"{count} thread{'s' * (count > 1)}"


# -- sides -------------------------------------------------------------------------------------------------------------


def time_copy(target: torch.Tensor, source: torch.Tensor, count: int) -> dict[str, float]:
    """Copy a big tensor; what is read and what is written both count."""
    with threads(count):
        began_s = time.perf_counter()
        for _ in range(3):
            target.copy_(source)
        return {"bytes_per_s": 3 * 2 * source.nbytes / (time.perf_counter() - began_s)}


def time_adamw(optimizers: Sequence[torch.optim.Optimizer], count: int) -> dict[str, float]:
    """One optimizer after another, each over a layer's worth of parameters, so that the cache is of no help."""
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    with threads(count):
        began_s = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        return {"bytes_per_s": PER_WEIGHT_BYTE * sum(p.nbytes for p in params) / (time.perf_counter() - began_s)}


def send(copies: Sequence[Copy]) -> Done:
    """Copy at once."""
    for target, source in copies:
        target.copy_(source)
    return Done()


def time_eps_alone(relay: Relay) -> dict[str, float]:
    """Hand a gradient for every layer to the store, nothing else runs."""
    store, trace = relay.store, Trace()
    with clocked(relay) as clock:
        store.begin(relay.config, trace)
        for unit in relay.stack:
            for block in unit.blocks:
                trained = block.trained
                flat = torch.full((trained.numel,), 1e-3)
                store.push_gradient(unit, block, BlockGradient(flat, trained, (True,) * len(trained.indices)), send)
        store.finish()
    return describe([e for e in trace.events if e.kind == "update"], clock)


def time_step(relay: Relay, batch: object, count: int) -> dict[str, float]:
    """A step that computes on `count` threads."""
    with threads(count), clocked(relay) as clock:
        result = relay.step(batch)
    trace = result.trace
    layers = updates(result, clock.layers)
    shell = [e for e in trace.events if e.kind == "update" and e.layer not in clock.layers]
    return describe(layers, clock) | {
        "step_s": result.seconds,
        "eps_busy_s": trace.busy_s("eps"),
        "backward_s": sum(e.stop_s - e.start_s for e in trace.events if e.kind == "backward"),
        "exposed_s": trace.exposed_s("eps"),
        "tail_s": sum(e.stop_s - e.start_s for e in [layers[-1], *shell]),
    }


def updates(result: StepResult, layers: set[str]) -> list[Event]:
    """The update events of `layers`, in order."""
    return [event for event in result.trace.events if event.kind == "update" and event.layer in layers]


def rate(events: Sequence[Event]) -> float:
    """Bytes per second of some updates."""
    return PER_WEIGHT_BYTE * sum(e.nbytes for e in events) / sum(e.stop_s - e.start_s for e in events)


def describe(events: Sequence[Event], clock: Clock) -> dict[str, float]:
    """Rate of updates by the wall clock and by the thread's own."""
    nbytes = PER_WEIGHT_BYTE * sum(event.nbytes for event in events)
    return {
        "bytes_per_s": rate(events),
        "bytes_per_cpu_s": nbytes / clock.seconds,
        "update_s": sum(e.stop_s - e.start_s for e in events) / len(events),
        "check_s": clock.check_s / len(events),
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def show_rates(results: dict[str, dict[str, dict[str, float]]], shares: dict[str, dict[str, float]]) -> None:
    """Bytes per second of every side, and as a share of the copy."""
    rows = []
    for name, measured in results.items():
        wall = measured["bytes_per_s"]["median"] / 1e9
        own = measured["bytes_per_cpu_s"]["median"] / 1e9 if "bytes_per_cpu_s" in measured else ""
        share = shares[name]
        rows.append((name, f"{wall:.1f}", f"{own:.1f}" if own else "", *(f"{share[key]:.2f}" for key in share)))
    show(("side", "GB/s", "GB per thread's own s", "share of copy", "min", "max"), rows)


def show_hiding(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Return the share of the EPS lane that was hidden under compute."""
    keys = ("step_s", "backward_s", "eps_busy_s", "exposed_s", "tail_s", "update_s", "check_s")
    rows = [
        (name, *(f"{1e3 * measured[key]['median']:.1f}" for key in keys))
        for name, measured in results.items()
        if "step_s" in measured
    ]
    header = ("ms per step", "step", "backward", "EPS busy", "exposed", "tail", "per update", "per finiteness test")
    show(header, rows)


if __name__ == "__main__":
    main()
