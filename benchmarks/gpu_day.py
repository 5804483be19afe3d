"""The first half hour on a GPU: a plan of 25 minutes, most important first, that ends in one table.

    make gpu-day
    python benchmarks/gpu_day.py            the same; interrupted or run again it goes on with what did not end well
    python benchmarks/gpu_day.py --plan     print the plan: what each step answers, and what to do then
    python benchmarks/gpu_day.py --dry      try every step today, small, on the double of CUDA: it measures nothing
    python benchmarks/gpu_day.py --only equality speed

Every step has a time limit, all limits together are 25 minutes, and results are JSON in out/gpu_day. For the step of 6.7 G
parameters the host needs 110 GB. Peers are measured where they install (`pip install -c constraints.txt -e ".[peers]"`); the
others are rows with their reason.
On a GPU `card.py` adds the rows of the steps in `SPEED` to docs/BENCH_CARD.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import hardware, show, spread
from _steps import ROOT, Outcome, Step, read_outcome, run_steps

OUT = ROOT / "out" / "gpu_day"
GPU = "benchmarks/gpu.py"
LIMIT_S = 25 * 60  # of all steps
SMALL = "--layers 2 --width 64 --rows 4 --length 32 --vocabulary 128 --rounds 1 --device double"
CUDA_TESTS = "tests/core/devices tests/core/integrations/test_lightning.py"
PYTEST = "-m pytest -c pyproject.toml -p no:cacheprovider -p no:benchmark -q -n 0"  # that plugin warns beside xdist


@dataclass(frozen=True)
class Stage:
    """A part of the plan.

    Attributes:
        step: the command on a GPU.
        dry: the same, small, where there is no GPU.
        answers: the question.
        if_well, if_not: what to do then.
    """

    step: Step
    dry: Step
    answers: str
    if_well: str
    if_not: str


def stage(name: str, limit_s: float, command: str, dry: str, answers: str, if_well: str, if_not: str) -> Stage:
    """A stage; `command` and `dry` are split at spaces."""
    return Stage(
        Step(name, tuple(command.split()), limit_s),
        Step(name, tuple(dry.split()), 300),
        answers,
        if_well,
        if_not,
    )


PLAN = (
    stage(
        "doctor",
        60,
        "-m workbench doctor",
        "-m workbench doctor",
        "Does PyTorch see the card, in versions that are allowed?",
        "Go on.",
        "Stop. Install a torch for the driver's CUDA (`nvidia-smi` names it), and start again.",
    ),
    stage(
        "smoke",
        60,
        f"{GPU} --layers 2 --width 64 --rows 4 --length 32 --vocabulary 128 --rounds 1",
        f"{GPU} {SMALL}",
        "Does a relay step run on the card at all, beside training in core?",
        "Go on.",
        "Stop and keep printed.txt: the rest would fail alike. Look at `l2l_core/devices/cuda.py` first.",
    ),
    stage(
        "equality",
        300,
        f"{PYTEST} -n 4 -m cuda {CUDA_TESTS}",
        f"{PYTEST} -k come_as_late tests/core/devices/test_cuda.py",
        "Are steps on the card those of training in core, to the bit with deterministic algorithms, and is memory flat?",
        "Write the count of tests, card and versions into docs/BENCHMARKS.md, On a GPU.",
        "A failure here goes before every figure of speed. Run the test that failed alone, and file it with its output.",
    ),
    stage(
        "speed",
        300,
        f"{GPU} --rounds 3",
        f"{GPU} {SMALL}",
        "How long does a step take over one in core with recompute: BERT-Large and 1.35 G of Llama's shape? How much is hidden?",
        "Below 1.3: the goal is met. Above: read `bound_by` of the record; if eps or h2d binds, more rows per step hide it.",
        "Out of memory in core is a result. Another error: run one model, `--models bert`, with `--rounds 1`.",
    ),
    stage(
        "large_batch",
        150,
        f"{GPU} --models decoder --rows 64 --micro-batches 16 --rounds 1",
        f"{GPU} --models decoder {SMALL}",
        "Does a batch of 64 x 1,024 tokens hide the updates of the EPS?",
        "The ratio should be below that of `speed`. If it is not, updates are not what binds.",
        "Halve `--rows` and `--micro-batches`.",
    ),
    stage(
        "seven_billion",
        300,
        f"{GPU} --models decoder --layers 32 --width 4096 --rows 32 --micro-batches 8 --relay-only --rounds 1",
        f"{GPU} --models decoder --relay-only {SMALL}",
        "TFLOP/s and peak GB of training all of 6.7 G parameters, which need 107 GB in core.",
        "Compare with 200 TFLOP/s and 6.6 GB on an H100. More GB than that is a fault.",
        "Killed or out of host memory: 110 GB are needed; try `--layers 16`.",
    ),
    stage(
        "fit",
        90,
        f"{GPU} --models bert --relay-only --forecast --rounds 1",
        f"{GPU} --models bert --relay-only --forecast {SMALL}",
        "Does a forecast before any step state the bytes and the seconds of the step on the card?",
        "Bytes equal, seconds within 0.1: `relay.fit` may be trusted there.",
        "Bytes that differ are a fault of the forecast; seconds that differ ask for `python -m workbench calibrate` first.",
    ),
    stage(
        "disk",
        90,
        "benchmarks/disk.py --params 1e8 --rows 16 --steps 3",
        "benchmarks/disk.py --params 1e6 --rows 4 --steps 2",
        "How fast are weights and state in files on this machine's disk, and what binds? (On the emulated device.)",
        "The step is within 1.2 of its busiest lane: the disk's bandwidth is the price of a model in files.",
        "Name a folder on the fast disk: `--folder`.",
    ),
    stage(
        "peers",
        150,
        "benchmarks/peers.py --device cuda --width 1024 --layers 12 --cores 8 --rounds 3 --most-layers 0",
        "benchmarks/peers.py --layers 2 --width 64 --length 16 --rounds 1 --most-layers 0",
        "Bytes and seconds beside FSDP2's CPU offload, DeepSpeed ZeRO-Offload and RoundPipe, where they install.",
        "Put the table into docs/BENCHMARKS.md, Peers, and the line on GPUs of docs/PEERS.md.",
        "A peer that fails is a row with its message. If none runs: `pip install -c constraints.txt -e \".[peers]\"`.",
    ),
)  # fmt: skip
SPEED = tuple(each.step for each in PLAN if each.step.name in ("speed", "large_batch", "seven_billion"))

Found = Mapping[str, Any]


def gpu_ratio(model: str) -> Callable[[Found], dict[str, float]]:
    """Read relay over in core."""
    return lambda found: found[model]["ratio"]


# Rows of docs/BENCH_CARD.md on a GPU: name, text, step, how to read it, goal.
FIGURES: tuple[tuple[str, str, str, Callable[[Found], dict[str, float]], str], ...] = (
    ("gpu_bert", "step of BERT-Large on the GPU: relay over in core with recompute", "speed", gpu_ratio("bert"), ""),
    ("gpu_llama", "step of 1.35 G of Llama's shape: the same", "speed", gpu_ratio("decoder"), "at most 1.3"),
    ("gpu_large_batch", "the same with 64 x 1,024 tokens", "large_batch", gpu_ratio("decoder"), "at most 1.3"),
    (
        "gpu_hidden",
        "share of the copies' time that is hidden there",
        "large_batch",
        lambda found: spread([found["decoder"]["relay"]["overlap"]]),
        "",
    ),
    (
        "gpu_7b_tflops",
        "TFLOP/s with 6.7 G parameters, by 6 N",
        "seven_billion",
        lambda found: spread([found["decoder"]["tflop_per_s"]["relay"]]),
        "",
    ),
    (
        "gpu_7b_gb",
        "peak GB of the GPU with 6.7 G parameters, of 107 in core",
        "seven_billion",
        lambda found: spread([found["decoder"]["peak_bytes"]["relay"] / 1e9]),
        "",
    ),
)


def result(outcome: Outcome) -> str:
    """What came out, in one line of the table."""
    record = outcome.record or {}
    if "ways" in record:  # peers
        ran = {way: statistics.median(each["seconds"] for each in took) for way, took in record["seconds"].items()}
        return ", ".join(f"{way} {f'{ran[way]:.3g} s' if way in ran else 'did not run'}" for way in record["ways"])
    if "over_roofline" in str(record):  # disk
        last = record["steps"][-1]
        return f"bits equal: {record['equal']}; {last['binds']} binds, step {last['over_roofline']:.2f} of it"
    parts = []
    for name, found in record.items():
        if not isinstance(found, dict) or "median_s" not in found:
            continue
        words = [f"{side} {s:.3g} s" for side, s in found["median_s"].items()]
        words += [f"ratio {found['ratio']['median']:.2f}"] if isinstance(found["ratio"], dict) else []
        words += [f"{found['tflop_per_s']['relay']:.3g} TFLOP/s", f"{found['peak_bytes']['relay'] / 1e9:.3g} GB"]
        words += [f"hidden {found['relay']['overlap']:.0%}"]
        words += [f"{of} {x:.3f}" for of, x in found["relay"].get("forecast", {}).items()]
        parts.append(f"{name}: {', '.join(words)}")
    if parts:
        return "; ".join(parts)
    counts = [line for line in outcome.tail if re.search(r"\d+ (passed|failed|skipped|deselected)", line)]
    return (counts or outcome.tail or [""])[-1].strip("= ")


def print_plan() -> None:
    """Print each step with its question and what to do with the answer."""
    for number, each in enumerate(PLAN, start=1):
        print(f"{number}. {each.step.name}, at most {each.step.limit_s:.0f} s\n   {each.step}")
        for label, text in (("answers", each.answers), ("if well", each.if_well), ("if not", each.if_not)):
            print(textwrap.fill(text, 120, initial_indent=f"   {label}: ", subsequent_indent="      "))


def main() -> int:
    """Run the plan; 1 if a step did not end well, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print the plan and end")
    parser.add_argument("--dry", action="store_true", help="small, on the double of CUDA")
    parser.add_argument("--again", action="store_true", help="run all anew")
    parser.add_argument("--only", nargs="+", default=[each.step.name for each in PLAN], metavar="STEP")
    parser.add_argument("--out", type=Path, help="where results are kept; default out/gpu_day, or out/gpu_day_dry")
    args = parser.parse_args()
    if args.plan:
        print_plan()
        return 0
    if not args.dry and not torch.cuda.is_available():
        print(f"no CUDA device here ({hardware()}): nothing measured; --dry tries the plan out", file=sys.stderr)
        return 2
    out = args.out or (ROOT / "out" / "gpu_day_dry" if args.dry else OUT)
    rows = []
    for each in PLAN:
        step = each.dry if args.dry else each.step
        if step.name in args.only:
            outcome = run_steps([step], out, again=args.again)[step.name]
        elif (outcome := read_outcome(step, out)) is None:
            continue
        well = outcome.ended == "well"
        then = "on a GPU then: " if args.dry else ""
        print(f"  {result(outcome)}\n  {then}{each.if_well if well else each.if_not}", flush=True)
        rows.append((step.name, outcome.ended, f"{outcome.seconds:.0f}", result(outcome)))
        if not well and each.if_not.startswith("Stop"):
            break
    print("\nTried on the double of CUDA, nothing measured:" if args.dry else f"\n{hardware()}:")
    show(("step", "ended", "s", "result"), rows)
    return int(any(ended != "well" for _, ended, *_ in rows))


if __name__ == "__main__":
    sys.exit(main())
