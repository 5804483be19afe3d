"""Cost of the workbench: steps with and without drawing, and the response time of a kernel.

    python benchmarks/ui_cost.py
    python benchmarks/ui_cost.py --rounds 8
    python benchmarks/ui_cost.py --quick

Steps: a block with a `Workbench` on a page between two with a `Session` alone, again and again, on the same relay. There
is no browser: every panel is drawn into its widget, and the widgets' messages go nowhere. Two models, both on one core
with the stash on the host behind a link of 100 MB/s: the demo's, and a GPT-2 of 12 layers, 256 wide. A step should take
at most 1.03 times as long as the mean of those around it. How the two blocks that are alone compare with each other shows
the machine's noise; drawing's share of a core is counted, and is the most that it can take from other work.

Answers: a real kernel trains, and receives `1+1` again and again, until the result arrives as a page would get it.
95 of 100 answers should take at most 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from functools import partial
from io import StringIO
from subprocess import DEVNULL
from typing import Any

import torch
from _common import make_batch, make_gpt2, ratio, report, show, spread, threads
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from l2l_core import EmulatedDevice, Relay, RelayConfig
from workbench.app import Workbench
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer
from workbench.lessons.demo_values import Settings
from workbench.panels.refresh_loop import RefreshLoop
from workbench.session import Session

LINK_BYTES_PER_S = 100e6
CONFIG = RelayConfig(micro_batches=4, stash="host")
TARGETS = {"ratio": 1.03, "p95_ms": 50.0}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of three blocks, per model")
    parser.add_argument("--block-s", type=float, default=3.0, help="seconds of a block, about")
    parser.add_argument("--requests", type=int, default=200, help="to the kernel, per state")
    parser.add_argument("--quick", action="store_true", help="two short rounds and few requests: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.block_s, args.requests = 2, 1.5, 20

    steps = {}
    for name, relay, batch in models():
        with relay:
            steps[name] = measure_steps(relay, batch, args)
    show_steps(steps)
    answers = measure_answers(args.requests)
    show(
        ("kernel that", "requests", "p50, ms", "p95, ms", "max, ms"),
        [(state, len(ms), *quantiles(ms).values()) for state, ms in answers.items()],
    )
    answered = {state: quantiles(ms) for state, ms in answers.items()}
    verdicts = {name: judge_steps(found) for name, found in steps.items()}
    verdicts["answers"] = judge_answers(answered)
    print(f"targets {TARGETS}: " + ", ".join(f"{name}: {verdict}" for name, verdict in verdicts.items()))
    results = {"settings": vars(args), "targets": TARGETS, "verdicts": verdicts, "steps": steps, "answers": answered}
    report("ui_cost", results)


def judge_steps(found: dict[str, Any]) -> str:
    """Whether the target was met, if blocks that are alone are near enough to each other to decide."""
    if found["noise"]["median"] > TARGETS["ratio"]:
        return "not distinguishable from noise"
    return "within" if found["ratio"]["median"] <= TARGETS["ratio"] else "missed"


def judge_answers(answered: dict[str, dict[str, float]]) -> str:
    """Whether the target was met, and whether it is drawing that misses it."""
    late = [state for state, found in answered.items() if found["p95_ms"] > TARGETS["p95_ms"]]
    if "trains and draws" not in late:
        return "within"
    return "missed without drawing too" if "trains" in late else "missed"


# -- steps -------------------------------------------------------------------------------------------------------------


def models() -> Iterator[tuple[str, Relay, Any]]:
    """Name, relay and batch of each model."""
    text, generator = load_corpus().train, torch.Generator().manual_seed(0)
    settings = Settings()
    demo = make_model(settings)
    yield (
        f"demo, {settings.layers} x {settings.width}",
        Relay(demo, make_optimizer(demo, settings), make_device(settings.budget_bytes), config=CONFIG),
        draw_batch(text, settings, generator),
    )
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    yield "GPT-2, 12 x 256", Relay(make_gpt2(12, 256, 64), optimizer, make_device(), config=CONFIG), make_batch(8, 64)


def make_device(budget_bytes: int | None = None) -> EmulatedDevice:
    """A device behind the link."""
    return EmulatedDevice(budget_bytes, LINK_BYTES_PER_S, LINK_BYTES_PER_S)


def measure_steps(relay: Relay, batch: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Blocks of steps with the workbench between blocks without it."""
    with threads(1):
        with Session(relay, [batch]) as session:  # metered, and warm
            session.run(2)
            step_s = session.wait().steps[-1].seconds
        steps = max(2, round(args.block_s / step_s))
        drawing = Drawing()
        sides = {
            "before": lambda: Session(relay, [batch]),
            "looking": lambda: looking(relay, batch, drawing),
            "after": lambda: Session(relay, [batch]),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.rounds):
            for side, opened in sides.items():
                with opened() as session:
                    session.run(steps)
                    seconds[side].append(statistics.fmean(row.seconds for row in session.wait().steps))
    seconds["alone"] = [(a + b) / 2 for a, b in zip(seconds["before"], seconds["after"], strict=True)]
    return {
        "steps_per_block": steps,
        "step_s": {side: spread(seconds[side]) for side in ("alone", "looking")},
        "ratio": ratio(seconds, "looking", "alone"),
        "noise": spread(max(a / b, b / a) for a, b in zip(seconds["before"], seconds["after"], strict=True)),
        **drawing.figures(),
    }


class Drawing:
    """Return the processor time of drawing, over all blocks."""

    def __init__(self) -> None:
        self.frames, self.busy_s, self.wall_s = 0, 0.0, 0.0
        self.panel_s: dict[str, float] = defaultdict(float)
        self.shown: dict[str, int] = defaultdict(int)

    def timed(self, name: str, draw: Callable[..., None]) -> Callable[..., None]:
        """The same function, timed in processor seconds of its thread."""

        def call(now: Any) -> None:
            began_s = time.thread_time()
            draw(now)
            self.panel_s[name] += time.thread_time() - began_s
            self.shown[name] += 1

        return call

    def figures(self) -> dict[str, Any]:
        """Rates and costs."""
        return {
            "frames_per_s": self.frames / self.wall_s,
            "frame_ms": 1e3 * self.busy_s / self.frames,
            "share_of_a_core": self.busy_s / self.wall_s,
            "panel_ms": {name: 1e3 * total_s / self.shown[name] for name, total_s in self.panel_s.items()},
        }


@contextmanager
def looking(relay: Relay, batch: Any, drawing: Drawing) -> Iterator[Session]:
    """A workbench that is drawn as on a page."""
    bench = Workbench(relay, [batch])
    for panel in bench.panels:
        panel.show = drawing.timed(type(panel).__name__, panel.show)  # type: ignore[method-assign]
    with redirect_stdout(StringIO()):  # where there is no page, the text view is printed
        bench._ipython_display_()
    pump, began_s = RefreshLoop.for_session(bench.session), time.perf_counter()
    try:
        yield bench.session
    finally:
        drawing.frames += pump.frames
        drawing.busy_s += pump.busy_s
        drawing.wall_s += time.perf_counter() - began_s
        bench.close()
        pump.join()


def show_steps(steps: dict[str, dict[str, Any]]) -> None:
    """Three tables."""
    show(
        ("model", "steps per block", "step alone, ms", "looking / alone", "min", "max", "alone / alone", "max"),
        [
            (
                name,
                found["steps_per_block"],
                1e3 * found["step_s"]["alone"]["median"],
                *found["ratio"].values(),
                found["noise"]["median"],
                found["noise"]["max"],
            )
            for name, found in steps.items()
        ],
    )
    show(
        ("model", "frames per s", "processor ms per frame", "share of a core"),
        [(name, r["frames_per_s"], r["frame_ms"], f"{r['share_of_a_core']:.2%}") for name, r in steps.items()],
    )
    panels = list(next(iter(steps.values()))["panel_ms"])
    show(
        ("ms per frame", *steps), [(panel, *(found["panel_ms"][panel] for found in steps.values())) for panel in panels]
    )


# -- answers -----------------------------------------------------------------------------------------------------------

# Run by the kernel, which has the package but not this folder.
PREPARE = f"""
import torch
torch.set_num_threads(1)
from l2l_core import EmulatedDevice, Relay, RelayConfig
from workbench import Session, Workbench
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model, make_optimizer
from workbench.lessons.demo_values import Settings
settings = Settings()
model = make_model(settings)
device = EmulatedDevice(settings.budget_bytes, {LINK_BYTES_PER_S}, {LINK_BYTES_PER_S})
config = RelayConfig(**{asdict(CONFIG)!r})
relay = Relay(model, make_optimizer(model, settings), device, config=config)
batch = draw_batch(load_corpus().train, settings, torch.Generator().manual_seed(0))
"""
TRAIN = """
import time
bench = {kind}(relay, [batch])
if isinstance(bench, Workbench):
    display(bench)
bench.run()
while not bench.snapshot().steps:
    time.sleep(0.05)
"""
KINDS = {"trains": "Session", "trains and draws": "Workbench"}


def measure_answers(requests: int, blocks: int = 2) -> dict[str, list[float]]:
    """Milliseconds of every answer, by what the kernel does meanwhile: nothing, training, training and drawing."""
    ms: dict[str, list[float]] = {"rests": [], **{state: [] for state in KINDS}}
    manager, client = start_new_kernel(startup_timeout=120, kernel_name="python3", stderr=DEVNULL)
    try:
        run_cell(client, PREPARE)
        for _ in range(blocks):
            ms["rests"] += ask(client, requests // blocks)
            for state, kind in KINDS.items():
                run_cell(client, TRAIN.format(kind=kind))
                ms[state] += ask(client, requests // blocks)
                run_cell(client, "bench.close()")
        run_cell(client, "relay.close()")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return ms


def run_cell(client: BlockingKernelClient, code: str) -> None:
    """Run a cell; its error is ours."""
    reply = client.execute_interactive(code, timeout=120, output_hook=lambda _: None)
    if reply["content"]["status"] != "ok":
        raise RuntimeError("\n".join(reply["content"]["traceback"]))


def ask(client: BlockingKernelClient, times: int, pause_s: float = 0.02) -> list[float]:
    """Milliseconds until the result of `1+1` arrives, with pauses in which training continues."""
    taken = []
    for i in range(times):
        time.sleep(pause_s * (0.5 + i % 7 / 6))  # not in step with anything
        began_s = time.perf_counter()
        message = client.execute("1+1")
        while not is_result(client.get_iopub_msg(timeout=60), message):
            pass
        taken.append(1e3 * (time.perf_counter() - began_s))
        client.get_shell_msg(timeout=60)
    return taken


def is_result(message: dict[str, Any], of: str) -> bool:
    """Whether this is what a page shows as the answer."""
    return message["msg_type"] == "execute_result" and message["parent_header"].get("msg_id") == of


def quantiles(ms: Iterable[float]) -> dict[str, float]:
    """Median, 95th percentile, largest."""
    ordered = sorted(ms)
    return {
        "p50_ms": statistics.median(ordered),
        "p95_ms": ordered[int(0.95 * (len(ordered) - 1))],
        "max_ms": ordered[-1],
    }


if __name__ == "__main__":
    main()
