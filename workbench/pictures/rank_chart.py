"""Pictures of a step that ranks really ran: a row per rank, lanes and memory of each, and a table.

Seconds of ranks that share a processor are no statement on speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from l2l_core.analysis import Traces
from l2l_core.trace import LANES, NETWORK_LANES, format_bytes, intersect, merge, total_length
from workbench.pictures.memory_chart import show_memory
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import format_seconds
from workbench.pictures.stragglers import draw_workers
from workbench.pictures.theme import LANE_NAMES
from workbench.pictures.timeline_chart import common_span_s, draw_timeline
from workbench.readings import Columns

if TYPE_CHECKING:  # torch.distributed takes time to import
    from l2l_core.parallel import ParallelRun, PipelineRun

HEADER = ("rank", "computes", "updates", "messages", "compute waits", "sent", "peak of the step")


def show_ranks(run: ParallelRun | PipelineRun) -> list[Picture]:
    """Return a row per rank with their table, then lanes and memory of each on one time axis."""
    traces, table = Traces([rank.trace for rank in run.ranks]), ranks_table(run)
    span_s = common_span_s(*traces)
    pictures = [Picture(draw_workers(traces, table.title, table.note), table)]
    for trace in traces:
        used = {lane: events for lane, events in trace.lanes.items() if events or lane not in LANES}
        if not used.keys().isdisjoint(LANES[1:]):  # an offload in a pipeline's stage
            used = trace.lanes
        lanes = draw_timeline(Columns.of(trace), span_s=span_s, keys=trace.names, lanes=[*used])
        memory = show_memory(trace, span_s=span_s)
        title = f"Lanes of rank {trace.worker.rank}"
        rows = [
            (LANE_NAMES[lane], str(len(events)), format_seconds(trace.busy_s(lane))) for lane, events in used.items()
        ]
        pictures += [Picture(lanes, Table(title, ("lane", "events", "busy"), rows)), memory]
    return pictures


def ranks_table(run: ParallelRun | PipelineRun) -> Table:
    """Return seconds and bytes of each rank in the last step of a run."""
    rows: list[tuple[str, ...]] = []
    for rank in run.ranks:
        trace = rank.trace
        events, _ = trace.events_since(0)
        busy = merge((each.start_s, each.stop_s) for each in events if each.lane == "compute")
        messages = merge((each.start_s, each.stop_s) for each in events if each.lane in NETWORK_LANES)
        update_s = sum(each.stop_s - each.start_s for each in events if each.kind == "update")
        waits_s = total_length(messages) - total_length(intersect(messages, busy))
        seconds = (total_length(busy) - update_s, update_s, total_length(messages), waits_s)
        nbytes = (int(rank.sent_bytes), trace.peak_bytes("device"))
        rows.append((str(rank.rank), *map(format_seconds, seconds), *map(format_bytes, nbytes)))
    return Table(f"{run.way}, run on {len(rows)} ranks: the last step", HEADER, rows, _NOTE)


_NOTE = (
    "Measured. Ranks that share a processor show results and bytes, not speed. A message lasts until it has arrived, so waits "
    "for other ranks are part of it; compute waits where a message is on its way and no operation runs. The peak of a pipeline "
    "is that of activations and gradients, of other ways that of all tensors."
)
