"""Plotly figures contain the numbers of the trace, at any level of detail."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from l2l_core.trace.events import LANES, Event, MemorySample
from l2l_core.trace.trace import Trace
from workbench.pictures.plotly_figures import loss_figure, memory_figure, timeline_figure
from workbench.pictures.theme import LANE_NAMES
from workbench.session.snapshot_values import Change, StepRow


def step(layers: int = 3, micro_batches: int = 2) -> Trace:
    events, samples, now_s = [], [], 0.0
    for layer in range(layers):
        events.append(Event("h2d", "load", now_s, now_s + 0.5, f"L{layer:03d}", nbytes=1_000))
        samples.append(MemorySample(now_s, "device", {"weights": 1_000 * (layer + 1), "stash": 10 * layer}))
        samples.append(MemorySample(now_s, "host", {"optimizer": 5_000}))
        for k in range(micro_batches):
            events.append(Event("compute", "forward", now_s, now_s + 1, f"L{layer:03d}", k, visit=layer))
            now_s += 1
    events.append(Event("eps", "update", now_s, now_s + 1, "L000"))
    return Trace.of(
        events,
        samples,
        names={"shell": "", **{f"L{i:03d}": f"blocks.{i}" for i in range(layers)}},
        step=4,
        device="toy",
    )


def row(number: int, loss: float) -> StepRow:
    return StepRow(number, loss, 0.5, 8, 3_000_000, 1, 1, 0.9)


def test_bars_are_the_events() -> None:
    trace = step()
    figure: Any = timeline_figure(trace)
    assert [bars.name for bars in figure.data] == ["forward", "load", "update"]  # one trace per kind, in fixed order
    for bars in figure.data:
        events = [event for event in trace.events if event.kind == bars.name]
        assert list(bars.base) == [event.start_s for event in events]
        assert list(bars.x) == pytest.approx([event.stop_s - event.start_s for event in events])
        assert list(bars.y) == [LANE_NAMES[event.lane] for event in events]
    assert list(figure.layout.yaxis.categoryarray) == [LANE_NAMES[lane] for lane in LANES]
    empty: Any = timeline_figure(Trace())
    assert figure.layout.uirevision == empty.layout.uirevision is not None


def test_hovering_names_layer_micro_batch_bytes_and_time() -> None:
    figure: Any = timeline_figure(step())
    forward, load, _ = figure.data
    assert forward.hovertext[3] == "forward 1 · L001, micro-batch 1<br>1 s, from 3 s"
    assert load.hovertext[0] == "load 0 · L000, 1 kB<br>500 ms, from 0 ms"
    assert list(forward.text)[:3] == ["F0", "F0", "F1"]


def test_a_large_step_is_lines_with_the_same_numbers() -> None:
    trace = step(layers=1_000, micro_batches=8)
    figure: Any = timeline_figure(trace)
    assert len(figure.data) == 3
    for lines in figure.data:
        events = [event for event in trace.events if event.kind == lines.name]
        x = np.asarray(lines.x).reshape(-1, 3)
        assert x[:, 0].tolist() == [event.start_s for event in events]
        assert x[:, 1].tolist() == [event.stop_s for event in events]
        assert np.isnan(x[:, 2]).all()
        assert set(np.asarray(lines.y).tolist()) == {LANES.index(events[0].lane)}
        assert len(lines.hovertext) == len(x) * 3
    assert list(figure.layout.yaxis.ticktext) == [LANE_NAMES[lane] for lane in LANES]


def test_memory_is_stacked_and_its_total_is_the_traces() -> None:
    trace = step()
    figure: Any = memory_figure(trace, "device", budget_bytes=4_000, in_core_bytes=9_000)
    weights, stash, total, budget, in_core = figure.data
    samples = [sample for sample in trace.memory if sample.place == "device"]
    assert [weights.name, stash.name, total.name] == ["weights", "stash", "total"]
    assert list(total.x) == [*(sample.t_s for sample in samples), 7.0]  # the last one holds until the end
    assert list(total.y)[:-1] == [sample.total for sample in samples] and max(total.y) == trace.peak_bytes("device")
    assert [a + b for a, b in zip(weights.y, stash.y, strict=True)] == list(total.y)
    assert weights.stackgroup == stash.stackgroup and total.stackgroup is None
    assert weights.line.shape == total.line.shape == "hv"
    assert set(budget.y) == {4_000} and set(in_core.y) == {9_000} and budget.line.dash != in_core.line.dash
    assert budget.name == "budget 4 kB" and in_core.name == "in core would need 9 kB"
    host: Any = memory_figure(trace, "host")
    assert [part.name for part in host.data] == ["optimizer", "total"]


def test_an_unknown_place_raises() -> None:
    with pytest.raises(ValueError, match="no place 'disk'; the places are device, host"):
        memory_figure(step(), "disk")


def test_losses_of_several_runs_differ_in_more_than_colour() -> None:
    runs = {"relay <1>": [row(1, 3.0), row(2, math.nan), row(3, 2.0)], "in core": [row(1, 3.5), row(2, 2.5)]}
    figure: Any = loss_figure(runs, [Change(2, "micro_batches 4 → 8"), Change(2, "drop <3>"), Change(1, "lr")])
    relay, in_core, changes = figure.data
    assert relay.name == "relay &lt;1&gt;"
    assert list(relay.x) == [1, 2, 3] and list(relay.y) == [3.0, None, 2.0] and list(in_core.y) == [3.5, 2.5]
    assert relay.line.dash != in_core.line.dash and relay.marker.symbol != in_core.marker.symbol
    assert list(changes.x) == [1.5, 2.5] and list(changes.y) == [3.5, 3.5]
    assert list(changes.hovertext) == ["lr", "micro_batches 4 → 8<br>drop &lt;3&gt;"]
    assert [line.x0 for line in figure.layout.shapes] == [1.5, 2.5]


def test_nothing_to_show_is_a_figure_too() -> None:
    figures: list[Any] = [
        timeline_figure(Trace()),
        memory_figure(Trace(), "device"),
        loss_figure({}),
        loss_figure({"a": []}),
    ]
    for figure in figures:
        assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
        json.loads(figure.to_json())
