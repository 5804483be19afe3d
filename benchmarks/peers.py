"""Training in less device memory, by the relay and by what else there is, in one run: bytes, seconds, depth, losses.

    python benchmarks/peers.py                              some minutes on two cores
    python benchmarks/peers.py --ways "in core" relay       only these
    python benchmarks/peers.py --device cuda --width 1024 --layers 24 --cores 8     on a GPU (not yet run on one)

The packages among the peers: `pip install -c constraints.txt -e ".[peers]"`. One that is not installed, or does not run
here, is a row with the reason in its own words. How each is set up is in `_peers.py`: the same GPT-2, micro-batches,
fused AdamW and clipping for all, whole steps. Every way has a separate process, with a process group of one; these take
turns, round after round.

Bytes, of the third step: `process` is what the process holds more than before the model was made, at most, sampled every
millisecond. `device` on a GPU is the most that its allocator had handed out, and `host` is the process. On the CPU a
device is emulated: for the relay its ledger, in core every storage from the operation that makes it to its end, since
there all are on the device; `host` is then the relay's ledger, and nothing in core. The other ways do not support an
emulated device: with the CPU for one they have nowhere to offload to, and all that their process holds is `host`. `disk`
is files.

Depth: the most layers with which these steps stay within the budget. It is searched (`_deepest.py`), each try in a fresh process:
the reported depth has been run, and so has the next one, which was too much.
"""

from __future__ import annotations

import argparse
import gc
import io
import logging
import math
import multiprocessing
import statistics
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import make_batch, report, show
from _deepest import deepest
from _peers import WAYS, Peer, Shape
from _ranks import Ranks, most_resident, resident_bytes, timed

BASE = "in core"
LOADED_ONCE = ["transformers.models.gpt2.modeling_gpt2", "workbench.lessons.plain_training"]
STEPS = 3  # whose losses are compared; the first makes the optimizer's state, and the last is weighed

_running: dict[str, Any] = {}  # what this process trains with


# -- in the process of a way -------------------------------------------------------------------------------------------


def begin(rank: int, count: int, name: str, shape: Shape) -> dict[str, Any]:
    """Make a way and its first steps; gives their losses and bytes, or the reason why it does not run."""
    quiet()
    torch.manual_seed(0)
    batch = make_batch(shape.rows * shape.micro_batches, shape.length)
    small = replace(shape, layers=1, width=64)
    WAYS[BASE](small, batch, ExitStack()).step()  # libraries that any training loads do not count
    gc.collect()
    before = resident_bytes()
    stack = _running["stack"] = ExitStack()
    try:
        with redirect_stdout(io.StringIO()):  # some greet
            peer = _running["peer"] = WAYS[name](shape, batch, stack)
            losses = [peer.step() for _ in range(STEPS - 1)]
            found = weigh(peer, shape, losses, before)
    except Exception as error:
        return {"reason": reason_of(error)}
    return found | {"losses": losses, "disk": peer.disk_bytes(), "note": peer.note, "trains": peer.trains}


def weigh(peer: Peer, shape: Shape, losses: list[float], before: int) -> dict[str, int | None]:
    """Bytes of a step: of the process, of the device and of the host."""
    if shape.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    with most_resident() as most:
        losses.append(peer.step())
    process = most[0] - before
    if shape.on_cuda:
        return {"process": process, "device": torch.cuda.max_memory_allocated(), "host": process}
    device = peer.metered_step() if peer.metered_step else None
    return {"process": process, "device": device, "host": peer.host_bytes() if peer.host_bytes else process}


def one_step(rank: int, count: int) -> dict[str, float]:
    """Make one step more."""

    def step() -> None:
        _running["peer"].step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return timed(step)


def end(rank: int, count: int) -> None:
    """Let go."""
    _running.pop("stack", ExitStack()).close()
    _running.clear()


def quiet() -> None:
    """Keep the log messages of libraries out of the tables."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def reason_of(error: BaseException) -> str:
    """Its type, its first line, and where it was raised."""
    lines = str(error).strip().splitlines() or ["(says nothing)"]
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {lines[0][:200]} ({'/'.join(Path(at.filename).parts[-2:])}, {at.name})"


# -- over all processes ------------------------------------------------------------------------------------------------


class Crew:
    """Makes a process for a way, as the device wants it."""

    def __init__(self, shape: Shape, cores: int) -> None:
        backend, method = "gloo", "forkserver"
        if shape.on_cuda:
            backend, method = "cpu:gloo,cuda:nccl", "spawn"
        else:
            multiprocessing.get_context(method).set_forkserver_preload(LOADED_ONCE)
        self._settings = {"cores": cores, "method": method, "backend": backend}

    def one(self) -> Ranks:
        """Begin a process."""
        return Ranks(1, **self._settings)


def ask(ranks: Ranks, what: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Let a process do something; one that dies gives the reason."""
    try:
        return ranks.run(what, *args)[0]
    except RuntimeError as error:
        return {"reason": reason_of(error)}


def measure(names: list[str], shape: Shape, group: Crew, rounds: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Every way on its own, then all that run in turn."""
    with ExitStack() as stack:
        found, running = {}, {}
        for name in names:
            ranks = stack.enter_context(group.one())
            found[name] = ask(ranks, begin, name, shape)
            print(f"{name}: {'does not run' if 'reason' in found[name] else 'runs'}", flush=True)
            if "reason" not in found[name]:
                running[name] = ranks
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in running}
        for _ in range(rounds):
            for name, ranks in running.items():
                seconds[name] += ranks.run(one_step)
        for ranks in running.values():
            ranks.run(end)
    return found, seconds


def weigh_at(layers: int, name: str, shape: Shape, group: Crew) -> dict[str, float]:
    """Bytes of a way at another depth, in a fresh process; endless where it ran out of memory."""
    with group.one() as ranks:
        found = ask(ranks, begin, name, replace(shape, layers=layers))
        if "reason" not in found:
            ranks.run(end)
            return found
    if "memory" not in found["reason"].lower() and "exit code -9" not in found["reason"]:
        raise RuntimeError(f"{name} with {layers} layers: {found['reason']}")
    return {"device": math.inf, "process": math.inf}


def depths(name: str, found: dict[str, Any], args: argparse.Namespace, shape: Shape, group: Crew) -> dict[str, int]:
    """The most layers within each budget."""
    at = {shape.layers: found}  # both searches use what one has tried

    def bytes_of(what: str, layers: int) -> float:
        if layers not in at:
            at[layers] = weigh_at(layers, name, shape, group)
        return at[layers][what]

    budgets = {"device": args.device_mb, "process": args.process_mb}
    return {
        what: deepest(partial(bytes_of, what), shape.layers, budget_mb * 1e6, args.most_layers)
        for what, budget_mb in budgets.items()
        if found[what] is not None
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--keep", type=int, default=4, help="layers, for the relay that keeps graphs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device-mb", type=float, default=100.0, help="budget of the device, for the depth")
    parser.add_argument("--process-mb", type=float, default=300.0, help="budget of the process, for the depth")
    parser.add_argument("--most-layers", type=int, default=24, help="deeper is not searched; 0: no search")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cores", type=int, default=1, help="of every process")
    args = parser.parse_args()

    shape = Shape(args.layers, args.width, args.length, args.rows, args.micro_batches, args.keep, args.device)
    crew = Crew(shape, args.cores)
    found, seconds = measure(args.ways, shape, crew, args.rounds)
    deep = {}
    for name in seconds if args.most_layers else ():
        if found[name]["trains"]:
            deep[name] = depths(name, found[name], args, shape, crew)
            print(f"{name}: within the budgets {deep[name]} layers", flush=True)
    show_all(args, found, seconds, deep)
    report("peers", {"settings": vars(args), "ways": found, "seconds": seconds, "deepest": deep})


# -- tables ------------------------------------------------------------------------------------------------------------


def show_all(
    args: argparse.Namespace,
    found: dict[str, Any],
    seconds: dict[str, list[dict[str, float]]],
    deep: dict[str, dict[str, int]],
) -> None:
    """A row for every way."""
    header = ["way", "s", "processor s", "device MB", "host MB", "process MB", "disk MB"]
    header += [f"layers in a device of {args.device_mb:g} MB", f"in a process of {args.process_mb:g} MB"]
    header += ["loss differs by", "note"]
    rows = []
    for name, one in found.items():
        if "reason" in one:
            rows.append([name, *[""] * (len(header) - 2), one["reason"]])
            continue
        times = (statistics.median(each[what] for each in seconds[name]) for what in ("seconds", "core_s"))
        sizes = ("" if one[what] is None else one[what] / 1e6 for what in ("device", "host", "process", "disk"))
        layers = (at_most(deep.get(name, {}).get(what), args.most_layers) for what in ("device", "process"))
        rows.append([name, *times, *sizes, *layers, differs(one, found.get(BASE, {})), one["note"]])
    show(header, rows)


def at_most(layers: int | None, most: int) -> str:
    """The depth in words."""
    if layers is None:
        return ""
    return f"{layers}, the most tried" if layers == most else str(layers)


def differs(one: dict[str, Any], base: dict[str, Any]) -> str:
    """The largest share by which the losses of the steps differ from those in core."""
    if not one["trains"] or "losses" not in base:
        return ""
    gap = max(abs(a - b) / abs(b) for a, b in zip(one["losses"], base["losses"], strict=True))
    return f"{gap:.1e}" if gap else "0"


if __name__ == "__main__":
    main()
