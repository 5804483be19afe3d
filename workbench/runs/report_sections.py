"""Sections of the report: changes, races, workers, the last look inside, hardware, and recorded steps."""

from __future__ import annotations

from typing import Any

from l2l_core import Traces
from l2l_core.trace import NETWORK_LANES, format_bytes
from workbench.pictures import (
    AXES,
    MAX_STEPS,
    StepWaits,
    Table,
    describe_rows,
    draw_race,
    format_seconds,
    inside_pages,
    show_lanes,
    show_race,
    show_stragglers,
    show_waits,
)
from workbench.readings import number_layers
from workbench.runs.recorded_run import RecordedRun
from workbench.session import Race, Snapshot

Context = dict[str, Any]


def changes_table(snapshot: Snapshot) -> Table:
    """Return a table of edits and changed settings in order; only edits have a probe result."""
    rows = [(str(change.step), change.what, change.verdict) for change in snapshot.changes]
    return Table("Changes", ("after step", "what", "probe"), rows)


def race_section(race: Race) -> Context:
    """Return the pictures of a race: over FLOP with the table, then folded over steps and seconds."""
    return {
        "names": ", ".join(racer.name for racer in race.racers),
        "over": AXES["flop"],
        "picture": show_race(race, "flop"),
        "others": [{"over": AXES[axis], "svg": draw_race(race, axis)} for axis in AXES if axis != "flop"],
    }


def workers_section(run: RecordedRun) -> Context | None:
    """Return waits and lanes of all workers; None with one worker, or if no step has all traces."""
    traces = run.traces()
    if traces is None:
        return None
    lanes = [{"name": f"worker {rank}", "timeline": shown} for rank, shown in enumerate(show_lanes(traces))]
    over = show_waits([StepWaits.of(each) for each in run.last_traces(MAX_STEPS)])
    waits = {"waits": show_stragglers(traces), "over": over}
    return {"count": len(traces), **waits, "lanes": lanes, "each": _worker_table(traces)}


def _worker_table(traces: Traces) -> Table:
    """Return a table of the figures of each worker in a step."""
    rows = []
    for trace in traces:
        busy = [format_seconds(trace.busy_s(lane)) for lane in ("compute", "gather", "reduce")]
        received = format_bytes(sum(event.nbytes for lane in NETWORK_LANES for event in trace.lanes[lane]))
        waits = format_seconds(sum(wait.exposed_s for wait in trace.waits()))
        peaks = [format_bytes(trace.peak_bytes(place)) for place in ("device", "host")]
        rows.append((f"worker {trace.worker.rank}", format_seconds(trace.span_s), *busy, waits, received, *peaks))
    header = ("worker", "step", "computes", "gathers", "exchanges", "waits for others", "received", "device peak")
    return Table(f"Workers in step {traces[0].step + 1}", (*header, "host peak"), rows)


def look_section(run: RecordedRun) -> Context | None:
    """Return the pictures of the last look inside, with the layer numbers of that moment."""
    if (found := run.look()) is None:
        return None
    number, look = found
    numbers = number_layers(row.key for row in run.snapshot(number).layers)
    others = f" It is the last of {len(run.looks)} looks." if len(run.looks) > 1 else ""
    return {
        "words": f"{describe_rows(look.inside).capitalize()}, after step {look.inside.step} of {look.inside.branch}.{others}",
        "pages": inside_pages(look.inside, numbers, look.decode),
    }


def machine_table(run: RecordedRun) -> Table:
    """Return a table of hardware and versions."""
    facts = {name.replace("_", " "): value for name, value in run.machine.items() if name != "memory_bytes"}
    if run.machine.get("memory_bytes"):
        facts["memory"] = format_bytes(run.machine["memory_bytes"])
    return Table("Hardware and versions", ("", ""), [(name, str(value)) for name, value in facts.items()])


def traced_steps_table(run: RecordedRun) -> Table:
    """Return a table of the figures of the steps with a trace."""
    rows = []
    for number in run.traced:
        trace = run.trace(number)
        peaks = [format_bytes(trace.peak_bytes(place)) for place in ("device", "host")]
        hidden = f"{100 * trace.overlap():.0f} %"
        # Traces count steps from 0, tables from 1.
        rows.append((str(trace.step + 1), format_seconds(trace.span_s), f"{trace.counts[0]:,}", hidden, *peaks))
    header = ("step", "time", "events", "copies hidden", "device peak", "host peak")
    return Table("Fully recorded steps", header, rows)
