"""The demo, `make demo`: a 24-layer GPT over bytes trained by relay on a device that cannot hold it.

The text is the source of Python's standard library, so nothing is downloaded. The first steps also run in core, from the
same weights and random streams, and are compared bit by bit. The exit status is 0 only if they are equal and, in a full
run, the held-out loss has reached its target.

All figures are of an emulated device: computation on this CPU, with the device's memory counted.
"""

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import Device, DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig, StepResult, TornStep
from l2l_core.devices import resolve_device
from workbench.lessons.corpus import Corpus, byte_entropy, draw_windows, load_corpus
from workbench.lessons.demo_charts import (
    draw_run,
    format_run,
    format_table,
    format_tradeoff,
    format_verdicts,
    introduction,
    reference_losses,
    summarize,
    verdicts_of,
)
from workbench.lessons.demo_options import settings_from_args
from workbench.lessons.demo_values import Batch, DemoRun, DemoStep, Settings, StepComparison
from workbench.lessons.plain_training import PlainTrainer
from workbench.runs import Recorder, load_run, write_report
from workbench.session import LOSS, HeldOutRow, StepRow, snapshot_of, step_row

RECORD_FILE, REPORT_FILE = "run.jsonl.gz", "report.html"
_LINE_EVERY_S = 10.0  # in a log, where there is no progress bar


def main(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if equal and on target, 1 if not, 2 if it could not start."""
    began_s = time.perf_counter()
    try:
        settings = settings_from_args(args)
        device = make_device(args.device, settings)
        corpus = load_corpus()
        args.out.mkdir(parents=True, exist_ok=True)  # an error is raised before minutes of training
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    with single_thread():
        model = make_model(settings)
        print(introduction(settings, corpus, device, count_params(model)), flush=True)
        title = f"{settings.layers}-layer byte-level GPT, trained by relay"
        try:
            with Recorder(args.out / RECORD_FILE, title=title, overwrite=True) as recorder:
                run = train(model, corpus, settings, device, recorder)
                for name, words in verdicts_of(run, not args.quick).items():
                    recorder.log_fact(name, words)
        except (DeviceOutOfMemory, TornStep) as error:
            print(f"\n{error.__cause__ or error}\nOr give the demo a larger --budget.", file=sys.stderr)
            return 1
    checked = not args.quick
    seconds = time.perf_counter() - began_s
    print(f"\n{format_tradeoff(run)}\n\nIn detail\n{format_run(run)}\n\n{format_verdicts(run, checked)}\n")
    print(write_outputs(run, args.out, summarize(run, checked, seconds)))
    print(f"\n{seconds:.0f} s in all\nReport: {args.out / REPORT_FILE}")
    return 0 if run.equal and (run.reached_target or not checked) else 1


# Model and data -----------------------------------------------------------------------------------------------------


def make_device(name: str, settings: Settings) -> Device:
    """Return the device for the option `--device`."""
    return EmulatedDevice(memory_bytes=settings.budget_bytes) if name == "emulated" else resolve_device(name)


@contextmanager
def single_thread() -> Iterator[None]:
    """Limit compute to one core, by relay and in core; copies and updates of the relay have separate threads.

    Matrices this small gain nothing from a second core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_model(settings: Settings) -> GPT2LMHeadModel:
    """Make an untrained GPT over bytes."""
    config = GPT2Config(
        vocab_size=256,
        bos_token_id=None,
        eos_token_id=None,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        initializer_range=0.8
        / settings.width**0.5,  # 0.02 suits GPT-2's width of 768; narrow models learn slowly from it
        resid_pdrop=0.0,  # no byte is used twice, so there is nothing to regularise
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=settings.tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default of transformers, set here to avoid its warning
    return model.train()


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Make an AdamW with weight decay for matrices only."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, settings: Settings) -> LambdaLR:
    """Make a schedule of a linear warm-up, times a half cosine that ends at a tenth."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / settings.warm_up) * (
            0.55 + 0.45 * math.cos(math.pi * min(1.0, step / settings.steps))
        )

    return LambdaLR(optimizer, factor)


def draw_batch(text: torch.Tensor, settings: Settings, generator: torch.Generator) -> Batch:
    """Draw a batch of windows of a text; the labels are the windows themselves."""
    windows = draw_windows(text, settings.rows, settings.context, generator)  # (rows, context)
    return {"input_ids": windows, "labels": windows}


# The run -------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, corpus: Corpus, settings: Settings, device: Device, recorder: Recorder) -> DemoRun:
    """Train by relay, with the first steps in core as well and with regular evaluations, and record the run.

    Raises:
        DeviceOutOfMemory, TornStep: the budget is too small even for the relay.
    """
    config = RelayConfig(
        micro_batches=settings.micro_batches, stash="host", ahead=1, update="eager", seed=settings.seed
    )
    judged = torch.Generator().manual_seed(settings.seed + 1)
    judged_settings = replace(settings, rows=settings.judged_rows)  # larger batches: no graphs, so no more memory
    held_out_batches = [draw_batch(corpus.held_out, judged_settings, judged) for _ in range(settings.judged_batches)]
    drawn = torch.Generator().manual_seed(settings.seed)
    start_in_core = partial(
        PlainTrainer,
        model,
        partial(make_optimizer, settings=settings),
        partial(make_schedule, settings=settings),
        config,
        device.torch_device,
    )
    in_core_bytes = start_in_core().measure_peak_bytes(draw_batch(corpus.train, settings, judged))
    in_core = start_in_core()  # a new one: the measurement trained the first for two steps
    entropy = byte_entropy(corpus.held_out)
    for name, level in reference_losses(entropy, settings.target):
        recorder.log_level(name, level)
    steps: list[DemoStep] = []
    rows: list[StepRow] = []
    compared: list[StepComparison] = []
    peak_bytes = 0
    with Relay(model, make_optimizer(model, settings), device=device, config=config) as relay:
        schedule = make_schedule(relay.optimizer, settings)
        for step in show_progress(settings.steps, steps):
            batch = draw_batch(corpus.train, settings, drawn)
            if step <= settings.compared:
                result, one = compare_step(relay, in_core, batch)
                compared.append(one)
            else:
                result = relay.step(batch)
            rows.append(step_row(relay, result))
            recorder.watch(snapshot_of(relay, rows, in_core_bytes))
            rate = float(schedule.get_last_lr()[0])
            schedule.step()
            is_time = step % settings.judged_every == 0 or step == settings.steps
            held_out = statistics.fmean(map(relay.evaluate, held_out_batches)) if is_time else None
            if held_out is not None:
                recorder.log_held_out(HeldOutRow(step, {LOSS: held_out}))
            steps.append(DemoStep(step, result.loss, held_out, rate, result.seconds))
            peak_bytes = max(peak_bytes, result.peak_device_bytes)
        return DemoRun(
            settings=settings,
            device=device.name,
            exact=device.torch_device.type == "cpu",
            budget_bytes=device.ledger.limit_bytes,
            num_params=count_params(model),
            entropy=entropy,
            steps=tuple(steps),
            compared=tuple(compared),
            relay_device_bytes=peak_bytes,
            in_core_device_bytes=in_core_bytes,
            relay_host_bytes=relay.host.peak,
            last_trace=result.trace,
        )


def compare_step(relay: Relay, in_core: PlainTrainer, batch: Batch) -> tuple[StepResult, StepComparison]:
    """Run the same step in core and by relay, and return the relay's result with the comparison."""
    began_s = time.perf_counter()
    in_core_loss = in_core.step(batch)
    in_core_s = time.perf_counter() - began_s
    result = relay.step(batch)
    pairs = [(a.detach(), b.detach().cpu()) for a, b in zip(*map(_params, (relay.model, in_core.model)), strict=True)]
    # compared as integers, so that every bit counts
    unequal = sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs)
    max_abs_diff = max(float((a - b).abs().max()) for a, b in pairs)
    return result, StepComparison(
        relay.steps, result.loss, in_core_loss, unequal, max_abs_diff, result.seconds, in_core_s
    )


def _params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def count_params(model: nn.Module) -> int:
    """Return the number of weights."""
    return sum(param.numel() for param in model.parameters())


def show_progress(steps: int, done: Sequence[DemoStep]) -> Iterator[int]:
    """Yield step numbers from 1, with the last losses of `done` in a progress bar or a log."""
    if not sys.stderr.isatty():
        yield from _print_progress(steps, done)
        return
    with tqdm(total=steps, desc="training", unit="step", mininterval=0.2, dynamic_ncols=True) as bar:
        for step in range(1, steps + 1):
            yield step
            bar.set_postfix_str(_last_losses(done), refresh=False)
            bar.update()


def _print_progress(steps: int, done: Sequence[DemoStep]) -> Iterator[int]:
    began_s = printed_s = time.monotonic()
    for step in range(1, steps + 1):
        yield step
        now_s = time.monotonic()
        if now_s - printed_s >= _LINE_EVERY_S or step == steps:
            left_s = (now_s - began_s) / step * (steps - step)
            print(f"step {step} of {steps}: {_last_losses(done)}; {left_s:.0f} s left", file=sys.stderr, flush=True)
            printed_s = now_s


def _last_losses(done: Sequence[DemoStep]) -> str:
    held_out = [one.held_out for one in done if one.held_out is not None]
    return f"loss {done[-1].loss:.2f}" + (f", held out {held_out[-1]:.2f}" if held_out else "")


# Output files -------------------------------------------------------------------------------------------------------


def write_outputs(run: DemoRun, folder: Path, summary: Mapping[str, Any]) -> str:
    """Write all files into `folder`; return a list of them with a description of each."""
    run.last_trace.to_chrome(folder / "trace.json")
    run.last_trace.to_jsonl(folder / "trace.jsonl")
    run.last_trace.to_memory_snapshot(folder / "trace.pickle")
    with (folder / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [field.name for field in fields(DemoStep)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(step) for step in run.steps)  # None becomes an empty cell
    (folder / "loss.svg").write_text(draw_run(run), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_report([load_run(folder / RECORD_FILE)], folder / REPORT_FILE)
    where = format_table(
        [
            (f"{folder / REPORT_FILE}", "everything at a glance: open it in a browser"),
            (f"{folder / RECORD_FILE}", "the recorded run, for `python -m workbench replay`"),
            (f"{folder / 'trace.json'}", "the last step: open https://ui.perfetto.dev and drop the file on the page"),
            (f"{folder / 'trace.jsonl'}", "the same for Trace.from_jsonl"),
            (f"{folder / 'trace.pickle'}", "its memory: drop it on https://pytorch.org/memory_viz"),
            (f"{folder / 'loss.svg'}", "the loss curve, for a browser"),
            (f"{folder / 'loss.csv'}", "its numbers"),
            (f"{folder / 'summary.json'}", "everything measured"),
        ]
    )
    return f"Written:\n{where}"
