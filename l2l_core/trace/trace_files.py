"""Files of a trace: Chrome trace JSON for viewers, JSON lines for reading back.

Chrome JSON has one `tid` per lane because Perfetto requires the slices of a track to nest
(https://perfetto.dev/docs/getting-started/other-formats). Categories, `args.stream`, `args.correlation`, `schemaVersion` and
`distributedInfo` are for Holistic Trace Analysis, which recognizes copies and communication by the slice names "Memcpy HtoD ...",
"Memcpy DtoH ..." and "ncclKernel ...". Perfetto reads several workers from one file; Holistic Trace Analysis needs one file each.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from l2l_core.trace.events import DISK_LANES, NETWORK_LANES, Event
from l2l_core.trace.trace import Trace

JsonObject = dict[str, Any]
T = TypeVar("T")

CHROME_CATEGORIES = {
    "compute": "kernel",
    "h2d": "gpu_memcpy",
    "d2h": "gpu_memcpy",
    "eps": "cpu_op",
    "gather": "kernel",
    "reduce": "kernel",
    **dict.fromkeys(DISK_LANES, "cpu_op"),
}
COPY_PREFIXES = {"h2d": "Memcpy HtoD ", "d2h": "Memcpy DtoH "}
COLLECTIVE_PREFIXES = dict.fromkeys(NETWORK_LANES, "ncclKernel ")
SCHEMA = "l2l-trace"
VERSION = 3


def clock_tolerance_s(t_s: float) -> float:
    """Return the error of two clock readings at `t_s`, in seconds.

    cudaEventElapsedTime resolves about 0.5 microseconds and returns milliseconds as float32 (relative error 6e-8):
    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__EVENT.html
    """
    return 1e-6 + 1.2e-7 * abs(t_s)


# ---- Chrome trace JSON -----------------------------------------------------------------------------------------


def write_chrome(traces: Sequence[Trace], path: Path, compress: bool | None = None) -> None:
    """Write `chrome_trace(*traces)` to a file, compressed if its name ends in .gz, unless `compress` is given.

    Raises:
        ValueError: the name does not end in .json or .json.gz, as viewers require.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"cannot export to {str(path)!r}: viewers require it: use .json or .json.gz")
    # Holistic Trace Analysis finds the rank of a file only with a space after each colon
    data = json.dumps(chrome_trace(*traces), separators=(",", ": "), allow_nan=False).encode()
    if path.suffix == ".gz" if compress is None else compress:
        data = gzip.compress(data, compresslevel=6, mtime=0)
    path.write_bytes(data)


def chrome_trace(*traces: Trace) -> JsonObject:
    """Return traces of one step as a Chrome trace object: metadata, slices, flow arrows from load to use, byte counters.

    Each worker is a process. Time begins with the first of them, or with its wait for others to start.
    """
    first = traces[0]
    began_s = min(trace.worker.began_s - trace.worker.waited_s for trace in traces)
    return {
        "schemaVersion": 1,
        "distributedInfo": {"rank": first.worker.rank, "world_size": first.worker.count},
        "displayTimeUnit": "ms",
        "otherData": {"settings": first.settings},
        "traceEvents": [row for trace in traces for row in _process_rows(trace, trace.worker.began_s - began_s)],
    }


def _process_rows(trace: Trace, offset_s: float) -> Iterator[JsonObject]:
    """Yield the rows of one process, whose time begins `offset_s` after that of the file."""
    slices = list(_make_slices(trace))
    pid = trace.worker.rank + 1  # 0 is the idle process in Perfetto
    offset_us = round(offset_s * 1e9) / 1e3
    slice_rows = (_slice_row(trace, item) for item in slices)
    others = _wait_rows(trace, slices), _flow_rows(slices), _counter_rows(trace)
    for row in chain(_metadata_rows(trace), slice_rows, *others):
        yield {**row, "pid": pid} | ({"ts": row["ts"] + offset_us} if offset_us and "ts" in row else {})


class _Slice(NamedTuple):
    """An event on its track, in whole nanoseconds so that neighbours do not overlap by rounding."""

    event: Event
    id: int
    tid: int
    start_ns: int
    stop_ns: int


def _make_slices(trace: Trace) -> Iterator[_Slice]:
    number = count(1 + (trace.worker.rank << 32))  # arrows connect slices by number, unique over all processes
    for tid, (lane, events) in enumerate(trace.lanes.items(), start=1):
        free_s = -math.inf
        for event in events:
            assert free_s - event.start_s <= clock_tolerance_s(event.start_s), (
                f"lane {lane} is serial, but {event.label()!r} starts at {event.start_s} s "
                f"while the lane is busy until {free_s} s"
            )
            start_s = max(event.start_s, free_s)
            free_s = max(start_s, event.stop_s)
            yield _Slice(event, next(number), tid, round(start_s * 1e9), round(free_s * 1e9))


def _metadata_rows(trace: Trace) -> Iterator[JsonObject]:
    process = f"worker {trace.worker.rank} of {trace.worker.count}, " if trace.worker.count > 1 else ""
    process += f"relay step {trace.step + 1}" + (f" on {trace.device}" if trace.device else "")
    process += f", {trace.failed}" if trace.failed is not None else ""
    yield {"ph": "M", "name": "process_name", "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": trace.worker.rank}}
    for tid, lane in enumerate(trace.lanes, start=1):
        yield {"ph": "M", "tid": tid, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slice_row(trace: Trace, item: _Slice) -> JsonObject:
    event, duration_ns = item.event, item.stop_ns - item.start_ns
    name = trace.names.get(event.layer, event.layer)
    args: JsonObject = {
        "layer": event.layer,
        "layer_name": name,
        "k": event.k,
        "bytes": event.nbytes,
        "visit": event.visit,
        "stream": -1 if event.lane == "eps" else item.tid,  # -1: not on the device
        "correlation": item.id,
    }
    if event.lane in COPY_PREFIXES and duration_ns:
        args["memory bandwidth (GB/s)"] = event.nbytes / duration_ns
    return {
        "ph": "X",
        "tid": item.tid,
        "ts": item.start_ns / 1e3,
        "dur": duration_ns / 1e3,
        "cat": CHROME_CATEGORIES[event.lane],
        "name": (COPY_PREFIXES | COLLECTIVE_PREFIXES).get(event.lane, "") + event._replace(layer=name).label(),
        "args": args,
    }


def _wait_rows(trace: Trace, slices: list[_Slice]) -> Iterator[JsonObject]:
    """Yield the waits of a worker for others, before the step and before each collective."""
    worker = trace.worker
    collectives = [item for item in slices if item.event.lane in NETWORK_LANES]
    waits = [(item.tid, item.start_ns, item.event.stalled_s, item.event.last, item.event.layer) for item in collectives]
    for tid, until_ns, waited_s, last, layer in [(1, 0, worker.waited_s, worker.last, ""), *waits]:
        if waited_ns := round(waited_s * 1e9):
            yield {
                "ph": "X",
                "tid": tid,
                "ts": (until_ns - waited_ns) / 1e3,
                "dur": waited_ns / 1e3,
                "cat": "cpu_op",
                "name": f"wait for worker {last}",
                "args": {"layer": layer, "stream": -1},
            }


def _flow_rows(slices: list[_Slice]) -> Iterator[JsonObject]:
    for load, use in _pair_loads_with_uses(slices):
        arrow = {"cat": "load_to_use", "name": "load to use", "id": load.id}
        # From the start of the load: at its end, the next slice of the track may begin
        yield {**arrow, "ph": "s", "tid": load.tid, "ts": load.start_ns / 1e3}
        yield {**arrow, "ph": "f", "bp": "e", "tid": use.tid, "ts": use.start_ns / 1e3}


def _pair_loads_with_uses(slices: list[_Slice]) -> Iterator[tuple[_Slice, _Slice]]:
    """Pair every load with the first forward or backward of its layer after it and before that layer's next load."""
    loads: dict[str, list[_Slice]] = defaultdict(list)
    uses: dict[str, list[_Slice]] = defaultdict(list)
    for item in slices:  # a lane is sorted by start, hence so is each list
        if item.event.kind == "load":
            loads[item.event.layer].append(item)
        elif item.event.kind in ("forward", "backward"):
            uses[item.event.layer].append(item)
    for layer, of_layer in loads.items():
        for load, following in zip(of_layer, [*of_layer[1:], None], strict=True):
            ready_ns = max(load.start_ns, load.stop_ns - round(clock_tolerance_s(load.event.stop_s) * 1e9))
            first = bisect_left(uses[layer], ready_ns, key=lambda use: use.start_ns)
            for use in uses[layer][first : first + 1]:
                if following is None or use.start_ns < following.start_ns:
                    yield load, use


def _counter_rows(trace: Trace) -> Iterator[JsonObject]:
    """Yield one counter track per place. Absent categories are written as 0, since viewers would keep their last value."""
    categories: dict[str, JsonObject] = defaultdict(dict)
    for sample in trace.memory:
        categories[sample.place].update(dict.fromkeys(sample.bytes_by_category, 0))
    for sample in trace.memory:
        yield {
            "ph": "C",
            "name": f"{sample.place} bytes",
            "ts": round(sample.t_s * 1e9) / 1e3,
            "args": {**categories[sample.place], **sample.bytes_by_category},
        }


# ---- JSON lines ------------------------------------------------------------------------------------------------


def write_jsonl(path: Path, header: JsonObject, rows: Sequence[JsonObject]) -> None:
    """Write a header with schema and version, then one row per line. Floats keep all digits."""
    first = {"schema": SCHEMA, "version": VERSION, "type": "trace", **header, "rows": len(rows)}
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in (first, *rows)), encoding="utf-8")


def read_jsonl(path: Path, handlers: Mapping[str, Callable[[JsonObject], None]]) -> None:
    """Pass every row of `path` to the handler of its type, the header first.

    Raises:
        OtherVersionError: the format has another version.
        ValueError: the file is damaged or incomplete; names file and line.
    """
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    promised = 0
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if number == 1:
                check_version(path, row, SCHEMA, VERSION, "record the step again")
                promised = int(row["rows"])
            handlers[row.pop("type")](row)
        except OtherVersionError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            raise ValueError(
                f"{path}, line {number}: not a row of Trace.to_jsonl: {type(error).__name__}: {error}"
            ) from error
    if len(lines) - 1 != promised:
        raise ValueError(
            f"{path}, line {len(lines)}: the file ends after {len(lines) - 1} rows of the {promised} in its header: its writer "
            "was interrupted. Record the step again"
        )


class OtherVersionError(ValueError):
    """Raised for a file with another version of the format than this release reads."""


def check_version(path: Path, header: Mapping[str, Any], schema: str, version: int, remedy: str) -> None:
    """Raise an error for a file of another format or version; `remedy` is how to make this one.

    Raises:
        OtherVersionError: the version differs.
        ValueError: the schema differs.
        KeyError: an entry is missing.
    """
    if header["schema"] != schema:
        raise ValueError(f"schema {header['schema']!r}, expected {schema!r}")
    if header["version"] != version:
        raise OtherVersionError(
            f"{path} has version {header['version']!r} of the format {schema!r}, and this release reads version {version}: "
            f"{remedy}, or read the file with the release that wrote it"
        )


_TYPE_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": lambda value: isinstance(value, int),
    "float": lambda value: isinstance(value, int | float),
    "Mapping[str, int]": lambda value: isinstance(value, dict) and all(isinstance(n, int) for n in value.values()),  # pyright: ignore[reportUnknownVariableType] - parsed JSON
}


def build_record(record: type[T], row: JsonObject) -> T:
    """Return `record(**row)` after a check of every field's presence and type."""
    for name, annotation in record.__annotations__.items():
        kind = getattr(annotation, "__forward_arg__", annotation)  # a NamedTuple wraps the text
        if not _TYPE_CHECKS[kind](row[name]):
            raise TypeError(f"{name} is {row[name]!r}, expected {kind}")
    return record(**row)
