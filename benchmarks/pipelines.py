"""Seconds of a pipeline's step by memory per rank, where each stage keeps, recomputes or offloads: simulated, none is run.

    python benchmarks/pipelines.py
    python benchmarks/pipelines.py --layers 96 --width 8192 --host-link 50e9

1F1B over ranks with equal layers of a transformer: matrix products of 24 s h^2 (1 + s / 6h) operations per forward, s tokens per
micro-batch and width h, twice that per backward; records of 34 bytes per element of a layer's input, the input 2 of them
(Korthikanti et al., arXiv 2205.05198); 16 bytes of weights, gradients and optimizer state per weight. Columns: recompute alone by
Rotor, offload alone, and both (`treat_pipeline`).
"""

from __future__ import annotations

import argparse

from _common import report, show

from l2l_core import DeviceOutOfMemory
from l2l_core.pipelines import RankSpeeds, one_forward_one_backward
from l2l_core.strategies import stage_chain, treat_pipeline
from l2l_core.strategies.rotor import Chain

WAYS = {"recompute (Rotor)": "KR", "offload": "KO", "both": "KROH"}


def chain_of(layers: int, width: int, tokens: int, flop_per_s: float) -> Chain:
    """The layers of the model: seconds and bytes of one micro-batch."""
    seconds = 24 * tokens * width**2 * (1 + tokens / (6 * width)) / flop_per_s
    record, boundary = 34 * tokens * width, 2 * tokens * width
    boundaries, records, none = (boundary,) * (layers + 1), (record,) * layers, (0,) * layers
    forward, backward = (seconds,) * layers, (2 * seconds,) * layers
    return Chain(boundaries, records, forward, forward, backward, records, none, none)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 48), ("width", 4096), ("tokens", 2048), ("ranks", 8), ("micro-batches", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--flop-per-s", type=float, default=150e12)
    parser.add_argument("--host-link", type=float, default=12e9, help="bytes per second between a rank and its host")
    parser.add_argument("--gb", type=float, nargs="+", default=[10, 8, 6, 4, 3, 2, 1], help="per rank, beyond weights")
    args = parser.parse_args()
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
