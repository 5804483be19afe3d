"""What worker processes do in tests of what is planned: it is counted, at channels, sockets and ledgers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from crew_cases import Case, relay_of

from l2l_core import Network, Profile, Relay, Trace, simulate
from l2l_core.parallel import settled_tcp_bytes
from l2l_core.workers.network import Traffic, all_gather_traffic, all_to_all_traffic, broadcast_traffic

Events = list[tuple[str, str, int]]


def together(trace: Trace) -> dict[str, Events]:
    """List what was done with other workers, without times."""
    return {lane: [(e.kind, e.layer, e.nbytes) for e in trace.lanes[lane]] for lane in ("gather", "reduce")}


def made_and_planned(rank: int, count: int, case: Case) -> dict[str, Any]:
    """Make steps together, and plan one; then alone, before any step and after some. Gives what was counted, and all plans."""
    with relay_of(case, rank) as relay:
        for step in range(2):
            relay.step(case.rows_of(rank, step))
        crew = relay._backend._group  # type: ignore[attr-defined]
        counted = {"gather": Counter[str](), "reduce": Counter[str]()}
        for name, channel in (("gather", crew.gathers), ("reduce", crew.reduces)):
            count_at(channel, counted[name])
        trace = relay.step(case.rows_of(rank, 2)).trace
        del counted["reduce"]["nothing"]
        weights, bytes_of = relay.host.by_owner("weights"), relay.host.by_category()
        made = {
            "gathered": weights.pop("gathered"),
            "weights": sum(weights.values()),
            "optimizer": bytes_of["optimizer"],
            "gradients": bytes_of["gradients"],
            "events": together(trace),
            "sent": {name: (each["sent"], each["received"]) for name, each in counted.items()},
        }
        plans = [plan_of(relay, case, rank, count)]
    for steps in (0, 2):
        with relay_of(case, rank, workers=None) as alone:
            for step in range(steps):
                alone.step(case.rows_of(rank, step))
            plans.append(plan_of(alone, case, rank, count))
    return {"made": made, "plans": plans}


def made_and_replayed(rank: int, count: int, case: Case) -> dict[str, Any]:
    """Make steps together; give what was done with others in the last one, and in its replay."""
    with relay_of(case, rank) as relay:
        trace = [relay.step(case.rows_of(rank, step)).trace for step in range(3)][-1]
    replay = simulate(Profile.of(trace), case.settings, rank=rank)
    update_s = [sum(e.stop_s - e.start_s for e in t.lanes["eps"] if e.kind == "update") for t in (trace, replay)]
    return {"made": together(trace), "replayed": together(replay), "update_s": update_s}


def plan_of(relay: Relay, case: Case, rank: int, count: int) -> dict[str, Any]:
    """Plan a step, and give of it what is counted of one that was made."""
    network = Network(latency_s=1e-4)
    # What the workers themselves were made with is what is planned for them
    reduce = {} if relay.workers > 1 else {"reduce": case.reduce}
    plan = relay.forecast(case.rows_of(rank, 2), workers=count, rank=rank, network=network, **reduce)
    assert plan.worker is not None
    return {
        "gathered": plan.worker.gather_buffer_bytes,
        **plan.worker.held_bytes,
        "gradients": plan.host_bytes["gradients"],
        "events": together(plan.trace),
        "sent": {name: tuple(each) for name, each in plan.worker.traffic.items()},
    }


def count_at(channel: Any, counted: Counter[str]) -> None:
    """Count the bytes that a channel hands to collectives, by what each algorithm must move at least."""
    count, rank = channel.monitor.count, channel.monitor.rank
    gather, spread, exchange = channel.all_gather, channel.broadcast, channel.all_to_all

    def gathering(every: torch.Tensor, mine: torch.Tensor, *rest: Any) -> None:
        counted.update(sent=mine.nbytes * (count - 1), received=every.nbytes - mine.nbytes)
        gather(every, mine, *rest)

    def spreading(values: torch.Tensor, source: int, *rest: Any) -> None:
        assert count == 2, "with more workers some hand on what they have got"
        counted.update({"sent" if rank == source else "received": values.nbytes})
        spread(values, source, *rest)

    def exchanging(come: torch.Tensor, comes: Any, go: torch.Tensor, goes: Any, *rest: Any) -> None:
        own = go.itemsize * goes[rank]
        counted.update(sent=go.itemsize * sum(goes) - own, received=come.itemsize * sum(comes) - own)
        exchange(come, comes, go, goes, *rest)

    channel.all_gather, channel.broadcast, channel.all_to_all = gathering, spreading, exchanging


def on_the_wire(rank: int, count: int) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Make collectives of known sizes: what the kernel has counted, and what the formulas say."""
    mine, every = torch.zeros(100_000, dtype=torch.uint8), torch.empty(count * 100_000, dtype=torch.uint8)
    goes = [1_000 * (worker + 1) for worker in range(count)]
    go, come = torch.zeros(sum(goes), dtype=torch.uint8), torch.empty(goes[rank] * count, dtype=torch.uint8)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    cases: list[tuple[str, Callable[[], Any], Traffic]] = [
        ("gather", lambda: gather(every, mine), all_gather_traffic(mine.nbytes, count)),
        (
            "exchange",
            lambda: dist.all_to_all_single(come, go, [goes[rank]] * count, goes),
            all_to_all_traffic(goes, rank),
        ),
    ]
    for source in range(count):
        spread = broadcast_traffic(mine.nbytes, count, source, rank)
        cases.append((f"spread from {source}", lambda source=source: dist.broadcast(mine, source), spread))
    found = []
    for name, run, traffic in cases:
        before = settled_tcp_bytes(count)
        run()
        after = settled_tcp_bytes(count)
        found.append((name, (after[0] - before[0], after[1] - before[1]), (traffic.wire_sent, traffic.wire_received)))
    return found
