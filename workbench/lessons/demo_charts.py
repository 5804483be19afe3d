"""Texts and pictures of a run of the demo: gain and cost, tables, verdicts, loss curve.

Pure functions from results to text.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from l2l_core import Device
from l2l_core.trace import format_bytes
from workbench.lessons.corpus import Corpus
from workbench.lessons.demo_values import DemoRun, Settings
from workbench.pictures import draw_loss

BYTES_PER_PARAM = 16  # in core: float32 weight, gradient and AdamW's two moments


# Text -----------------------------------------------------------------------------------------------------------------


def introduction(settings: Settings, corpus: Corpus, device: Device, num_params: int) -> str:
    """Describe the run that is about to start."""
    train, held_out = format_bytes(len(corpus.train)), format_bytes(len(corpus.held_out))
    budget = "" if device.ledger.limit_bytes else "no memory budget; "
    lead = [
        "A GPT learns Python, byte by byte. By relay, one layer at a time is on the device; the others wait on the host.",
        f"Steps 1 to {settings.compared} also run in core, with all layers on the device, and are compared bit by bit.",
    ]
    rows = [
        ("model", f"{settings.layers} layers of width {settings.width}, {num_params:,} weights"),
        ("device", f"{device.name}; {budget}the weights alone are {format_bytes(4 * num_params)}"),
        ("text", f"sources of Python {platform.python_version()}'s standard library, {corpus.files} files:"),
        ("", f"{train} to train on, {held_out} of other files held out"),
        ("batch", f"{settings.rows} windows of {settings.context} bytes, in {settings.micro_batches} micro-batches"),
        ("training", f"{settings.steps} steps"),
    ]
    return "\n".join([*lead, "", format_table(rows), ""])


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as aligned text; the last cell of a row is not padded."""
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def format_tradeoff(run: DemoRun) -> str:
    """Describe the gains and costs of training by relay."""
    relay, in_core = run.relay_device_bytes, run.in_core_device_bytes
    needs = f"{format_bytes(relay)}; in core needs {format_bytes(in_core)}, {in_core / relay:.1f} times as much"
    relay_s, in_core_s = run.median_step_s("relay"), run.median_step_s("in_core")
    pace = f"a step takes {relay_s / in_core_s:.1f} times as long as in core, {1e3 * relay_s:.0f} ms"
    host = f"{format_bytes(run.relay_host_bytes)} for weights, AdamW's state and stash; in core needs none"
    gain = [("device memory", needs), ("", _budget_verdict(run)), ("same training", _describe_equality(run))]
    cost = [("time", f"{pace} instead of {1e3 * in_core_s:.0f} ms"), ("host memory", host)]
    lines = format_table([(f"  {name}", words) for name, words in gain + cost]).splitlines()
    return "\n".join(["Gains by relay", *lines[: len(gain)], "Costs", *lines[len(gain) :]])


def _describe_equality(run: DemoRun) -> str:
    if not run.equal:
        return "NO: relay and in core DIFFER, see below"
    steps = f"steps 1 to {len(run.compared)}"
    if not run.exact:
        return f"losses of {steps} agree with those in core to {run.settings.close:g}"
    return f"losses and weights of {steps} have the same bits as in core"


def format_run(run: DemoRun) -> str:
    """Format the table of relay against in core."""
    rows = [(run.device, "relay", "in core", "")]
    for one in run.compared:
        verdict = "equal" if one.relay_loss == one.in_core_loss else "DIFFERENT"
        rows.append((f"loss of step {one.step}", f"{one.relay_loss:.9g}", f"{one.in_core_loss:.9g}", verdict))
    relay_s, in_core_s = run.median_step_s("relay"), run.median_step_s("in_core")
    device_bytes = [format_bytes(nbytes) for nbytes in (run.relay_device_bytes, run.in_core_device_bytes)]
    rows += [
        (
            f"weights after step {len(run.compared)}",
            f"{run.num_params:,}",
            f"{run.num_params:,}",
            _weights_verdict(run),
        ),
        ("peak device memory", *device_bytes, _budget_verdict(run)),
        ("peak host memory", format_bytes(run.relay_host_bytes), "0 B", "by relay: weights, AdamW's state, stash"),
        ("time of a step", f"{1e3 * relay_s:.0f} ms", f"{1e3 * in_core_s:.0f} ms", f"x {relay_s / in_core_s:.2f}"),
        ("copies under compute", f"{run.last_trace.overlap():.0%}", "", "share of their time, last step"),
    ]
    state = format_bytes(BYTES_PER_PARAM * run.num_params)
    notes = [
        "Device memory is the peak of all storages on the device. Of the bytes in core,",
        f"{state} are weights, gradients and AdamW's state, the rest activations. Times: median of the compared",
        "steps but the first, the two in turn on one core. In backward the relay runs layers forward once more, and",
        "switching between layers takes about as long as the compute of such small layers: larger ones pay less.",
    ]
    return "\n".join([format_table(rows), "", *notes])


def _weights_verdict(run: DemoRun) -> str:
    unequal = sum(one.unequal_weights for one in run.compared)
    if not unequal:
        return "equal to the bit, as after each step before"
    diff = max(one.max_abs_diff for one in run.compared)
    return f"{'DIFFERENT' if run.exact else 'not bitwise equal'}: {unequal:,} in all steps, by up to {diff:.3g}"


def _budget_verdict(run: DemoRun) -> str:
    if run.budget_bytes is None:
        return "no budget"
    budget, times = format_bytes(run.budget_bytes), run.in_core_device_bytes / run.budget_bytes
    if times <= 1:
        return f"both fit into the budget of {budget}: try a smaller --budget"
    return f"in core is OUT OF MEMORY: {times:.1f} x the budget of {budget}"


def format_verdicts(run: DemoRun, checked: bool) -> str:
    """Format the verdicts on equality and on the held-out loss; `checked` is False if no target applies."""
    return f"{_equality_verdict(run)}\n{_loss_verdict(run, checked)}"


def verdicts_of(run: DemoRun, checked: bool) -> dict[str, str]:
    """Return the verdicts by subject, for the record of the run."""
    device_bytes = [format_bytes(nbytes) for nbytes in (run.relay_device_bytes, run.in_core_device_bytes)]
    relay_s, in_core_s = run.median_step_s("relay"), run.median_step_s("in_core")
    verdicts = {"equality": _equality_verdict(run), "learning": _loss_verdict(run, checked)}
    facts = {name: _with_sign(" ".join(words.split())) for name, words in verdicts.items()}
    facts["device memory"] = f"{device_bytes[0]} by relay, {device_bytes[1]} in core; {_budget_verdict(run)}"
    facts["time"] = (
        f"a step takes {1e3 * relay_s:.0f} ms by relay and {1e3 * in_core_s:.0f} ms in core, x {relay_s / in_core_s:.2f}; "
        "median of the steps compared"
    )
    return facts


def _with_sign(verdict: str) -> str:
    kind, _, words = verdict.partition(" ")
    return f"{_SIGNS[kind]} {words}".strip()


_SIGNS = {"ok": "✓", "FAILED": "✕", "-": ""}


def reference_losses(entropy: float, target: float) -> list[tuple[str, float]]:
    """Return losses to compare with: names and nats per byte."""
    return [("entropy of single bytes, held-out text", entropy), (f"target, {target:g} of it", target * entropy)]


def _equality_verdict(run: DemoRun) -> str:
    different = [str(one.step) for one in run.compared if not run.is_equal(one)]
    if different:
        return (
            f"FAILED  relay and in core DIFFER after step {', '.join(different)} but must be equal: please report this"
        )
    if not run.exact:
        return (
            f"ok      losses of relay and in core agree to {run.settings.close:g}, relative; bits agree only on a CPU"
        )
    return f"ok      steps 1 to {len(run.compared)} by relay and in core gave equal losses and weights, bit by bit"


def _loss_verdict(run: DemoRun, checked: bool) -> str:
    result = (
        f"held-out loss {run.held_out:.3f} nats per byte = {run.share_of_entropy:.3f} of the entropy of single bytes, "
        f"{run.entropy:.3f}"
    )
    target = f"target: at most {run.settings.target:g} of it"
    if not checked:
        return f"-       {result}\n        ({target}, not checked: --quick trains too little)"
    if run.reached_target:
        return f"ok      {result}\n        ({target})"
    return f"FAILED  {result}\n        ({target}; more --steps may reach it)"


def draw_run(run: DemoRun) -> str:
    """Draw the loss curve as SVG."""
    return draw_loss(
        run.steps,
        title=f"{run.settings.layers}-layer byte-level GPT, trained by relay",
        unit="nats per byte",
        held_out=[(one.step, one.held_out) for one in run.steps if one.held_out is not None],
        levels=reference_losses(run.entropy, run.settings.target),
    )


def summarize(run: DemoRun, checked: bool, seconds: float) -> dict[str, Any]:
    """Return all measurements as JSON values; sizes in bytes, times in seconds, losses in nats per byte."""
    return {
        "settings": asdict(run.settings),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "cores": os.cpu_count(),
        },
        "device": run.device,
        "budget_bytes": run.budget_bytes,
        "num_params": run.num_params,
        "equal": run.equal,
        "compared": [asdict(one) for one in run.compared],
        "peak_device_bytes": {"relay": run.relay_device_bytes, "in_core": run.in_core_device_bytes},
        "peak_host_bytes": {"relay": run.relay_host_bytes, "in_core": 0},
        "in_core_fits": run.budget_bytes is None or run.in_core_device_bytes <= run.budget_bytes,
        "step_s": {"relay": run.median_step_s("relay"), "in_core": run.median_step_s("in_core")},
        "overlap_of_last_step": run.last_trace.overlap(),
        "entropy": run.entropy,
        "held_out_loss": run.held_out,
        "held_out_share": run.share_of_entropy,
        "target_share": run.settings.target,
        "target_reached": run.reached_target if checked else None,
        "seconds": seconds,
    }
