"""How a relay scales with workers: measured on one machine with slow links, and planned for more workers than there are.

    python benchmarks/scale.py
    python benchmarks/scale.py --processes 2 4 --rounds 9

A GPT-2 with a byte vocabulary and fused AdamW. Every process has one core and one thread (with more processes than cores
some share one, and processor time shows what seconds cannot). The links of the emulated device, and of the emulated
network, get the bandwidths at which copies and messages of two take `--share` of one worker's compute, so that one is
compute-bound. A wait for a link is a sleep on the thread of that link. In every round rank 0 makes a step by itself while
the others sleep, and then all make one together, each on as many rows: efficiency is the first over the second, round by
round. Between the two is the control: all make a step at once, each by itself, and nothing is sent. Its time beyond that
of one alone is due to the machine (memory, caches, clock, neighbours), and no workers could be quicker: efficiency over
that of the control is what training together costs.

Processor time gives the same without the waiting, and without what other processes on the machine do to seconds: what
workers do besides what one alone does, all of it on the core that computes. Forecasts are made by rank 0's own relay from its
last step; plans for more processes than were run here are not measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _common import make_batch, make_gpt2, report, show, spread
from _ranks import Ranks, timed

from l2l_core import EmulatedDevice, Forecast, Network, Relay, RelayConfig, Workers

PLANNED = (1, 2, 4, 8, 64, 512)
SIDES = ("alone", "control", "together")
STRAGGLER = 1.5  # times as slow as the others


def measure(rank: int, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Make steps alone and together; rank 0 plans besides."""
    torch.manual_seed(rank)
    batch = make_batch(args.rows * args.micro_batches, args.length)
    config = RelayConfig(micro_batches=args.micro_batches)
    device = EmulatedDevice()
    with relay_of(args, config, device) as alone:
        first = alone.step(batch)  # metered
        # By its processor time: seconds hold what others on the machine do
        compute_s = min(timed(partial(alone.step, batch))["core_s"] for _ in range(3))
        sent = alone.forecast(batch, workers=2).worker.traffic
        told = torch.tensor([compute_s, sum(each.sent for each in sent.values())], dtype=torch.float64)
        dist.broadcast(told, 0)  # one network for all
        compute_s, sent_bytes = told.tolist()
        share_s = args.share * compute_s
        # Two thirds of compute are backward, under which alone pushes can hide
        link = {"h2d_bytes_per_s": first.bytes_loaded / share_s, "d2h_bytes_per_s": 1.5 * first.bytes_pushed / share_s}
        network = Network(bytes_per_s=sent_bytes / share_s, latency_s=args.latency_us * 1e-6)
        device.throttle(**link)
        with relay_of(args, config, EmulatedDevice(**link), Workers(network=network)) as together:
            for _ in range(2):
                together.step(batch)
            sides: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
            for _ in range(args.rounds):
                sides["alone"].append(timed(partial(alone.step, batch) if rank == 0 else lambda: None))
                sides["control"].append(timed(partial(alone.step, batch)))
                sides["together"].append(timed(partial(together.step, batch)))
            waited = together.trace.worker
        # the least time of a message here, on any emulated network
        real = Network(bytes_per_s=network.bytes_per_s, latency_s=max(network.latency_s, message_s(count)))
        plans = [plan(alone, batch, workers, real) for workers in PLANNED] if rank == 0 else []
        slow = [plan(alone, batch, workers, real, {1: STRAGGLER}) for workers in (2, 8)] if rank == 0 else []
    figures = {**link, "network_bytes_per_s": network.bytes_per_s, "latency_s": real.latency_s}
    return {"sides": sides, "plans": plans, "slow": slow, "figures": figures, "last": waited.last}


def relay_of(
    args: argparse.Namespace, config: RelayConfig, device: EmulatedDevice, workers: Workers | None = None
) -> Relay:
    """Make a relay; embeddings are untied, since tied ones would be pushed once per micro-batch."""
    model = make_gpt2(args.layers, args.width, args.length, tie_word_embeddings=False)
    return Relay(model, partial(torch.optim.AdamW, lr=1e-4, fused=True), device, config=config, workers=workers)


def message_s(count: int, tries: int = 50) -> float:
    """Seconds of the quickest tenth of messages to all, as workers send them when they meet."""
    mine, every, taken = torch.zeros(count), torch.empty(count), []
    for _ in range(tries):
        began_s = time.perf_counter()
        dist.all_to_all_single(every, mine)
        taken.append(time.perf_counter() - began_s)
    return sorted(taken)[tries // 10]


def plan(
    relay: Relay, batch: Any, workers: int, network: Network, stragglers: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Forecast a step of worker 0 of so many."""
    forecast: Forecast = relay.forecast(batch, workers=workers, network=network, stragglers=stragglers)
    worker, gone = forecast.worker, 0
    if worker is not None:
        gone = sum(each.sent for each in worker.traffic.values())
    held = (
        dict(worker.held_bytes)
        if worker
        else {n: v for n, v in forecast.host_bytes.items() if n in ("weights", "optimizer")}
    )
    return {
        "workers": workers,
        "seconds": forecast.seconds,
        "held_bytes": sum(held.values()),
        "gathered_bytes": worker.gather_buffer_bytes if worker else 0,
        "sent_bytes": gone,
        "bound": str(forecast.bound),
        "stragglers": dict(stragglers or {}),
    }


def summary(count: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put together what the ranks have found."""
    alone = ranks[0]["sides"]["alone"]
    taken: dict[str, dict[str, list[float]]] = {"seconds": {}, "core_s": {}}  # by side, round by round
    for side in SIDES[1:]:
        rounds = list(zip(*(r["sides"][side] for r in ranks), strict=True))
        taken["seconds"][side] = [max(each["seconds"] for each in row) for row in rounds]
        taken["core_s"][side] = [sum(each["core_s"] for each in row) / count for row in rounds]
    for unit, sides in taken.items():
        sides["alone"] = [each[unit] for each in alone]
    together = taken["seconds"]["together"]
    planned = {each["workers"]: each["seconds"] for each in ranks[0]["plans"]}
    return {
        "processes": count,
        **{unit: {side: spread(sides[side]) for side in SIDES} for unit, sides in taken.items()},
        "efficiency": {unit: efficiencies(sides) for unit, sides in taken.items()},
        "planned_error": planned[count] / spread(together)["median"] - 1,
        "planned_error_alone": planned[1] / spread(taken["seconds"]["alone"])["median"] - 1,
        "figures": ranks[0]["figures"],
        "plans": ranks[0]["plans"],
        "slow": ranks[0]["slow"],
    }


def efficiencies(sides: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return, for each round, the ratio to one alone: of all together, of the control, and of the first over the second."""
    raw, control = (
        [a / b for a, b in zip(sides["alone"], sides[side], strict=True)] for side in ("together", "control")
    )
    over = [c / b for c, b in zip(sides["control"], sides["together"], strict=True)]
    return {"raw": spread(raw), "control": spread(control), "over control": spread(over)}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--share", type=float, default=0.4, help="of compute that each link takes")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a message")
    args = parser.parse_args()

    found = []
    for count in args.processes:
        with Ranks(count) as ranks:
            found.append(summary(count, ranks.run(measure, args)))
    report("scale", {"settings": vars(args), "results": found})
    show(
        ["processes", "by", *(f"{side}, s" for side in SIDES), "raw", "control", "over control"],
        [
            [
                one["processes"],
                {"seconds": "seconds", "core_s": "processor time"}[unit],
                *(one[unit][side]["median"] for side in SIDES),
                *("{median:.3f} ({min:.3f}-{max:.3f})".format(**each) for each in one["efficiency"][unit].values()),
            ]
            for one in found
            for unit in ("seconds", "core_s")
        ],
    )
    print("raw: alone / together; control: alone / all at once, each by itself; over control: control / together\n")
    for one in found:
        planned = next(each["seconds"] for each in one["plans"] if each["workers"] == one["processes"])
        error = f"{one['planned_error']:+.1%} (one alone {one['planned_error_alone']:+.1%})"
        print(f"{one['processes']} processes: planned {planned:.3g} s, error {error}")
    plans = [*found[0]["plans"], *found[0]["slow"]]
    one_s = plans[0]["seconds"]
    print(f"planned, from rank 0's last step; {found[0]['figures']}\n")
    show(
        ["workers", "step, s", "efficiency", "masters and state, MB", "gathered, MB", "sent a step, MB", "what binds"],
        [
            [
                f"{each['workers']}{', one 1.5 x as slow' if each['stragglers'] else ''}",
                each["seconds"],
                f"{one_s / each['seconds']:.3f}",
                *(f"{each[name] / 1e6:.2f}" for name in ("held_bytes", "gathered_bytes", "sent_bytes")),
                each["bound"].split(";")[0],
            ]
            for each in plans
        ],
    )


if __name__ == "__main__":
    main()
