"""A model that does not fit into memory, trained from files: seconds of a step, bytes over the disk, and the limiting lane.

    python benchmarks/disk.py                                     (20 million parameters, about a minute)
    python benchmarks/disk.py --params 2e9 --cap "6 GB" --rows 4 --length 128 --steps 2

Weights and AdamW state of a GPT are made in files and stay there; two halves take 24 bytes per parameter of the disk. If that
much is not free, the largest model that fits is taken instead, with a note. The folder is deleted at the end.

Training runs in a process that the operating system caps (RLIMIT_DATA): its heap and its private writable mappings, so all that
tensors take, stacks of threads included. Not counted are code, files that are mapped to be read, and the page cache, which files
opened with O_DIRECT go past. Text is the sources of Python's standard library, as bytes.

The busy time of a lane is compared with the step: if the disk binds, it is busy all the time, and the step takes as long as
its bytes. Before it, a model that fits is trained both ways, and the bits are compared.

With several numbers of rows, the last step of the first one gives figures of machine and disk, from which later ones are
forecast (`_disk_forecast.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import make_gpt2, peak_resident_bytes, report, show
from _disk_forecast import Foreteller, said

from l2l_core import EmulatedDevice, FileShelf, Relay, RelayConfig, Trace, empty_weights
from l2l_core.config import parse_bytes
from l2l_core.trace import DISK_LANES, LANES, format_bytes
from workbench.lessons.corpus import load_corpus

DISK_BYTES_PER_PARAM = 24  # weights and two moments in float32, and as much again for the other half
SPARED = 0.1  # of the free disk, for others
FITS = 2_000_000  # parameters of the model whose bits are compared

make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def shape_of(params: float) -> tuple[int, int]:
    """Width and depth of a GPT of about so many parameters: 12 width^2 a layer, and 25 times as wide as deep."""
    width = max(64, round((params * 25 / 12) ** (1 / 3) / 64) * 64)
    return width, max(2, round(params / (12 * width**2)))


def initialise(name: str, into: torch.Tensor) -> None:
    """Give a parameter values that depend on its name alone."""
    if into.dim() == 1:
        into.fill_(1.0 if name.endswith("weight") else 0.0)
        return
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    into.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))


def batches(rows: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Windows of real text, in a separate order: (rows, length)."""
    text, generator = load_corpus().train, torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
        tokens = torch.stack([text[start : start + length] for start in starts]).long()
        yield {"input_ids": tokens, "labels": tokens}


@contextmanager
def relay_of(params: float, length: int, config: RelayConfig, shelf: FileShelf | None) -> Iterator[Relay]:
    """Make the model, from files or in memory, with the same weights."""
    width, depth = shape_of(params)
    if shelf is not None:
        with empty_weights():
            model = make_gpt2(depth, width, length, dropout=0.0)
    else:
        model = make_gpt2(depth, width, length, dropout=0.0)
        with torch.no_grad():
            for name, param in model.named_parameters():
                initialise(name, param)
    with Relay(model, make_optimizer, EmulatedDevice(), config=config, shelf=shelf) as relay:
        yield relay


def fingerprint(relay: Relay) -> str:
    """Checksum of all weights, by name."""
    weights = relay.shelf.weights() if relay.shelf is not None else relay.model.named_parameters()
    sums = {name: hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest() for name, t in weights}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def is_equal(folder: Path, length: int, config: RelayConfig) -> bool:
    """Train a model that fits both ways, and compare losses and weights to the bit."""
    sides = []
    for shelf in (None, FileShelf(folder=folder, memory_bytes="200 MB", weights=initialise)):
        with relay_of(FITS, length, config, shelf) as relay:
            losses = [relay.step(batch).loss for batch, _ in zip(batches(4, length), range(3), strict=False)]
            sides.append((losses, fingerprint(relay)))
    return sides[0] == sides[1]


# -- in the capped process ---------------------------------------------------------------------------------------------


def measured(trace: Trace, seconds: float) -> dict[str, Any]:
    """Seconds and bytes of each lane."""
    lanes = {
        lane: {
            "busy_s": trace.busy_s(lane),
            "exposed_s": trace.exposed_s(lane),
            "bytes": sum(event.nbytes for event in trace.lanes[lane]),
        }
        for lane in (*LANES, *DISK_LANES)
    }
    busiest = max(lanes, key=lambda lane: lanes[lane]["busy_s"])
    return {"seconds": seconds, "lanes": lanes, "binds": busiest, "over_roofline": seconds / lanes[busiest]["busy_s"]}


def train(params: float, length: int, rows: list[int], steps: int, micro_batches: int, pool: str, folder: str) -> None:
    """Train from files; prints what was measured as JSON."""
    config = RelayConfig(micro_batches=micro_batches, stash="host")
    began_s = time.perf_counter()
    shelf = FileShelf(folder=folder, memory_bytes=pool, weights=initialise)
    with relay_of(params, length, config, shelf) as relay:
        made_s, done = time.perf_counter() - began_s, []
        foreteller = Foreteller(relay.model.config, make_optimizer, config, pool, length)
        for count in rows:
            for batch, _ in zip(batches(count, length), range(steps), strict=False):
                result = relay.step(batch)
                entry = {"tokens": count * length, "loss": result.loss, **measured(result.trace, result.seconds)}
                entry["host_peak_bytes"] = result.trace.peak_bytes("host")
                entry["forecast"] = foreteller.tell(count, result.seconds, entry["lanes"])
                done.append(entry)
                print(f"step {len(done)}: {result.seconds:.1f} s, loss {result.loss:.4f}", file=sys.stderr, flush=True)
            if count == rows[0]:
                foreteller.learn(count, done[-1]["lanes"])
        told = {
            "params": sum(unit.num_params for unit in (relay.shell, *relay.stack)),
            "layers": len(relay.stack),
            "mode": result.trace.settings["shelf"],
            "made_s": made_s,
            "on_disk_bytes": sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()),
            "resident_peak_bytes": peak_resident_bytes(),
            "steps": done,
        }
    print(json.dumps(told))


# -- outside of it -----------------------------------------------------------------------------------------------------


def show_all(told: dict[str, Any]) -> None:
    """Print the results."""
    print(
        f"{told['params']:,} parameters in {told['layers']} layers, {told['mode']} I/O; made in {told['made_s']:.1f} s; "
        f"{format_bytes(told['on_disk_bytes'])} on disk, {format_bytes(told['resident_peak_bytes'])} resident at most\n"
    )
    for number, step in enumerate(told["steps"], start=1):
        print(
            f"step {number}: {step['tokens']} tokens, {step['seconds']:.2f} s, loss {step['loss']:.4f}, host ledger "
            f"{format_bytes(step['host_peak_bytes'])}; {step['binds']} binds, and the step takes {step['over_roofline']:.2f} "
            "times as long"
        )
        if step["forecast"] is not None:
            print(said(step["forecast"]))
        rows = [
            (
                lane,
                s["busy_s"],
                s["exposed_s"],
                s["bytes"] / 1e6,
                s["bytes"] / s["busy_s"] / 1e6 if s["busy_s"] else 0.0,
            )
            for lane, s in step["lanes"].items()
        ]
        show(("lane", "busy s", "exposed s", "MB", "MB/s while busy"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--params", type=float, default=2e7, help="of the model; fewer where the disk is too small")
    parser.add_argument("--cap", default="3 GB", help="of the process that trains")
    parser.add_argument("--pool", help="memory_bytes of the shelf; default a quarter of the cap")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[4, 16], help="of a batch; several are tried one after another"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=2, help="with each number of rows")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to use; default here")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what to do in the capped process
    args = parser.parse_args()
    if args.child:
        told = json.loads(args.child)
        resource.setrlimit(resource.RLIMIT_DATA, (told.pop("cap"),) * 2)
        train(**told)
        return
    fits = shutil.disk_usage(args.folder).free * (1 - SPARED) / DISK_BYTES_PER_PARAM
    params = min(args.params, fits)
    if params < args.params:
        print(f"{args.params:,.0f} parameters do not fit on the disk: {params:,.0f} do, and are taken")
    cap = parse_bytes(args.cap, "--cap")
    folder = Path(tempfile.mkdtemp(prefix="shelf-", dir=args.folder))
    try:
        config = RelayConfig(micro_batches=args.micro_batches, stash="host")
        equal = is_equal(folder / "fits", args.length, config)
        print(f"{FITS:,} parameters, from files and from memory: bits {'equal' if equal else 'DIFFER'}")
        asked = {
            "params": params,
            "length": args.length,
            "rows": args.rows,
            "steps": args.steps,
            "micro_batches": args.micro_batches,
            "pool": args.pool or f"{cap // 4} B",
            "folder": str(folder / "large"),
            "cap": cap,
        }
        command = [sys.executable, __file__, "--child", json.dumps(asked)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the capped process has ended with {done.returncode}: see above")
        told = json.loads(done.stdout.splitlines()[-1])
        show_all(told)
        report("disk", {"asked": asked, "equal": equal, **told})
        if not equal:
            raise SystemExit("bits differ")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
