"""What fills device and host over a step, as a table, and a peak in words."""

from __future__ import annotations

from l2l_core import Trace
from l2l_core.trace import CATEGORIES, PLACES, format_bytes
from workbench.pictures.picture import Table
from workbench.pictures.scale import format_seconds
from workbench.readings import Columns, LayerNumbers, MemoryLevels, Peak, find_peak, number_layers, short_name

_OTHER = CATEGORIES.index("other")


def memory_table(trace: Trace, in_core_bytes: int | None = None) -> Table:
    """List bytes by category when the device and when the host are fullest, the budget, and the need in core."""
    peaks = [trace.peak_sample(place) for place in PLACES]
    held = [dict(peak.bytes_by_category) if peak else {} for peak in peaks]
    rows = [
        (category, *(format_bytes(h.get(category, 0)) for h in held))
        for category in CATEGORIES
        if any(h.get(category) for h in held)
    ]
    rows.append(("all", *(format_bytes(sum(h.values())) for h in held)))
    budget, failed = trace.settings.get("memory_bytes"), trace.failed
    if failed is not None and failed.asked_bytes:
        rows.append(("asked for at the end", format_bytes(failed.asked_bytes), ""))
    if budget is not None:
        rows.append(("budget", format_bytes(budget), ""))
    if in_core_bytes is not None:
        rows.append(("in core (estimate)", format_bytes(in_core_bytes), ""))
    title = "Memory at its peaks" if failed is None else "Memory at its peaks, until the step failed"
    return Table(title, ("bytes", "device", "host"), rows, _note(trace, held[1].get("other", 0)))


def _note(trace: Trace, kept: int) -> str:
    columns = Columns.of(trace)
    compute = columns.events_on("compute")
    found = find_peak(MemoryLevels.of(columns, "device", compute), columns, compute)
    said = [
        f"The device is fullest {describe_peak(found, number_layers(trace.names))}."
        if found
        else "No memory was sampled."
    ]
    said += [f"The step {trace.failed}."] if trace.failed is not None else []
    said += ["On the host, other is what is kept for undo and branches."] if kept else []
    return " ".join(said)


def undo_bytes(host: MemoryLevels) -> int:
    """Return the bytes that the host keeps for undo and branches where it is fullest: all that is "other" there."""
    return int(host.nbytes[host.totals.argmax(), _OTHER]) if len(host.totals) else 0


def describe_peak(peak: Peak, numbers: LayerNumbers, with_event: bool = True) -> str:
    """Say the moment of a peak, and what is computed then."""
    at = f"at {format_seconds((peak.began_s + peak.t_s) / 2)}"  # in the middle of what is computed, as it is marked
    if not with_event or not peak.kind:
        return at
    layer = "" if peak.layer in ("", "shell") else f" of layer {short_name(peak.layer, numbers)}"
    k = "" if peak.k < 0 else f", micro-batch {peak.k}"
    kind = "the model's own code" if peak.kind == "shell" else peak.kind
    return f"{at}, {kind}{layer}{k}"
