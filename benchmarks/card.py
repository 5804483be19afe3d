"""Fifteen figures that matter, measured on this machine in about 20 minutes, as one page: docs/BENCH_CARD.md.

    make bench-card
    python benchmarks/card.py              the same
    python benchmarks/card.py --again      measure all anew; otherwise what ended well on this machine is kept
    python benchmarks/card.py --readme     and copy the figures into README.md, where they are marked
    python benchmarks/card.py --only depth step_time    only these; the page keeps the others

Each figure is read from a benchmark of this folder, which runs as a command: only their choice is made here. Ratios are of two
sides that ran in turn in one process. The page has a section per machine: that of this machine is replaced, the others stay. With
a GPU the section has the rows of `gpu_day.py` too. Run it alone: other work makes seconds longer and spreads wider.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_day
import torch
from _common import spread
from _steps import ROOT, Outcome, Step, machine, read_outcome, run_steps

PAGE = ROOT / "docs" / "BENCH_CARD.md"
README = ROOT / "README.md"
OUT = ROOT / "out" / "card"
MARK = r"([\d.]+)(<!--card:(\w+)-->)"  # a figure of the card in README.md
HEAD = """# Bench card

The figures that matter, as `make bench-card` measures them: in about 20 minutes on two idle cores, by the commands in the last
column ([BENCHMARKS.md](BENCHMARKS.md) has what else was measured, and how). Each machine has a section. A ratio is the median of
pairs that ran in turn in one process, beside the least and the most of them. Compare ratios, not seconds.
"""

Found = Mapping[str, Any]  # what a benchmark reported


@dataclass(frozen=True)
class Figure:
    """A row of the card.

    Attributes:
        name: by which README.md refers to it.
        text: what it is, with its unit.
        step: names the benchmark that has it.
        read: gives median, min and max, as `spread` does.
        goal: what the project aims at; empty without one.
    """

    name: str
    text: str
    step: str
    read: Callable[[Found], dict[str, float]]
    goal: str = ""


STEPS = (
    Step("depth", ("benchmarks/depth.py", "--depths", "12", "384", "--micro-batches", "1", "32", "--rounds", "1"), 400),
    Step("step_time", ("benchmarks/step_time.py", "--precision", "bf16", "--rounds", "3"), 600),
    Step("everything_fits", ("benchmarks/step_time.py", "--keep", "--rounds", "3"), 400),
    Step(
        "small_layers",
        tuple("benchmarks/step_time.py --layers 24 --width 64 --dropout 0 --rounds 11".split()),
        300,
        {"OMP_NUM_THREADS": "1"},
    ),
    Step("overlap", ("benchmarks/overlap.py", "--stash", "host", "--rounds", "3"), 400),
    Step("disk", ("benchmarks/disk.py", "--rows", "16", "--steps", "4"), 300),
    Step("forecast", ("benchmarks/forecast.py", "--layers", "3", "--pairs", "3", "--threads", "1"), 500),
    Step(
        "bits",
        tuple("benchmarks/bits.py --layers 2 --rounds 3 --steps 1 --seeds 2 --text-layers 1".split()),
        300,
    ),
    Step("edits", ("benchmarks/edits.py", "--layers", "200"), 300),
    Step("ui_cost", ("benchmarks/ui_cost.py", "--rounds", "2", "--requests", "40"), 400),
    Step("import_time", ("benchmarks/import_time.py",), 200),
)


def one(value: float) -> dict[str, float]:
    """A figure that was counted, not timed."""
    return spread([value])


def peak(found: Found, side: str) -> float:
    """Device bytes of the deepest model."""
    return found["by_depth"][max(found["by_depth"], key=int)]["peaks"][side]


FIGURES = (
    Figure(
        "flat",
        "peak device bytes: 384 layers over 12, or 32 micro-batches over 1, the larger of both",
        "depth",
        lambda found: one(max(found["peak_ratio_in_depth"], found["peak_ratio_in_micro_batches"])),
        "1",
    ),
    Figure(
        "saved",
        "peak device bytes of 384 layers: in core over relay",
        "depth",
        lambda found: one(peak(found, "in core") / peak(found, "host")),
    ),
    Figure(
        "host_bytes",
        "host bytes per parameter with AdamW, by the ledger",
        "depth",
        lambda found: one(found["host"]["ledger"]),
        "at most 16",
    ),
    Figure(
        "step",
        "step, 12 x 768, float32: relay over in core with recompute",
        "step_time",
        lambda found: found["ratios"]["relay fp32 / in core fp32"],
        "at most 1",
    ),
    Figure(
        "step_bf16",
        "the same in bfloat16",
        "step_time",
        lambda found: found["ratios"]["relay bf16 / in core bf16"],
        "at most 1",
    ),
    Figure(
        "everything_fits",
        "step where all stays on the device, 12 x 768: relay over plain accumulation",
        "everything_fits",
        lambda found: found["ratios"]["relay fp32 / in core fp32"],
        "at most 1.03",
    ),
    Figure(
        "small_layers",
        "step, 24 x 64, one thread: relay over in core with recompute",
        "small_layers",
        lambda found: found["ratios"]["relay fp32 / in core fp32"],
        "at most 1.1",
    ),
    Figure(
        "roofline",
        "step behind a link that is busy for 0.9 of compute, stash on the host: over its roofline",
        "overlap",
        lambda found: found["results"]["host, link 0.9"]["step / roofline"],
        "at most 1.1",
    ),
    Figure(
        "hidden",
        "share of the copies' time that is hidden under compute there",
        "overlap",
        lambda found: one(found["results"]["host, link 0.9"]["overlap"]["ahead=1"]),
    ),
    Figure(
        "disk",
        "step of 20 M parameters in files: over the busy time of the lane that binds",
        "disk",
        lambda found: spread(step["over_roofline"] for step in found["steps"][1:]),
    ),
    Figure(
        "forecast",
        "seconds of a step, forecast before any step ran: share by which it errs, over 16 configurations",
        "forecast",
        lambda found: spread(abs(row["before"]) for row in found["rows"]),
        "at most 0.1",
    ),
    Figure(
        "bits",
        "bytes of weights and AdamW's state per parameter, `in_bf16`",
        "bits",
        lambda found: one(found["bytes"]["bf16"]["ledger"]),
        "8",
    ),
    Figure(
        "edit",
        "processor ms of inserting an identity layer among 200, after the first",
        "edits",
        lambda found: {name: 1e3 * s for name, s in found["edits"]["Insert identity"]["later_s"].items()},
        "at most 50",
    ),
    Figure(
        "watching",
        "step that a workbench draws, demo's model: over one that it does not",
        "ui_cost",
        lambda found: next(iter(found["steps"].values()))["ratio"],
        "at most 1.03",
    ),
    Figure(
        "import_s",
        "processor seconds that `import l2l_core` adds to `import torch`",
        "import_time",
        lambda found: one(found["added_s"]),
        "at most 0.3",
    ),
)


def row(figure: Figure, step: Step, outcome: Outcome | None) -> str:
    """A line of the table; a benchmark that reported nothing says so in place of the figure."""
    command = f"`{step}`"
    if outcome is None or outcome.record is None:
        why = "not yet measured" if outcome is None else f"not measured: ended {outcome.ended}"
        return f"| `{figure.name}` | {figure.text} | {why} | | {figure.goal} | {command} |"
    found = figure.read(outcome.record)
    median, least, most = (f"{found[name]:.3g}" for name in ("median", "min", "max"))
    between = "" if least == most else f"{least} to {most}"
    if outcome.ended != "well":  # import_time.py above its bar, for one, reports and ends with 1
        command += f", which ended {outcome.ended}"
    return f"| `{figure.name}` | {figure.text} | **{median}** | {between} | {figure.goal} | {command} |"


def section(outcomes: Mapping[str, Outcome], steps: Iterable[Step], figures: Iterable[Figure]) -> str:
    """This machine's part of the page."""
    commands = {step.name: step for step in steps}
    here = machine()
    loads = [load for outcome in outcomes.values() for load in outcome.load]
    busy = statistics.median(loads)
    told = f"Load while it ran: {busy:.1f} (median; {min(loads):.1f} to {max(loads):.1f})"
    if busy > torch.get_num_threads() + 1:
        told += ", so **other work ran beside it**: seconds are too long and spreads too wide; run it again alone"
    minutes = sum(outcome.seconds for outcome in outcomes.values()) / 60
    lines = [f"{here['versions']}. {time.strftime('%Y-%m-%d')}, {minutes:.0f} minutes. {told}.", ""]
    lines += ["| name | figure | median | least to most | goal | command |", "|---|---|---|---|---|---|"]
    lines += [row(figure, commands[figure.step], outcomes.get(figure.step)) for figure in figures]
    return f"## {here['hardware']}\n\n" + "\n".join(lines) + "\n"


def replace_section(page: str, new: str) -> str:
    """Put a section in the place of that of the same machine, or behind the others."""
    sections = re.split(r"(?m)^(?=## )", page)[1:]
    heading = new.partition("\n")[0]
    others = [each for each in sections if each.partition("\n")[0] != heading]
    place = next((i for i, each in enumerate(sections) if each.partition("\n")[0] == heading), len(others))
    return "\n".join(part.strip("\n") + "\n" for part in [HEAD, *others[:place], new, *others[place:]])


def values(page: str) -> dict[str, str]:
    """Medians by name, of the first machine on the page: those that README.md shows."""
    first = (re.split(r"(?m)^## ", page) + ["", ""])[1]
    return dict(re.findall(r"^\| `(\w+)` \|[^|]*\| \*\*([^*]+)\*\* \|", first, flags=re.MULTILINE))


def main() -> int:
    """Measure, write the page; 1 if a benchmark did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--readme", action="store_true", help="copy the figures of the first machine into README.md")
    parser.add_argument("--only", nargs="+", default=[step.name for step in STEPS + gpu_day.SPEED], metavar="STEP")
    parser.add_argument("--patience", type=float, default=1, help="times the time limits, for a busy machine")
    parser.add_argument("--out", type=Path, default=OUT, help="where results are kept")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    steps, figures = STEPS, FIGURES
    if torch.cuda.is_available():
        steps, figures = steps + gpu_day.SPEED, figures + tuple(Figure(*each) for each in gpu_day.FIGURES)
    chosen = [replace(step, limit_s=args.patience * step.limit_s) for step in steps if step.name in args.only]
    outcomes = run_steps(chosen, args.out, again=args.again)
    here = machine()
    for step in steps:
        kept = read_outcome(step, args.out)
        if step.name not in outcomes and kept is not None and kept.machine == here:
            outcomes[step.name] = kept
    page = args.page.read_text(encoding="utf-8") if args.page.is_file() else ""
    page = replace_section(page, section(outcomes, steps, figures))
    args.page.write_text(page, encoding="utf-8")
    print(f"\n{page}\n{args.page}")
    if args.readme:
        known = values(page)
        text = re.sub(MARK, lambda found: known.get(found[3], found[1]) + found[2], README.read_text(encoding="utf-8"))
        README.write_text(text, encoding="utf-8")
    return int(any(outcome.ended != "well" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
