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
from l2l_core.pipelines import StageCost, interleaved, one_forward_one_backward, simulate_pipeline

ZERO_FIGURE = {"plain": 120.0, "ZeRO 1": 31.4, "ZeRO 2": 16.6, "ZeRO 3": 1.9}  # GB per rank, arXiv 1910.02054


def zero_bytes(parameters: float, ranks: int) -> dict[str, float]:
    """Return bytes per rank of weights and gradients in float16, and AdamW in float32 (12 bytes), sharded in stages."""
    per = {"plain": 16.0, "ZeRO 1": 4 + 12 / ranks, "ZeRO 2": 2 + 14 / ranks, "ZeRO 3": 16 / ranks}
    return {name: parameters * nbytes for name, nbytes in per.items()}


# Megatron-LM's table (arXiv 2104.04473): parameters / 1e9, width, layers, model-parallel ranks, GPUs, rows, TFLOP/s per GPU.
MEGATRON = [
    (1.7, 2304, 24, 1, 32, 512, 137),
    (3.6, 3072, 30, 2, 64, 512, 138),
    (7.5, 4096, 36, 4, 128, 512, 142),
    (18.4, 6144, 40, 8, 256, 1024, 135),
    (39.1, 8192, 48, 16, 512, 1536, 138),
    (76.1, 10240, 60, 32, 1024, 1792, 140),
    (145.6, 12288, 80, 64, 1536, 2304, 148),
    (310.1, 16384, 96, 128, 1920, 2160, 155),
    (529.6, 20480, 105, 280, 2520, 2520, 163),
    (1008.0, 25600, 128, 512, 3072, 3072, 163),
]
VOCABULARY, TOKENS, PEAK_FLOP_PER_S = 51_200, 2_048, 312e12
EFFICIENCY, NVLINK = (
    0.53,
    200e9,
)  # of matrix products; bytes per second of an all-reduce within a node: two figures for all rows


def simulated_megatron(width: int, layers: int, ranks: int, gpus: int, rows: int) -> tuple[float, float]:
    """Return billions of parameters, and TFLOP/s per GPU.

    Tensor parallel within a node of 8; over nodes a pipeline, interleaved with 2 stages per rank. One row per micro-batch, full
    recompute, and two all-reduces of activations per layer in each of F, R and B. Updates and the all-reduce of gradients take
    no time.
    """
    h, tensor = width, min(8, ranks)
    p, m, v = ranks // tensor, rows * ranks // gpus, 2 if ranks > 8 else 1
    parameters = 12 * layers * h**2 * (1 + 13 / (12 * h) + (VOCABULARY + TOKENS) / (12 * layers * h))
    flop = (
        96 * TOKENS * layers * h**2 * (1 + TOKENS / (6 * h) + VOCABULARY / (16 * layers * h))
    )  # of a row, with recompute
    compute_s = flop / 4 / ranks / (PEAK_FLOP_PER_S * EFFICIENCY) / v
    reduce_s = 2 * 2 * TOKENS * h * 2 * (tensor - 1) / tensor / NVLINK * layers / p / v
    cost = StageCost(forward_s=compute_s + reduce_s, backward_s=3 * compute_s + 2 * reduce_s)
    plan = interleaved(p, m, v) if p > 1 else one_forward_one_backward(p, m)
    return parameters / 1e9, flop * rows / gpus / simulate_pipeline(plan, cost).seconds / 1e12


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
    for billions, *setting, teraflop in MEGATRON:
        parameters, found = simulated_megatron(*setting)
        sizes.append(
            [f"{billions:g}", f"{parameters:.1f}", f"{teraflop:g}", f"{found:.0f}", f"{found / teraflop - 1:+.0%}"]
        )
    show(["billions of parameters", "by formula", "TFLOP/s per GPU", "simulated", "error"], sizes)
    table = [dict(zip(header, row, strict=False)) for row in rows]
    report("parallel", {"settings": vars(args), "rows": table, "zero": zero, "megatron": sizes})


if __name__ == "__main__":
    main()
