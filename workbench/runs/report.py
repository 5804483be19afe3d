"""One HTML page from recorded runs: it opens from a file, loads nothing, and still reads with scripts turned off.

The pictures are those of the workbench, the page around them is in `pages/`. Two runs or more are also compared.
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

from jinja2 import Environment, StrictUndefined

from l2l_core import Trace
from l2l_core.trace import format_bytes
from workbench.pictures import (
    KINDS,
    Picture,
    count_words,
    draw_loss,
    draw_memory,
    format_seconds,
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
from workbench.runs.comparison import Named, compare_runs
from workbench.runs.load import load_run
from workbench.runs.recorded import RecordedRun, name_runs
from workbench.runs.recorder import Recorder
from workbench.runs.report_parts import changes_of, kept_of, look_of, machine_of, race_of, workers_of
from workbench.session import Snapshot

Context = dict[str, Any]

WORDS = {
    "layer, shell": "A module that is loaded, run and removed as a unit; everything else of the model is the shell.",
    "micro-batch": "A slice of the batch. In a relay a layer runs all of them before the next layer comes, so it is loaded once "
    "per pass.",
    "depth first": "The schedule in which nothing gives way: a micro-batch runs through all layers, and back, before the next "
    "one begins. Its phases are the first one's forward, which hides loads, the middle, and the last one's backward, which hides "
    "pushes.",
    "EPS": "The eager param-server: weights, gradients and optimizer state of every layer, in host memory. It updates a layer "
    "as soon as its gradient has arrived, while the device is busy with the next one.",
    "load, push": "Copies of a layer's weights to the device, and of its gradient back to the host.",
    "stash": "Inputs of layers, kept for the backward pass, which computes each layer once more from its input.",
    "overlap, exposed": "The share of copy time that is hidden under compute; the rest is exposed, and makes a step longer.",
    "worker, gather, exchange": "One of several processes that train together, each on its own rows. Before a layer is loaded "
    "its parts are gathered from all workers; its gradients are exchanged, and each updates its part.",
    "in core": "Ordinary training, with the whole model on the device.",
    "probe": "A few fixed batches whose losses are measured, in evaluation mode, before and after an edit. The change is the "
    "mean over the batches, ± its standard deviation over them; ▲ worse and ▼ better by more than that.",
    "influence": "1 minus the mean cosine between what enters a layer and what leaves it: near 0, the layer changes little.",
}


class Schedule(NamedTuple):
    """What a page says of steps of a schedule: of a run with them, of the device during one, of what fills that."""

    lead: str
    device: str
    memory: str


SCHEDULES = {
    "breadth_first": Schedule(
        "Trained by a layer relay: one layer at a time is on the device, all others wait in host memory.",
        "which holds only a few. Layers are loaded in the order of the algorithm, run every micro-batch, and give way to the "
        "next.",
        "The device needs room for the layers that are there just now, whatever the depth of the model.",
    ),
    "depth_first": Schedule(
        "Trained depth first: during a step all layers are on the device, between two steps they rest in host memory.",
        "which holds all of them. A micro-batch runs through all layers, and back, before the next one begins. During the first "
        "one's forward the layers are loaded, during the last one's backward their gradients leave.",
        "The device needs room for weights and gradients of all layers, and for the graph of one micro-batch.",
    ),
}


class Card(NamedTuple):
    """A figure to see first."""

    name: str
    value: str
    more: str = ""


def main(paths: Sequence[Path], out: Path | None) -> int:
    """Write the report of recorded runs: 0, or 2 if there is one that cannot be read."""
    try:
        runs = [load_run(path) for path in paths]
        where = out or runs[0].path.parent / ("report.html" if len(runs) == 1 else "comparison.html")
        write_report(runs, where)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Written: {where} ({format_bytes(where.stat().st_size)}); open it in a browser")
    return 0


def write_report(runs: Sequence[RecordedRun], path: str | Path) -> None:
    """Write the page; its folder is made.

    Raises:
        ValueError: no run, or a damaged one.
    """
    text = render_report(runs)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def write_session_report(now: Snapshot, path: str | Path) -> None:
    """Write the same page of a session that is still open, as it stands, with the step that it shows."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "session.jsonl"
        with Recorder(file, title=f"{now.model}, {now.shown_words}") as recorder:
            recorder.watch(now)  # for what is known of a run besides its snapshot: machine, versions, the time
            if now.race is not None and now.race.is_over:
                recorder.log_race(now.race)
        run = replace(load_run(file), path=Path("the open session"))
    Path(path).write_text(_render([Named(run.title, now, run)], when="written"), encoding="utf-8")


def render_report(runs: Sequence[RecordedRun]) -> str:
    """Make the page as text.

    Raises:
        ValueError: no run, or a damaged one.
    """
    if not runs:
        raise ValueError("a report needs a recorded run")
    return _render([Named(name, run.snapshot(), run) for name, run in zip(name_runs(runs), runs, strict=True)])


def _render(named: Sequence[Named], when: str = "began") -> str:
    """The page; `when`: what its runs did at the time that they tell."""
    script = _page("player.js")
    schedules = {_schedule_of(one.now.last) for one in named if one.now.last is not None}
    return _template().render(
        title=named[0].run.title if len(named) == 1 else f"{len(named)} runs side by side",
        lead=SCHEDULES[min(schedules, default="breadth_first")].lead,  # of both, the relay's
        style=_page("report.css"),
        script=script,
        # The page's Content-Security-Policy lets the script with this hash run, and no other.
        script_hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        comparison=compare_runs(named) if len(named) > 1 else None,
        runs=[_describe_run(one, when) for one in named],
        words=WORDS,
    )


# What the template is given ------------------------------------------------------------------------------------------


def _describe_run(one: Named, when: str) -> Context:
    now, run = one.now, one.run
    branch = [f"branch {now.branch}"] if len(now.branches) > 1 else []
    facts = [now.model, *branch, f"{len(now.layers)} layers", f"{count_words(now.num_params)} weights", now.device]
    return {
        "name": one.name,
        "facts": " · ".join([*facts, f"{len(now.steps)} steps", f"{when} {run.began.replace('T', ' ')[:16]} UTC"]),
        "cards": _cards(now, run),
        "verdicts": run.facts,
        "loss": _loss(now, run),
        "loss_words": _say_loss(now, run),
        "step": _step(now) if now.last is not None else None,
        "workers": workers_of(run),
        "budget": now.budget_bytes is not None,
        "heat": _heat(now),
        "layers": replace(layers_table(now.layers), title=f"Layers {now.state_words}"),
        "journal": journal_table(now.journal, now.changes) if now.journal else None,
        "changes": changes_of(now),
        "races": [race_of(race) for _, race in run.races],
        "look": look_of(run),
        "settings": replace(settings_table(now), title="Settings of the last step"),
        "machine": machine_of(run),
        "kept": kept_of(run),
        "source": f"Made from {run.path.name}, recorded {run.began}"
        + ("." if run.complete else "; the recording was cut short, what is here was written before."),
    }


def _cards(now: Snapshot, run: RecordedRun) -> list[Card]:
    cards = []
    if now.steps:
        first, last = now.steps[0], now.steps[-1]
        held_out = f"; held out {run.held_out[-1][1]:.4g}" if run.held_out else ""
        cards.append(Card("loss", f"{last.loss:.4g}", f"from {first.loss:.4g} in {len(now.steps)} steps{held_out}"))
        seconds = median(row.seconds for row in now.steps)  # the first step of a shape is metered, and takes longer
        rate = median(row.samples / row.seconds for row in now.steps if row.seconds)
        cards.append(Card("time of a step", format_seconds(seconds), f"median; {rate:.3g} samples per second"))
        peak = max(row.peak_device_bytes for row in now.steps)
        of = f"of {format_bytes(now.budget_bytes)}" if now.budget_bytes is not None else ""
        cards.append(Card("peak of device memory", format_bytes(peak), of))
        if now.in_core_bytes is not None:
            times = f"{now.in_core_bytes / peak:.1f} times as much" if peak else ""
            cards.append(Card("in core would need", format_bytes(now.in_core_bytes), times))
    if now.last is not None:
        cards.append(Card("copies hidden under compute", f"{100 * now.last.overlap():.0f} %", now.shown_words))
        cards += _bound(now.last)
    return cards


def _bound(trace: Trace) -> list[Card]:
    """What binds the longest phase."""
    longest = max(trace.bound_by(), key=lambda bound: bound.span_s, default=None)
    if longest is None:
        return []
    waits = {"h2d": "loads", "d2h": "pushes", "eps": "updates", "idle": "waiting", "others": "other workers"}
    seconds = longest.busy_s["compute"] if longest.lane == "compute" else longest.exposed_s
    shown = f"{format_seconds(seconds)} of {format_seconds(longest.span_s)} in {longest.phase}"
    return [Card("bound by", waits.get(longest.lane, longest.lane), shown)]


def _loss(now: Snapshot, run: RecordedRun) -> Picture:
    drawn = draw_loss(
        now.steps, now.changes, held_out=run.held_out, levels=run.levels, branch=now.branch, others=now.elsewhere
    )
    return Picture(drawn, loss_table(now.steps, now.changes))


def _say_loss(now: Snapshot, run: RecordedRun) -> str:
    said = ["The loss of every step."]
    if run.held_out:
        said.append("Points are losses on held-out data, which the model is not trained on.")
    if now.changes:
        said.append("Dashed upright lines are edits of the model and changes of settings.")
    return " ".join(said)


def _step(now: Snapshot) -> Context:
    """The step that is shown, with the layers that there were in it: they may be others later."""
    shown = now.shown
    assert shown is not None
    trace = shown.trace
    frames = relay_frames(trace, shown.layers, now.budget_bytes)
    sampled = (
        f"{len(frames.frames):,} of {frames.events:,} events, evenly chosen."
        if len(frames.frames) < frames.events
        else ""
    )
    schedule = SCHEDULES[_schedule_of(trace)]
    drawn = draw_memory(
        Columns.of(trace), keys=trace.names, budget_bytes=now.budget_bytes, in_core_bytes=now.in_core_bytes
    )
    return {
        "name": (name := now.name_of(shown)),
        "title": f"{name[0].upper()}{name[1:]}",
        "whose": now.shown_words,
        "first": frames.frame(frames.start) if frames.frames else ("", "", ""),
        "packed": frames.pack(),
        "sampled": sampled,
        "device_words": schedule.device,
        "memory_words": schedule.memory,
        "timeline": show_timeline(trace),
        "memory": Picture(drawn, memory_table(trace, now.in_core_bytes)),
    }


def _schedule_of(trace: Trace) -> str:
    return str(trace.settings.get("schedule", "breadth_first"))


def _heat(now: Snapshot) -> list[Any]:
    """The first figure as a picture, the others with their names, to be folded away; without those that nobody knows."""
    shown = {
        kind.words: show_heat(now.statistics, figure, now.changes)
        for figure, kind in KINDS.items()
        if figure == "grad_norm" or any(getattr(layer, figure) is not None for layer in now.layers)
    }
    (_, first), *rest = shown.items()
    return [first, *({"name": f"{name[0].upper()}{name[1:]}", "picture": picture} for name, picture in rest)]


# The page ------------------------------------------------------------------------------------------------------------


def _page(name: str) -> str:
    return (files("workbench.pages") / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    # whatever is not marked safe in the template is escaped: names and messages are the user's
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(_page("report.html"))
