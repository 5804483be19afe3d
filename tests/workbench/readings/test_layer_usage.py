"""Usage of layers against values computed by hand."""

from __future__ import annotations

import pytest

from l2l_core import Event, Trace
from l2l_core.trace import MemorySample
from workbench.readings import Columns, layer_usage


def compute(layer: str, kind: str, start_s: float, stop_s: float, stalled_s: float = 0.0) -> Event:
    return Event("compute", kind, start_s, stop_s, layer, stalled_s=stalled_s)


def test_usage_is_the_sum_of_events_and_the_peak_during_them() -> None:
    events = [
        Event("h2d", "load", 0.0, 1.0, "L000"),
        compute("L000", "forward", 1.0, 2.0, stalled_s=1.0),
        compute("L001", "forward", 2.5, 4.5, stalled_s=0.5),
        compute("L001", "backward", 5.0, 8.0),
        compute("L000", "backward", 8.0, 10.0, stalled_s=0.25),
    ]
    # At the end of an event the relay records the maximum during the event, then the current bytes.
    device_bytes = [(0.0, 10), (2.0, 40), (2.0, 15), (4.5, 90), (4.5, 20), (4.7, 500), (4.9, 20)]
    device_bytes += [(8.0, 80), (8.0, 20), (10.0, 60), (10.0, 5)]
    samples = [
        MemorySample(t_s, "device", {"weights": nbytes // 2, "stash": nbytes - nbytes // 2})
        for t_s, nbytes in device_bytes
    ]
    samples.append(MemorySample(9.5, "host", {"weights": 10_000}))
    first, second, absent = layer_usage(Columns.of(Trace.of(events, samples)), ["L000", "L001", "L007"])
    assert (first.key, first.compute_s, first.waiting_s, first.device_bytes) == ("L000", 3.0, 1.25, 60)
    assert (second.compute_s, second.waiting_s, second.device_bytes) == (5.0, 0.5, 90), (
        "a peak between events belongs to no layer"
    )
    assert absent[1:] == (0.0, 0.0, 0)


@pytest.mark.parametrize("events", [[], [compute("L000", "forward", 0.0, 1.0)]])
def test_without_samples_device_bytes_are_zero(events: list[Event]) -> None:
    (cost,) = layer_usage(Columns.of(Trace.of(events, [])), ["L000"])
    assert cost.compute_s == len(events) and cost.device_bytes == 0
