"""Ways to train over several ranks: run on gloo by torch's own libraries, bytes at the sockets beside closed formulas.

    python benchmarks/parallel.py
    python benchmarks/parallel.py --ranks 4
    python benchmarks/parallel.py --ranks 8 --ways "3D, 2 x 2 x 2"

A small model in float64, four steps of AdamW; every way begins with the same weights and rows. "difference" is the largest of a
weight from plain training on all rows. Gloo on a CPU shows numerics and bytes, not speed.
"""

from __future__ import annotations

import argparse

from _common import report, show

from l2l_core.parallel import WAYS, ParallelRun, RankError, RankPool, run_parallel
from l2l_core.pipelines import MEGATRON_ROWS, state_bytes

ZERO_FIGURE = {"plain": 120.0, "ZeRO 1": 31.4, "ZeRO 2": 16.6, "ZeRO 3": 1.9}  # GB per rank, arXiv 1910.02054


def zero_bytes(parameters: float, ranks: int) -> dict[str, float]:
    """Return bytes per rank of weights and gradients in 16 bits, and AdamW in float32, sharded in stages."""
    return {name: sum(state_bytes(parameters, ranks, zero).values()) for zero, name in enumerate(ZERO_FIGURE)}


def row_of(run: ParallelRun) -> list[str]:
    """Return a row of the table."""
    wire = (f"{nbytes:,.0f}" for nbytes in (run.sent_bytes, run.formula_bytes, run.gloo_bytes))
    held = (f"{nbytes / run.model_bytes:.2f}" for nbytes in (run.weight_bytes, run.state_bytes))
    return [run.way, f"{run.difference:.1e}", *wire, *held]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="default: all that this number of ranks can run")
    args = parser.parse_args()
    args.ways = args.ways or [name for name, way in WAYS.items() if way.ranks in (None, args.ranks)]
    rows = []
    pool = RankPool(args.ranks)
    for way in args.ways:
        try:
            rows.append(row_of(run_parallel(way, args.ranks, pool=pool)))
        except RankError as error:
            rows.append([way, "failed", *[""] * 5])
            print(way, error)
            pool = RankPool(args.ranks)
        print(*rows[-1], flush=True)
    pool.close()
    header = [
        "way",
        "difference",
        "bytes sent per rank",
        "formula",
        "gloo's, with headers",
        "weights",
        "state per rank",
    ]
    show(header, rows)
    zero = zero_bytes(7.5e9, 64)
    figure = [[name, f"{zero[name] / 1e9:.1f}", f"{right:g}"] for name, right in ZERO_FIGURE.items()]
    show(["7.5 B parameters, 64 ranks", "GB per rank", "paper"], figure)
    sizes = []
    for row in MEGATRON_ROWS:
        found, right = row.simulated_teraflop_per_s(), row.teraflop_per_s
        by_formula = row.shape.parameters / 1e9
        sizes.append(
            [f"{row.billions:g}", f"{by_formula:.1f}", f"{right:g}", f"{found:.0f}", f"{found / right - 1:+.0%}"]
        )
    show(["billions of parameters", "by formula", "TFLOP/s per GPU", "simulated", "error"], sizes)
    table = [dict(zip(header, row, strict=False)) for row in rows]
    report("parallel", {"settings": vars(args), "rows": table, "zero": zero, "megatron": sizes})


if __name__ == "__main__":
    main()
