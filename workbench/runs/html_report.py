"""Report of recorded runs as a self-contained HTML page that is readable without scripts.

The template is in `pages/`. The report of several runs also compares them.
"""

from __future__ import annotations

import hashlib
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined

from l2l_core import Trace
from l2l_core.trace import format_bytes
from workbench.pictures import (
    FIGURE_KINDS,
    Picture,
    draw_loss,
    draw_memory,
    format_count,
    format_seconds,
    held_out_points,
    journal_table,
    layers_table,
    loss_table,
    memory_table,
    relay_frames,
    settings_table,
    show_heat,
    show_timeline,
)
from workbench.readings import Columns
from workbench.runs.recorded_run import RecordedRun, name_runs
from workbench.runs.recorder import Recorder
from workbench.runs.report_sections import (
    changes_table,
    look_section,
    machine_table,
    race_section,
    traced_steps_table,
    workers_section,
)
from workbench.runs.run_comparison import NamedRun, compare_runs
from workbench.runs.run_loader import load_run
from workbench.session import LOSS, Snapshot

Context = dict[str, Any]

GLOSSARY = {
    "layer, shell": "A module that is loaded, run and removed as a unit; everything else of the model is the shell.",
    "micro-batch": "A slice of the batch. In a relay a layer runs all of them before the next layer, so it is loaded once "
    "per pass.",
    "depth first": "The schedule in which every layer stays on the device: a micro-batch runs forward and backward through all "
    "layers before the next one begins. Its phases are the forward of the first micro-batch, which hides loads, the middle, and "
    "the backward of the last one, which hides pushes.",
    "EPS": "The eager param-server: weights, gradients and optimizer state of every layer, in host memory. It updates a layer "
    "as soon as its gradient has arrived, while the device is busy with the next one.",
    "load, push": "Copies of a layer's weights to the device, and of its gradient back to the host.",
    "stash": "Inputs of layers, kept for the backward pass, which recomputes each layer from its input.",
    "overlap, exposed": "The share of copy time that is hidden under compute; the rest is exposed and makes a step longer.",
    "worker, gather, exchange": "One of several processes that train together, each on its own rows. Before a layer is loaded "
    "its parts are gathered from all workers; its gradients are exchanged, and each updates its part.",
    "in core": "Plain training, with the whole model on the device.",
    "probe": "A few fixed batches whose losses are measured, in evaluation mode, before and after an edit. The change is the "
    "mean over the batches, ± its standard deviation over them, of this one run: it is no spread over seeds. ▲ worse and ▼ "
    "better by more than that.",
    "influence": "1 minus the mean cosine similarity of the input and output of a layer: near 0, the layer changes little.",
}


class ScheduleText(NamedTuple):
    """Text of the page about a schedule: for the run, for the device during a step, and for device memory."""

    lead: str
    device: str
    memory: str


SCHEDULE_TEXTS = {
    "breadth_first": ScheduleText(
        "Trained by a layer relay: one layer at a time is on the device, all others are in host memory.",
        "which holds only a few. Each layer is loaded in the order of the algorithm, runs every micro-batch, and is replaced by "
        "the next.",
        "The device needs room for a few layers at a time, independently of the depth of the model.",
    ),
    "depth_first": ScheduleText(
        "Trained depth first: during a step all layers are on the device, between two steps they are in host memory.",
        "which holds all of them. A micro-batch runs forward and backward through all layers before the next one begins. Layers "
        "are loaded during the forward of the first micro-batch; gradients are pushed during the backward of the last one.",
        "The device needs room for the weights and gradients of all layers, and for the graph of one micro-batch.",
    ),
}


class SummaryCard(NamedTuple):
    """A figure at the top of the page."""

    name: str
    value: str
    more: str = ""


def main(paths: Sequence[Path], out: Path | None) -> int:
    """Write the report of recorded runs; return 0, or 2 if a run cannot be read."""
    try:
        runs = [load_run(path) for path in paths]
        destination = out or runs[0].path.parent / ("report.html" if len(runs) == 1 else "comparison.html")
        write_report(runs, destination)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Written: {destination} ({format_bytes(destination.stat().st_size)}); open it in a browser")
    return 0


def write_report(runs: Sequence[RecordedRun], path: str | Path) -> None:
    """Write the report of recorded runs; the folder is created.

    Raises:
        ValueError: `runs` is empty, or a run is damaged.
    """
    text = render_report(runs)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def write_session_report(snapshot: Snapshot, path: str | Path) -> None:
    """Write the report of an open session with its shown step."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "session.jsonl"
        with Recorder(file, title=f"{snapshot.model}, {snapshot.shown_words}") as recorder:
            recorder.watch(snapshot)  # a recording adds machine, versions and time
            for row in snapshot.held_out:
                recorder.log_held_out(row)
            if snapshot.race is not None and snapshot.race.is_over:
                recorder.log_race(snapshot.race)
        run = replace(load_run(file), path=Path("the open session"))
    Path(path).write_text(_render([NamedRun(run.title, snapshot, run)], when="written"), encoding="utf-8")


def render_report(runs: Sequence[RecordedRun]) -> str:
    """Return the report as HTML.

    Raises:
        ValueError: `runs` is empty, or a run is damaged.
    """
    if not runs:
        raise ValueError("runs=[]: a report needs at least one recorded run")
    return _render([NamedRun(name, run.snapshot(), run) for name, run in zip(name_runs(runs), runs, strict=True)])


def _render(named: Sequence[NamedRun], when: str = "began") -> str:
    """Return the page; `when` is the verb for the time of a run."""
    script = f"{page_file('player.js')}playAll(document);\n"
    schedules = {_schedule_of(one.snapshot.last) for one in named if one.snapshot.last is not None}
    return page_template("report.html").render(
        title=named[0].run.title if len(named) == 1 else f"{len(named)} runs side by side",
        lead=SCHEDULE_TEXTS[min(schedules, default="breadth_first")].lead,  # breadth_first if both occur
        style=page_file("player.css") + page_file("report.css"),  # the page overrides
        script=script,
        # The Content-Security-Policy of the page allows only the script with this hash.
        script_hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        comparison=compare_runs(named) if len(named) > 1 else None,
        runs=[_describe_run(one, when) for one in named],
        words=GLOSSARY,
    )


# Values for the template ---------------------------------------------------------------------------------------------


def _describe_run(one: NamedRun, when: str) -> Context:
    now, run = one.snapshot, one.run
    branch = [f"branch {now.branch}"] if len(now.branches) > 1 else []
    facts = [now.model, *branch, f"{len(now.layers)} layers", f"{format_count(now.num_params)} weights", now.device]
    return {
        "name": one.name,
        "facts": " · ".join([*facts, f"{len(now.steps)} steps", f"{when} {run.began.replace('T', ' ')[:16]} UTC"]),
        "cards": _summary_cards(now),
        "verdicts": run.facts,
        "loss": _loss(now, run),
        "loss_words": _describe_loss(now),
        "step": _step_context(now) if now.last is not None else None,
        "workers": workers_section(run),
        "budget": now.budget_bytes is not None,
        "heat": _heat_pictures(now),
        "layers": replace(layers_table(now.layers), title=f"Layers {now.state_words}"),
        "journal": journal_table(now.journal, now.changes) if now.journal else None,
        "changes": changes_table(now),
        "races": [race_section(race) for _, race in run.races],
        "look": look_section(run),
        "settings": replace(settings_table(now), title="Settings of the last step"),
        "machine": machine_table(run),
        "kept": traced_steps_table(run),
        "source": f"Made from {run.path.name}, recorded {run.began}"
        + ("." if run.complete else "; the recording was cut short, this is the part written before."),
    }


def _summary_cards(snapshot: Snapshot) -> list[SummaryCard]:
    cards = []
    if snapshot.steps:
        first, last = snapshot.steps[0], snapshot.steps[-1]
        held_out = f"; held out {snapshot.held_out[-1].values[LOSS]:.4g}" if snapshot.held_out else ""
        cards.append(
            SummaryCard("loss", f"{last.loss:.4g}", f"from {first.loss:.4g} in {len(snapshot.steps)} steps{held_out}")
        )
        seconds = median(row.seconds for row in snapshot.steps)  # not the mean: metered steps take longer
        rate = median(row.samples / row.seconds for row in snapshot.steps if row.seconds)
        cards.append(SummaryCard("time of a step", format_seconds(seconds), f"median; {rate:.3g} samples per second"))
        peak = max(row.peak_device_bytes for row in snapshot.steps)
        of = f"of {format_bytes(snapshot.budget_bytes)}" if snapshot.budget_bytes is not None else ""
        cards.append(SummaryCard("peak of device memory", format_bytes(peak), of))
        if snapshot.in_core_bytes is not None:
            times = f"{snapshot.in_core_bytes / peak:.1f} times as much" if peak else ""
            cards.append(SummaryCard("in core would need", format_bytes(snapshot.in_core_bytes), times))
    if snapshot.last is not None:
        cards.append(
            SummaryCard("copies hidden under compute", f"{100 * snapshot.last.overlap():.0f} %", snapshot.shown_words)
        )
        cards += _bound_card(snapshot.last)
    return cards


def _bound_card(trace: Trace) -> list[SummaryCard]:
    """Return a card with the bound of the longest phase."""
    longest = max(trace.bound_by(), key=lambda bound: bound.span_s, default=None)
    if longest is None:
        return []
    waits = {"h2d": "loads", "d2h": "pushes", "eps": "updates", "idle": "waiting", "others": "other workers"}
    seconds = longest.busy_s["compute"] if longest.lane == "compute" else longest.exposed_s
    shown = f"{format_seconds(seconds)} of {format_seconds(longest.span_s)} in {longest.phase}"
    return [SummaryCard("bound by", waits.get(longest.lane, longest.lane), shown)]


def _loss(snapshot: Snapshot, run: RecordedRun) -> Picture:
    drawn = draw_loss(
        snapshot.steps,
        snapshot.changes,
        held_out=held_out_points(snapshot.held_out),
        levels=run.levels,
        branch=snapshot.branch,
        others=snapshot.elsewhere,
    )
    return Picture(drawn, loss_table(snapshot.steps, snapshot.changes, snapshot.held_out))


def _describe_loss(snapshot: Snapshot) -> str:
    sentences = ["The loss of every step."]
    if snapshot.held_out:
        sentences.append("The bold line is the loss on held-out data, which the model is not trained on.")
    if snapshot.changes:
        sentences.append("Dashed vertical lines are edits of the model and changes of settings.")
    return " ".join(sentences)


def _step_context(snapshot: Snapshot) -> Context:
    """Describe the shown step with the layers of that time, which later edits may have changed."""
    shown = snapshot.shown
    assert shown is not None
    trace = shown.trace
    frames = relay_frames(trace, shown.layers, snapshot.budget_bytes)
    sampled = (
        f"{len(frames.frames):,} of {frames.events:,} events, evenly spaced."
        if len(frames.frames) < frames.events
        else ""
    )
    schedule = SCHEDULE_TEXTS[_schedule_of(trace)]
    drawn = draw_memory(
        Columns.of(trace), keys=trace.names, budget_bytes=snapshot.budget_bytes, in_core_bytes=snapshot.in_core_bytes
    )
    return {
        "name": (name := snapshot.name_of(shown)),
        "title": f"{name[0].upper()}{name[1:]}",
        "whose": snapshot.shown_words,
        "first": frames.frame(frames.start) if frames.frames else ("", "", ""),
        "packed": frames.pack(),
        "sampled": sampled,
        "device_words": schedule.device,
        "memory_words": schedule.memory,
        "timeline": show_timeline(trace),
        "memory": Picture(drawn, memory_table(trace, snapshot.in_core_bytes)),
    }


def _schedule_of(trace: Trace) -> str:
    return str(trace.settings.get("schedule", "breadth_first"))


def _heat_pictures(snapshot: Snapshot) -> list[Any]:
    """Return the picture of the first figure, and the named pictures of the other recorded figures."""
    shown = {
        kind.label: show_heat(snapshot.statistics, figure, snapshot.changes)
        for figure, kind in FIGURE_KINDS.items()
        if figure == "grad_norm" or any(getattr(layer, figure) is not None for layer in snapshot.layers)
    }
    (_, first), *rest = shown.items()
    return [first, *({"name": f"{name[0].upper()}{name[1:]}", "picture": picture} for name, picture in rest)]


# The page ------------------------------------------------------------------------------------------------------------


def page_file(name: str) -> str:
    """Return the text of a file in `pages/`."""
    return (files("workbench.pages") / name).read_text(encoding="utf-8")


@cache
def page_template(name: str) -> Any:
    """Return a template in `pages/`, which may include others."""
    # Values that are not marked safe in the template are escaped, because names and messages are user input.
    return Environment(autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(page_file)).get_template(name)
