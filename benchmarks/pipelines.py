"""Seconds of a pipeline's step by memory per rank, where each stage keeps, recomputes or offloads: simulated, or run small.

    python benchmarks/pipelines.py
    python benchmarks/pipelines.py --run 2
    python benchmarks/pipelines.py --layers 96 --width 8192 --host-link 50e9

1F1B over ranks with equal layers of a transformer: matrix products of 24 s h^2 (1 + s / 6h) operations per forward, s tokens per
micro-batch and width h, twice that per backward; records of 34 bytes per element of a layer's input, the input 2 of them
(Korthikanti et al., arXiv 2205.05198); 16 bytes of weights, gradients and optimizer state per weight. Columns: recompute alone by
Rotor, offload alone, and both (`treat_pipeline`).
"""

from __future__ import annotations

import argparse
import copy
import itertools
from dataclasses import replace

import torch
from _common import make_batch, make_gpt2, report, show, threads

from l2l_core import DeviceOutOfMemory, EmulatedDevice
from l2l_core.model import KVCaches, accumulate
from l2l_core.parallel import PipelineJob, RankPool, run_pipeline
from l2l_core.pipelines import RankSpeeds, one_forward_one_backward, simulate_pipeline
from l2l_core.strategies import Lab, stage_chain, treat_pipeline
from l2l_core.strategies.rotor import Chain

WAYS = {"recompute (Rotor)": "KR", "offload": "KO", "both": "KROH"}


def chain_of(layers: int, width: int, tokens: int, flop_per_s: float) -> Chain:
    """The layers of the model: seconds and bytes of one micro-batch."""
    seconds = 24 * tokens * width**2 * (1 + tokens / (6 * width)) / flop_per_s
    record, boundary = 34 * tokens * width, 2 * tokens * width
    boundaries, records, none = (boundary,) * (layers + 1), (record,) * layers, (0,) * layers
    forward, backward = (seconds,) * layers, (2 * seconds,) * layers
    return Chain(boundaries, records, forward, forward, backward, records, none, none)


def run_small(ranks: int, micro_batches: int = 4) -> None:
    """Train a small GPT-2 in a pipeline under shares of the memory that keeping everything takes."""
    model, batch = make_gpt2(8, 64, 64), make_batch(2 * micro_batches, 64)
    device = EmulatedDevice(d2h_bytes_per_s=2e9, h2d_bytes_per_s=2e9)
    lab = Lab(model, batch, device=device, micro_batches=micro_batches)
    job = PipelineJob.of(model, batch, micro_batches)
    layers, plan = len(lab.layers), one_forward_one_backward(ranks, micro_batches)
    bounds = [*(i * layers // ranks for i in range(ranks)), layers + 1]
    chains = [stage_chain(lab.cost_model.chain(), *pair) for pair in itertools.pairwise(bounds)]
    speeds = RankSpeeds(host_bytes_per_s=2e9)
    plain = copy.deepcopy(model)
    with threads(1), KVCaches(plain).disabled():
        accumulate(
            plain, job.micro_batches, job.objective, job.divisors, [job.seed_of(0, k) for k in range(micro_batches)]
        )
    right = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    kept = treat_pipeline(plan, chains, 1 << 60, speeds, [0] * ranks, "K")
    rows = []
    with RankPool(ranks) as pool:
        for share in (1.0, 0.7, 0.5, 0.35):
            budget = int(share * max(kept.simulation.peak_bytes))
            for name, letters in WAYS.items():
                try:
                    found = treat_pipeline(plan, chains, budget, speeds, [0] * ranks, "K" if share == 1 else letters)
                except DeviceOutOfMemory:
                    rows.append([f"{share:.0%}", name, "does not fit", "", "", "", ""])
                    continue
                operations = [each.operations for each in found.treatments]
                run = run_pipeline(job, plan, pool=pool, treatments=operations, steps=2)
                again = run_pipeline(job, plan, pool=pool, treatments=operations)
                equal = all(torch.equal(right[name], grad) for name, grad in again.gradients.items())
                costs = [replace(each.cost, forward_extra_bytes=0, backward_extra_bytes=0) for each in found.treatments]
                foreseen = max(simulate_pipeline(plan, costs, speeds).peak_bytes)
                held, host = max(each.held_bytes for each in run.ranks), sum(each.host_bytes for each in run.ranks)
                label = "keep" if share == 1 else name
                treated = " ".join(each.name for each in found.treatments)
                row = [
                    f"{share:.0%}",
                    label,
                    treated,
                    f"{foreseen / 1e6:.2f}",
                    f"{held / 1e6:.2f}",
                    f"{host / 1e6:.2f}",
                ]
                rows.append([*row, "yes" if equal else "no"])
                print(*rows[-1], flush=True)
                if share == 1:
                    break
    header = ["budget", "way", "layers", "foreseen MB", "metered MB", "MB on hosts", "equal"]
    show(header, rows)
    report("pipelines_run", {"ranks": ranks, "rows": [dict(zip(header, row, strict=True)) for row in rows]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 48), ("width", 4096), ("tokens", 2048), ("ranks", 8), ("micro-batches", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--flop-per-s", type=float, default=150e12)
    parser.add_argument("--host-link", type=float, default=12e9, help="bytes per second between a rank and its host")
    parser.add_argument("--gb", type=float, nargs="+", default=[10, 8, 6, 4, 3, 2, 1], help="per rank, beyond weights")
    parser.add_argument("--run", type=int, metavar="RANKS", help="train a small model over so many processes instead")
    args = parser.parse_args()
    if args.run:
        run_small(args.run)
        return
    chain, ranks = chain_of(args.layers, args.width, args.tokens, args.flop_per_s), args.ranks
    chains = [stage_chain(chain, i * args.layers // ranks, (i + 1) * args.layers // ranks) for i in range(ranks)]
    weights = 16 * 12 * args.width**2 * args.layers // ranks
    plan, speeds = one_forward_one_backward(ranks, args.micro_batches), RankSpeeds(host_bytes_per_s=args.host_link)
    rows = []
    for gb in args.gb:
        row = [f"{gb:g}"]
        for letters in WAYS.values():
            try:
                found = treat_pipeline(plan, chains, int(weights + gb * 1e9), speeds, [weights] * ranks, letters)
                row.append(f"{found.simulation.seconds:.2f}")
            except DeviceOutOfMemory:
                row.append("does not fit")
        rows.append(row)
    header = ["GB beyond weights", *WAYS]
    show(header, rows)
    most = treat_pipeline(plan, chains, 1 << 60, speeds, [weights] * ranks, "K").simulation
    print(
        f"without a limit {most.seconds:.2f} s; weights, gradients and optimizer state {weights / 1e9:.1f} GB per rank"
    )
    table = [dict(zip(header, row, strict=True)) for row in rows]
    report("pipelines", {"settings": vars(args), "unlimited_s": most.seconds, "rows": table})


if __name__ == "__main__":
    main()
