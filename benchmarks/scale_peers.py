"""A relay of several workers beside what PyTorch has for the same: seconds and bytes of one worker, in one run.

    python benchmarks/scale_peers.py
    python benchmarks/scale_peers.py --processes 2 --layers 24

The same GPT-2, micro-batches, fused AdamW and gloo for all, one core and one thread per process, real links. The peers:

    DDP + ZeRO   DistributedDataParallel with ZeroRedundancyOptimizer: whole weights and gradients, a share of the state
    FSDP2        fully_shard of every block and of the model, with CPUOffloadPolicy: a share of weights, gradients and state

On the CPU nothing has anywhere to offload to: `CPUOffloadPolicy` changes where FSDP2 would keep its shards beside a GPU.
Every side runs in separate processes, since memory that one has used is not always given back; sides take turns, round
after round. Bytes of a process are what it holds more than before the model was made, at most, sampled every millisecond;
`held` is what a side reports itself: parameters, gradients and optimizer state as tensors, for the relay the ledger of
its host. A side that cannot run is a row with the reason.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _common import cut, make_batch, make_gpt2, report, show
from _ranks import Ranks, most_resident, resident_bytes, timed
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig, Workers

Step = Callable[[], float]
RELAY = "relay"

_running: dict[str, Any] = {}  # what this process trains with: the step, and what it holds


def relay(args: argparse.Namespace, batch: Any) -> tuple[Step, Callable[[], int]]:
    """Make a relay with workers."""
    config = RelayConfig(micro_batches=args.micro_batches)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    one = Relay(model_of(args), optimizer, EmulatedDevice(), config=config, workers=Workers())
    _running["close"] = one.close
    return lambda: one.step(batch).loss, lambda: one.host.peak


def ddp(args: argparse.Namespace, batch: Any) -> tuple[Step, Callable[[], int]]:
    """Make DDP with ZeRO's sharded optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model_of(args), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)

    def step() -> float:
        with ExitStack() as without:
            without.enter_context(model.no_sync())
            *first, last = cut(batch, args.micro_batches)
            loss = sum(backward(model, part, args.micro_batches) for part in first)
        loss += backward(model, last, args.micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, lambda: tensors(model.parameters(), optimizer.optim.state.values())


def fsdp(args: argparse.Namespace, batch: Any) -> tuple[Step, Callable[[], int]]:
    """Make FSDP2 with its offloading."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model, mesh = model_of(args), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.transformer.h, model):
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        *first, last = cut(batch, args.micro_batches)
        model.set_requires_gradient_sync(False)  # whole gradients are kept meanwhile, as DDP's are
        loss = sum(backward(model, part, args.micro_batches) for part in first)
        model.set_requires_gradient_sync(True)
        loss += backward(model, last, args.micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, lambda: tensors(model.parameters(), optimizer.state.values())


SIDES = {RELAY: relay, "DDP + ZeRO": ddp, "FSDP2": fsdp}


def model_of(args: argparse.Namespace) -> nn.Module:
    """Make the model; dropout would draw other numbers on each side."""
    return make_gpt2(args.layers, args.width, args.length, dropout=0.0, tie_word_embeddings=False)


def backward(model: nn.Module, part: dict[str, torch.Tensor], count: int) -> float:
    """Add the gradients of a micro-batch; gives its part of the loss."""
    loss = model(**part).loss / count
    loss.backward()
    return float(loss.detach())


def tensors(params: Iterable[Any], states: Iterable[Any]) -> int:
    """Bytes of parameters, of gradients as large, and of optimizer state, as far as they are here."""
    here = [param.to_local() if hasattr(param, "to_local") else param for param in params]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    kept = [value.to_local() if hasattr(value, "to_local") else value for value in kept]
    return 2 * sum(each.nbytes for each in here) + sum(each.nbytes for each in kept)


def begin(rank: int, count: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Make a side, and see what it holds in its second step."""
    torch.manual_seed(rank)
    batch = make_batch(args.rows * args.micro_batches, args.length)
    model_of(args)(**cut(batch, args.micro_batches)[0]).loss.backward()  # libraries do not count
    gc.collect()
    before = resident_bytes()
    try:
        step, held = SIDES[name](args, batch)
        losses = [step()]
        with most_resident() as most:
            losses.append(step())
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    _running["step"] = step
    return {"losses": losses, "process_bytes": most[0] - before, "held_bytes": held()}


def one_step(rank: int, count: int) -> dict[str, float]:
    """Make one step more."""
    return timed(_running["step"])


def end(rank: int, count: int) -> None:
    """Let go."""
    _running.get("close", lambda: None)()
    _running.clear()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    with ExitStack() as stack:
        sides = {name: stack.enter_context(Ranks(args.processes)) for name in SIDES}
        found = {name: {"ranks": ranks.run(begin, name, args)} for name, ranks in sides.items()}
        running = {n: ranks for n, ranks in sides.items() if not any("reason" in each for each in found[n]["ranks"])}
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in running}
        for _ in range(args.rounds):
            for name, ranks in running.items():
                answers = ranks.run(one_step)
                core_s = statistics.mean(each["core_s"] for each in answers)
                rounds[name].append({"seconds": max(each["seconds"] for each in answers), "core_s": core_s})
        for ranks in sides.values():
            ranks.run(end)
    rows = [row_of(name, found[name]["ranks"], rounds, found[RELAY]["ranks"]) for name in SIDES]
    report("scale_peers", {"settings": vars(args), "sides": found, "rounds": rounds})
    show(
        ["side", "step, s", "core s", "core s / relay's", "process, MB", "held, MB", "process / relay's", "loss"], rows
    )


def row_of(
    name: str, ranks: list[dict[str, Any]], rounds: dict[str, list[dict[str, float]]], ours: list[dict[str, Any]]
) -> list[Any]:
    """A row of the table."""
    reasons = [f"rank {rank}: {each['reason']}" for rank, each in enumerate(ranks) if "reason" in each]
    if reasons:
        return [name, "; ".join(reasons), *[""] * 6]
    middle = {what: statistics.median(each[what] for each in rounds[name]) for what in ("seconds", "core_s")}
    ratio = statistics.median(
        mine["core_s"] / relay["core_s"] for mine, relay in zip(rounds[name], rounds[RELAY], strict=True)
    )
    process, held = (max(each[what] for each in ranks) / 1e6 for what in ("process_bytes", "held_bytes"))
    own = max(each["process_bytes"] for each in ours) / 1e6
    losses = [statistics.mean(each["losses"][step] for each in ranks) for step in (0, 1)]
    return [name, *middle.values(), ratio, process, held, process / own, "{:.4f}, {:.4f}".format(*losses)]


if __name__ == "__main__":
    main()
