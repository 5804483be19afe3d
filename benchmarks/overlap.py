"""Distance of a relay from its roofline behind a slow link, and how much of it `ahead=1` gains over `ahead=0`.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --rounds 5 --stash device

A GPT-2 with untied embeddings and a byte vocabulary, fused AdamW, emulated device. Steps without link limits give the
seconds of compute and of the EPS; then each direction gets the bandwidth at which its copies take a given share of
compute (0.5 and 0.9) in the phase where they take the largest. Every round runs all sides in turn, and compares each step
with the roofline made from the compute of the same round. On a machine that others use, compute itself differs from step
to step by more than what is measured here; "own compute" takes each step's own instead, and shows the waiting alone.

The bars of the project: step / roofline at most 1.10, gain at least 0.8. By default one thread computes and the other
cores are left to copies and updates, which on a real machine do not take compute's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from _common import alternate, make_batch, make_gpt2, report, spread
from _common import show as table

from l2l_core import EmulatedDevice, Relay, RelayConfig, StepResult
from l2l_core.analysis import PHASES, Roofline, roofline

SHARES = (0.5, 0.9)  # of compute, taken by copies
FREE = "free"
GAIN = "gain / roofline's gain"
LANES = ("h2d", "d2h")


class Side:
    """A relay on a link; remembers its steps."""

    def __init__(self, relay: Relay, device: EmulatedDevice, batch: Mapping[str, torch.Tensor]) -> None:
        self.relay, self.device, self.batch = relay, device, batch
        self.steps: dict[str, list[StepResult]] = {}

    def run(self, link: str, figures: Mapping[str, float | None]) -> None:
        """One step with these bandwidths."""
        self.device.bytes_per_s = {lane: figures.get(f"{lane}_bytes_per_s") for lane in LANES}
        self.steps.setdefault(link, []).append(self.relay.step(self.batch))


def slowest_link(free: Iterable[StepResult], share: float) -> dict[str, float]:
    """Bandwidths at which copies take `share` of compute in the phase where they take the largest share."""
    lines = [roofline(step.trace) for step in free]
    nbytes = roofline(next(iter(free)).trace, dict.fromkeys((f"{lane}_bytes_per_s" for lane in LANES), 1.0)).busy_s
    figures = {}
    for lane in LANES:
        rates = (
            nbytes[phase][lane] / (share * statistics.median(line.busy_s[phase]["compute"] for line in lines))
            for phase in ("forward", "backward")
        )
        figures[f"{lane}_bytes_per_s"] = max(rates)
    return figures


def compare(ahead: Side, serial: Side, link: str, figures: Mapping[str, float]) -> dict[str, Any]:
    """Both sides on one link, against the rooflines made from the steps without limits of the same rounds."""
    lines = [roofline(step.trace, figures) for step in ahead.steps[FREE]]
    serial_s = [
        in_a_row(line, roofline(step.trace, figures)) for line, step in zip(lines, serial.steps[FREE], strict=True)
    ]
    mine, other = ahead.steps[link], serial.steps[link]
    gains = [
        (b.seconds - a.seconds) / (whole_s - line.step_s)
        for a, b, line, whole_s in zip(mine, other, lines, serial_s, strict=True)
    ]
    return {
        "link": {lane: figures[f"{lane}_bytes_per_s"] for lane in LANES},
        "step_s": {"ahead=1": spread(s.seconds for s in mine), "ahead=0": spread(s.seconds for s in other)},
        "roofline_s": spread(line.step_s for line in lines),
        "roofline_by_visit_s": spread(line.by_visit_s for line in lines),
        "serial_roofline_s": spread(serial_s),
        "step / roofline": spread(s.seconds / line.step_s for s, line in zip(mine, lines, strict=True)),
        GAIN: spread(gains),
        "own compute": {
            "step / roofline": spread(s.seconds / roofline(s.trace, figures).step_s for s in mine),
            GAIN: spread(
                (waiting_s(b) - waiting_s(a)) / (whole_s - line.step_s)
                for a, b, line, whole_s in zip(mine, other, lines, serial_s, strict=True)
            ),
        },
        "overlap": {"ahead=1": spread(s.trace.overlap() for s in mine)["median"]}
        | {"ahead=0": spread(s.trace.overlap() for s in other)["median"]},
        "exposed_s": {lane: spread(s.trace.exposed_s(lane) for s in mine)["median"] for lane in (*LANES, "eps")},
        "eps_s": spread(s.trace.busy_s("eps") for s in mine)["median"],
        "phases": phases(mine, lines),
        "bound_by": {
            "ahead=1": [str(bound) for bound in middle(mine).trace.bound_by()],
            "ahead=0": [str(bound) for bound in middle(other).trace.bound_by()],
        },
    }


def in_a_row(line: Roofline, serial: Roofline) -> float:
    """Seconds of all the work with `ahead=0`: its own copies, but compute and EPS of the same step as the roofline's."""
    return line.serial_s + sum(serial.busy_s[p][lane] - line.busy_s[p][lane] for p in PHASES for lane in LANES)


def waiting_s(step: StepResult) -> float:
    """Seconds of a step in which compute did not work."""
    return step.seconds - step.trace.busy_s("compute")


def middle(steps: list[StepResult]) -> StepResult:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def phases(steps: list[StepResult], lines: list[Roofline]) -> dict[str, dict[str, float]]:
    """Median seconds of each phase, what the roofline gives it, and its compute on this link and without limits."""
    least = {
        "fill": [line.fill_s for line in lines],
        "forward": [line.forward_s for line in lines],
        "backward": [line.backward_s for line in lines],
        "tail": [line.tail_s for line in lines],
    }
    table = {}
    for phase, least_s in least.items():
        found = [bound for step in steps for bound in step.trace.bound_by() if bound.phase == phase]
        table[phase] = {
            "span_s": statistics.median(bound.span_s for bound in found),
            "roofline_s": statistics.median(least_s),
            "compute_s": statistics.median(bound.busy_s["compute"] for bound in found),
            "compute_free_s": statistics.median(line.busy_s[phase]["compute"] for line in lines),
        }
    return table


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """The results as a table and sentences."""
    header = ["stash, link", "ahead=1 s", "ahead=0 s", "roofline s", "step/roofline", "gain/possible", "own compute"]
    rows = []
    for name, one in results.items():
        ratio, gain, own = one["step / roofline"], one[GAIN], one["own compute"]
        seconds = (one["step_s"]["ahead=1"], one["step_s"]["ahead=0"], one["roofline_s"])
        rows.append(
            [
                name,
                *(value["median"] for value in seconds),
                *(f"{r['median']:.2f} ({r['min']:.2f}-{r['max']:.2f})" for r in (ratio, gain)),
                f"{own['step / roofline']['median']:.2f}, {own[GAIN]['median']:.2f}",
                f"{one['overlap']['ahead=1']:.1%}",
                *(one["exposed_s"][lane] for lane in LANES),
            ]
        )
    table([*header, "overlap", *(f"{lane} exposed s" for lane in LANES)], rows)
    for name, one in results.items():
        for side, sentences in one["bound_by"].items():
            print(f"\n{name}, {side}")
            print("\n".join(f"  {sentence}" for sentence in sentences))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=3, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, torch.get_num_threads() - 1), help="of compute")
    parser.add_argument("--stash", nargs="+", default=["device", "host"], choices=["device", "host"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    batch = make_batch(args.rows * args.micro_batches, args.length)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    sides: dict[tuple[str, int], Side] = {}
    runs: dict[str, Callable[[], None]] = {}
    links: dict[tuple[str, float], dict[str, float]] = {}
    with ExitStack() as stack:
        for stash in args.stash:
            for ahead in (1, 0):
                device = EmulatedDevice()
                config = RelayConfig(micro_batches=args.micro_batches, stash=stash, ahead=ahead)
                # tied embeddings would be pushed once per micro-batch
                model = make_gpt2(args.layers, args.width, args.length, tie_word_embeddings=False)
                relay = stack.enter_context(Relay(model, optimizer, device, config=config))
                side = sides[stash, ahead] = Side(relay, device, batch)
                for _ in range(4):  # the first one is metered, the second still warms up
                    side.run(FREE, {})
            free = sides[stash, 1].steps[FREE][2:]
            for share in SHARES:
                links[stash, share] = slowest_link(free, share)
            for ahead in (1, 0):
                side = sides[stash, ahead]
                side.steps.clear()
                runs[f"{stash} {ahead} {FREE}"] = partial(side.run, FREE, {})
                for share in SHARES:
                    runs[f"{stash} {ahead} {share}"] = partial(side.run, str(share), links[stash, share])
        alternate(runs, args.rounds, warmup=0)
    results = {
        f"{stash}, link {share}": compare(sides[stash, 1], sides[stash, 0], str(share), figures)
        for (stash, share), figures in links.items()
    }
    report("overlap", {"settings": vars(args), "results": results})
    show(results)


if __name__ == "__main__":
    main()
