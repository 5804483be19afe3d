"""Memory and time over depth and over micro-batches: relay, stash on the host and on the device, against in core.

    python benchmarks/depth.py
    python benchmarks/depth.py --depths 12 24 --micro-batches 1 8

GPT-2 blocks, fused AdamW. Peak device bytes of the relay are its ledger's, of a metered step and of one that replays
the profile (the larger counts). In core: plain gradient accumulation, every storage counted from the operation that
makes it (`workbench.lessons.plain_training.StorageMeter`); at the smallest depth torch's own MemTracker counts as well (it takes
minutes at large ones). Seconds per layer are of steps in turn.

Host bytes per parameter, in a fresh process with a model of 60 million parameters: bytes of the ledger, and growth of the
process, less the buffers of the emulated device, which are in the same memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from _common import make_batch, make_gpt2, report, show
from torch.distributed._tools.mem_tracker import MemTracker

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.trace import format_bytes
from workbench.lessons.plain_training import StorageMeter

make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 48, 96, 192, 384])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--host-layers", type=int, default=9, help="768 wide, for host bytes per parameter")
    parser.add_argument("--grow", action="store_true", help="only measure host bytes in this process, as JSON")
    args = parser.parse_args()
    if args.grow:
        print(json.dumps(measure_growth(args.host_layers)))
        return

    by_depth = {depth: measure_depth(depth, args) for depth in args.depths}
    tracked = track_peak(args.depths[0], args)
    by_count = {count: relay_peak(args.depths[0], count, "host", args) for count in args.micro_batches}
    host = json.loads(
        subprocess.check_output(
            [sys.executable, __file__, "--grow", "--host-layers", str(args.host_layers)], text=True
        ).splitlines()[-1]
    )
    flat = by_depth[args.depths[-1]]["peaks"]["host"] / by_depth[args.depths[0]]["peaks"]["host"]
    flat_in_count = max(by_count.values()) / min(by_count.values())
    show_depths(by_depth)
    print(f"Peak with the stash on the host, {args.depths[-1]} layers / {args.depths[0]} layers: {flat:.4f}")
    print(f"In core at {args.depths[0]} layers, by MemTracker: {format_bytes(tracked)}", end="\n\n")
    show(("micro-batches", "peak device bytes, stash on the host"), [(k, f"{n:,}") for k, n in by_count.items()])
    show_host(host)
    report(
        "depth",
        {"settings": vars(args), "by_depth": by_depth, "tracked_bytes": tracked, "by_micro_batches": by_count}
        | {"peak_ratio_in_depth": flat, "peak_ratio_in_micro_batches": flat_in_count, "host": host},
    )


# -- depth -------------------------------------------------------------------------------------------------------------


def measure_depth(depth: int, args: argparse.Namespace) -> dict[str, Any]:
    """Peak bytes and seconds per layer of each side at one depth."""
    batch = make_batch(2 * args.rows, args.length)
    seconds: dict[str, list[float]] = {"host": [], "device": [], "in core": []}
    peaks: dict[str, int] = {}
    plain = InCore(depth, batch, args)
    peaks["in core"] = plain.measure_peak_bytes()
    config = partial(RelayConfig, micro_batches=2)
    with (
        Relay(make_gpt2(depth, args.width, args.length), make_optimizer, config=config(stash="host")) as host,
        Relay(make_gpt2(depth, args.width, args.length), make_optimizer, config=config(stash="device")) as device,
    ):
        relays = {"host": host, "device": device}
        for name, relay in relays.items():
            peaks[name] = relay.step(batch).peak_device_bytes  # metered
        for _ in range(args.rounds):
            for name, relay in relays.items():
                result = relay.step(batch)
                peaks[name] = max(peaks[name], result.peak_device_bytes)
                seconds[name].append(result.seconds)
            seconds["in core"].append(time_once(plain.step))
    per_layer = {name: statistics.median(values) / depth for name, values in seconds.items()}
    return {"peaks": peaks, "s_per_layer": per_layer}


def relay_peak(depth: int, micro_batches: int, stash: Any, args: argparse.Namespace) -> int:
    """Largest peak of a metered and a replayed step."""
    batch = make_batch(micro_batches * args.rows, args.length)
    config = RelayConfig(micro_batches=micro_batches, stash=stash)
    with Relay(make_gpt2(depth, args.width, args.length), make_optimizer, EmulatedDevice(), config=config) as relay:
        return max(relay.step(batch).peak_device_bytes for _ in range(2))


class InCore:
    """Plain training of the same model on the same micro-batches."""

    def __init__(self, depth: int, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> None:
        self.model = make_gpt2(depth, args.width, args.length)
        self.optimizer = make_optimizer(self.model.parameters())
        self._tokens, self._rows = batch["input_ids"], args.rows

    def step(self, before_each: Callable[[], object] = lambda: None) -> None:
        """One step of gradient accumulation."""
        for part in self._tokens.split(self._rows):
            before_each()
            (self.model(input_ids=part, labels=part, use_cache=False).loss / 2).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure_peak_bytes(self) -> int:
        """Most bytes at once, over two steps: the first makes the optimizer's state."""
        meter = StorageMeter([*self.model.parameters(), *self.model.buffers(), self._tokens])
        with meter:
            self.step()
            self.step()
        return meter.peak


def track_peak(depth: int, args: argparse.Namespace) -> int:
    """The same peak by torch's MemTracker."""
    plain, tracker = InCore(depth, make_batch(2 * args.rows, args.length), args), MemTracker()
    tracker.track_external(plain.model, plain.optimizer)
    with tracker:
        plain.step(tracker.reset_mod_stats)
        plain.step(tracker.reset_mod_stats)
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return snapshot["Total"]


def time_once(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


# -- host --------------------------------------------------------------------------------------------------------------


def measure_growth(layers: int) -> dict[str, Any]:
    """Host bytes per parameter by the ledger and by the process, after two steps."""
    batch = make_batch(2, 16)
    with Relay(make_gpt2(1, 64, 16), make_optimizer, EmulatedDevice()) as small:
        small.step(batch)  # libraries that torch loads lazily
    process = psutil.Process()
    before = process.memory_info().rss
    model = make_gpt2(layers, 768, 16)
    with Relay(model, make_optimizer, EmulatedDevice(), config=RelayConfig(micro_batches=2)) as relay:
        for _ in range(2):
            result = relay.step(batch)
        grown = process.memory_info().rss - before
        peak = result.trace.peak_sample("device")
        assert peak is not None
        on_device = peak.bytes_by_category["weights"] + peak.bytes_by_category["gradients"]
        params = sum(param.numel() for param in model.parameters())
        return {
            "params": params,
            "layers": layers,
            "by_category": {name: n / params for name, n in relay.host.by_category().items()},
            "ledger": relay.host.total / params,
            "ledger_peak": relay.host.peak / params,
            "resident": (grown - on_device) / params,
            "device_buffers": on_device / params,
        }


# -- tables ------------------------------------------------------------------------------------------------------------


def show_depths(by_depth: dict[int, dict[str, Any]]) -> None:
    """Peaks and seconds per layer, one row per depth."""
    names = ("host", "device", "in core")
    header = ["layers", *(f"peak bytes, {name}" for name in names), *(f"ms per layer, {name}" for name in names)]
    rows = [
        (
            depth,
            *(f"{found['peaks'][name]:,}" for name in names),
            *(1e3 * found["s_per_layer"][name] for name in names),
        )
        for depth, found in by_depth.items()
    ]
    show(header, rows)


def show_host(host: dict[str, Any]) -> None:
    """Host bytes per parameter."""
    rows = [(f"ledger: {name}", value) for name, value in host["by_category"].items()]
    rows += [
        ("ledger: all", host["ledger"]),
        ("ledger: peak", host["ledger_peak"]),
        ("process, less device buffers", host["resident"]),
    ]
    show((f"{host['params'] / 1e6:.1f} M parameters in {host['layers']} layers", "host bytes per parameter"), rows)


if __name__ == "__main__":
    main()
