"""Table of the bytes on device and host at their peaks, and the text of a peak."""

from __future__ import annotations

from l2l_core import Trace
from l2l_core.trace import CATEGORIES, PLACES, format_bytes
from workbench.pictures.picture import Table
from workbench.pictures.scale import format_seconds
from workbench.readings import Columns, LayerNumbers, MemoryLevels, Peak, find_peak, number_layers, short_name

_OTHER = CATEGORIES.index("other")


def memory_table(trace: Trace, in_core_bytes: int | None = None) -> Table:
    """Return bytes by category at the peaks of device and host, the budget, and the bytes needed in core."""
    peaks = [trace.peak_sample(place) for place in PLACES]
    held = [dict(peak.bytes_by_category) if peak else {} for peak in peaks]
    categories = [category for category in CATEGORIES if any(place.get(category) for place in held)]
    rows = [(category, *(format_bytes(place.get(category, 0)) for place in held)) for category in categories]
    rows.append(("all", *(format_bytes(sum(place.values())) for place in held)))
    budget, failed = trace.settings.get("memory_bytes"), trace.failed
    if failed is not None and failed.asked_bytes:
        rows.append(("failed allocation", format_bytes(failed.asked_bytes), ""))
    if budget is not None:
        rows.append(("budget", format_bytes(budget), ""))
    if in_core_bytes is not None:
        rows.append(("in core (estimate)", format_bytes(in_core_bytes), ""))
    title = "Memory at its peaks" if failed is None else "Memory at its peaks, until the step failed"
    columns = Columns.of(trace)
    compute = columns.events_on("compute")
    peak = find_peak(MemoryLevels.of(columns, "device", compute), columns, compute)
    peak_words = f"Device peak {describe_peak(peak, number_layers(trace.names))}." if peak else "No memory was sampled."
    notes = [peak_words] + ([f"The step {failed}."] if failed is not None else [])
    notes += ['On the host, "other" is kept for undo and branches.'] if held[1].get("other") else []
    return Table(title, ("bytes", "device", "host"), rows, " ".join(notes))


def undo_bytes(host: MemoryLevels) -> int:
    """Return the bytes kept for undo and branches at the host's peak, which are its "other" bytes."""
    return int(host.nbytes[host.totals.argmax(), _OTHER]) if len(host.totals) else 0


def describe_peak(peak: Peak, numbers: LayerNumbers, with_event: bool = True) -> str:
    """Return the time of a peak and, `with_event`, the computation at that time, in words."""
    time = f"at {format_seconds((peak.began_s + peak.t_s) / 2)}"  # the middle of the event, where the peak is marked
    if not with_event or not peak.kind:
        return time
    layer = "" if peak.layer in ("", "shell") else f" of layer {short_name(peak.layer, numbers)}"
    k = "" if peak.k < 0 else f", micro-batch {peak.k}"
    kind = "the model's own code" if peak.kind == "shell" else peak.kind
    return f"{time}, {kind}{layer}{k}"
