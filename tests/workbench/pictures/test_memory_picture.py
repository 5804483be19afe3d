"""The memory chart: no peak is lost, axes are stable, and large steps give small pictures."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from l2l_core import EmulatedDevice, Relay, RelayConfig, Trace
from l2l_core.config import StashLocation
from l2l_core.simulator.cost_formula import Machine, Shapes
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.simulation import simulate
from l2l_core.trace.events import CATEGORIES, LANES, Event, MemorySample
from l2l_core.trace.formatting import format_bytes
from workbench.pictures.memory_chart import DEVICE, HOST, draw_memory, memory_table, show_memory
from workbench.pictures.theme import category_colour
from workbench.readings.memory_levels import MemoryLevels
from workbench.readings.trace_columns import Columns

LIMIT = 60_000


def step(layers: int = 4, micro_batches: int = 2, event_s: float = 1.0) -> Trace:
    """Return a step with growing forward events and two samples at the end of each: the peak and the rest."""
    events, samples, t_s = [], [], 0.0
    visits = [(v, f"L{v:03d}", "forward") for v in range(layers)]
    visits += [(layers + v, f"L{layers - 1 - v:03d}", "backward") for v in range(layers)]
    for visit, layer, kind in visits:
        for k in range(micro_batches):
            events.append(Event("compute", kind, t_s, t_s + event_s, layer, k, 0, visit, 0.0, visit))
            t_s += event_s
            high = {"weights": 1000, "activations": 5000 + 100 * visit, "stash": 10 * visit}
            samples.append(MemorySample(t_s + 1e-4 * event_s, "device", high))
            samples.append(MemorySample(t_s + 2e-4 * event_s, "device", {"weights": 1000}))
        samples.append(MemorySample(t_s + 3e-4 * event_s, "host", {"weights": 4000, "optimizer": 8000 + visit}))
    names = {f"L{i:03d}": f"h.{i}" for i in range(layers)}
    return Trace.of(events, samples, names=names, settings={"memory_bytes": 9000})


def simulated(layers: int, micro_batches: int) -> Trace:
    shapes = Shapes(
        layer_params=[1000] * layers,
        shell_params=100,
        tokens=8,
        boundary_bytes=640,
        micro_batches=micro_batches,
        activation_bytes=5000,
    )
    return simulate(Profile.of_shapes(shapes, Machine(1e9, 1e9, 1e9, 1e9)), RelayConfig(micro_batches=micro_batches))


def big(layers: int = 1000, micro_batches: int = 32) -> Columns:
    """Return a noisy step of 64,000 events and 128,000 samples, with a peak of one microsecond."""
    count = 2 * layers * micro_batches
    noise = np.random.default_rng(0)
    visit = np.repeat(np.arange(2 * layers), micro_batches)
    start_s = np.arange(count, dtype=np.float64) * 1e-3
    nbytes = np.zeros((2 * count, len(CATEGORIES)), np.int64)
    nbytes[:, :5] = noise.integers(10**6, 10**9, (2 * count, 5))
    nbytes[77_777, 2] = 10**10
    return Columns(
        start_s=start_s,
        stop_s=start_s + 0.9e-3,
        stalled_s=np.zeros(count),
        lane=np.zeros(count, np.int64),
        kind=(visit >= layers).astype(np.int64),
        layer=np.minimum(visit, 2 * layers - 1 - visit),
        k=np.tile(np.arange(micro_batches), 2 * layers),
        visit=visit,
        nbytes=np.zeros(count, np.int64),
        stay=visit,
        slot=np.full(count, -1),
        piece=np.zeros(count, np.int64),
        pieces=np.ones(count, np.int64),
        lanes=LANES,
        kinds=("forward", "backward"),
        layers=[f"L{i:03d}" for i in range(layers)],
        sample_s=np.repeat(start_s, 2) + np.tile([0.95e-3, 0.951e-3], count),
        sample_place=(np.arange(2 * count) % 7 == 0).astype(np.int64) * (np.arange(2 * count) != 77_777),
        sample_bytes=nbytes,
    )


def words(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("}text")]


def ring(svg: str) -> tuple[float, float]:
    """Return the position of the mark of the device's peak."""
    circle = next(e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}circle"))
    return float(circle.attrib["cx"]), float(circle.attrib["cy"])


def areas(svg: str, plot_bottom: float) -> list[str]:
    return re.findall(rf'd="(M[\d.]+ {plot_bottom:g}V[^"]*Z)"', svg)


def highest(svg: str, plot_bottom: float) -> float:
    """Return the height in pixels of the highest point of the areas above a base line."""
    return plot_bottom - min(float(y) for d in areas(svg, plot_bottom) for y in re.findall(r"V([\d.]+)", d))


def drawn_bytes(svg: str, top_bytes: float) -> float:
    return highest(svg, DEVICE.bottom) / (DEVICE.bottom - DEVICE.top) * top_bytes


@pytest.mark.parametrize("make", [step, partial(simulated, 6, 2), partial(simulated, 300, 8)], ids=["step", "6", "300"])
def test_highest_point_is_the_peak_of_the_trace(make: Callable[[], Trace]) -> None:
    trace = make()
    peak = trace.peak_bytes("device")
    svg = draw_memory(Columns.of(trace), top_bytes=1.25 * peak)
    half_px = 1.25 * peak / (DEVICE.bottom - DEVICE.top) / 2
    assert abs(drawn_bytes(svg, 1.25 * peak) - peak) <= half_px
    assert any(f"peak {format_bytes(peak)}" in line for line in words(svg))


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_recorded_step_shows_its_peak(stash: StashLocation) -> None:
    model = nn.Sequential(nn.Linear(8, 16), *(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5)))
    config = RelayConfig(micro_batches=2, stash=stash)
    batch = (torch.ones(8, 8), torch.zeros(8, 16))
    device = EmulatedDevice(memory_bytes=100_000)
    with Relay(model, device=device, layers=[*model][1:], loss=_squares, config=config) as relay:
        trace = relay.step(batch).trace
    peak = trace.peak_bytes("device")
    svg = draw_memory(Columns.of(trace), top_bytes=1.25 * peak)
    assert abs(drawn_bytes(svg, 1.25 * peak) - peak) <= 1.25 * peak / (DEVICE.bottom - DEVICE.top) / 2
    assert "budget 100 kB" in " ".join(words(show_memory(trace).svg))
    assert [row[1] for row in memory_table(trace).rows if row[0] == "all"] == [format_bytes(peak)]


def _squares(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def test_a_microsecond_in_a_minute_is_not_lost_and_the_picture_stays_small() -> None:
    columns = big()
    svg = draw_memory(columns, top_bytes=2e10, budget_bytes=15 * 10**9, in_core_bytes=10**12)
    peak = int(columns.sample_bytes[columns.samples_at("device")].sum(axis=1).max())
    assert peak > 10**10 and abs(drawn_bytes(svg, 2e10) - peak) <= 2e10 / (DEVICE.bottom - DEVICE.top) / 2
    assert len(svg) < LIMIT
    assert len(draw_memory(columns, before=columns, now_s=30.0, top_bytes=2e10)) < LIMIT


def test_samples_after_the_cursor_are_not_drawn_as_current() -> None:
    whole = Columns.of(step())
    svg = draw_memory(whole, now_s=3.5)
    peak = max(s.total for s in step().memory if s.place == "device" and s.t_s <= 3.5)
    assert peak < step().peak_bytes("device")
    assert any(f"peak so far {format_bytes(peak)} " in line for line in words(svg))
    assert 'class="ghost"' not in svg and 'class="ghost"' in draw_memory(whole, before=whole, now_s=3.5)


def test_every_column_has_the_categories_of_its_highest_moment() -> None:
    rng = np.random.default_rng(1)
    t_s = np.sort(rng.uniform(0, 10, 500))
    nbytes = rng.integers(0, 1000, (500, len(CATEGORIES)))
    levels = MemoryLevels(t_s, nbytes, nbytes.sum(axis=1), t_s)
    edges = np.linspace(0, 10, 38)
    drawn = levels.column_maxima(edges)
    for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
        inside = [j for j in range(500) if a <= t_s[j] < b or (t_s[j] <= a and (j == 499 or t_s[j + 1] > a))]
        expected = nbytes[max(inside, key=lambda j: (levels.totals[j], -j))] if inside else np.zeros(len(CATEGORIES))
        assert (drawn[i] == expected).all()


def test_the_highest_sample_covers_its_event() -> None:
    """Samples at an event's end are drawn over the event, not as a spike after it."""
    columns = Columns.of(step(layers=1, micro_batches=1, event_s=1.0))
    levels = MemoryLevels.of(columns, "device", columns.events_on("compute"))
    shown = levels.column_maxima(np.array([0.1, 0.9, 0.95, 1.1, 1.9])).sum(axis=1)
    assert list(shown) == [6000, 6000, 6110, 6110]


def test_categories_are_stacked_in_their_colours() -> None:
    svg = draw_memory(Columns.of(step()))
    for category in ("weights", "activations", "stash"):
        assert len(re.findall(rf'<path d="M[^"]*Z" fill="{category_colour(category)}"', svg)) >= 1
    assert not re.search(rf'<path d="M[^"]*Z" fill="{category_colour("other")}"', svg)
    assert {"weights", "optimizer", "gradients", "stash", "activations", "other"} <= set(words(svg))
    assert len(areas(svg, HOST.bottom)) == 2


def test_in_core_is_a_line_if_near_and_a_factor_if_far() -> None:
    columns, peak = Columns.of(step()), step().peak_bytes("device")
    near = draw_memory(columns, in_core_bytes=round(1.2 * peak))
    far = draw_memory(columns, in_core_bytes=12 * peak)
    plain = draw_memory(columns)
    assert any("in core would need" in line and "×" not in line for line in words(near))
    assert any(f"in core would need {format_bytes(12 * peak)} = 12 × this peak" in line for line in words(far))
    live = draw_memory(Columns.of(step(), 3, 6), before=columns, now_s=3.0, in_core_bytes=12 * peak)
    assert any("= 12 × the last step's peak" in line for line in words(live))
    assert highest(far, DEVICE.bottom) == highest(plain, DEVICE.bottom)  # the relay's curve is not squashed


def test_budget_is_labelled_near_or_far() -> None:
    columns = Columns.of(step())
    assert "budget 9 kB" in words(draw_memory(columns, budget_bytes=9000))
    far = draw_memory(columns, budget_bytes=80 * 10**9)
    assert any(line.startswith("budget 80 GB") for line in words(far))
    assert highest(far, DEVICE.bottom) == highest(draw_memory(columns), DEVICE.bottom)


def test_axes_hold_still_while_a_step_runs() -> None:
    trace = step()
    whole, end_s = Columns.of(trace), Columns.of(trace).end_s

    def marks(svg: str) -> list[str]:
        return re.findall(r'<text x="88.0"[^>]*>[^<]*</text>', svg)

    frames = [
        draw_memory(Columns.of(trace, n, 2 * n), before=whole, now_s=end_s * n / 16, budget_bytes=9000)
        for n in range(17)
    ]
    assert len({tuple(marks(svg)) for svg in frames}) == 1
    assert all('class="ghost"' in svg for svg in frames[:15])


def test_layers_are_numbered_forward_then_backward() -> None:
    trace = step(layers=4)
    svg = draw_memory(Columns.of(trace), keys=trace.names)
    strip = [line for line in words(svg) if line.isdecimal()]
    assert strip[: strip.index("3") + 1][-4:] == ["0", "1", "2", "3"] and strip.count("0") >= 2
    assert {"forward →", "backward →", "layer"} <= set(words(svg))
    assert any("backward of layer 0, micro-batch 0" in line for line in words(svg))


@pytest.mark.parametrize("layers", [1, 40, 300])
def test_layer_labels_do_not_overlap(layers: int) -> None:
    trace = simulated(layers, 2)
    root = ElementTree.fromstring(draw_memory(Columns.of(trace), keys=trace.names))
    strip = [e for e in root.iter() if e.tag.endswith("}text") and e.get("fill") and e.text and e.text.isdecimal()]
    placed = sorted((float(e.attrib["x"]), 6.0 * len(e.text or "")) for e in strip)
    assert placed
    assert all(b - a > (w + v) / 2 for (a, w), (b, v) in zip(placed, placed[1:], strict=False))


@pytest.mark.parametrize(
    ("events", "samples"),
    [
        ([], []),
        ([Event("compute", "forward", 0.0, 0.0, "L000", 0, 0, 0)], []),
        ([Event("h2d", "load", 0.0, 1.0, "L000", -1, 9)], [MemorySample(0.5, "device", {"weights": 9})]),
        ([], [MemorySample(0.0, "device", {}), MemorySample(0.0, "host", {})]),
        ([Event("compute", "forward", 1.0, 1.0, "a<b&c", 0, 0, 0)] * 3, [MemorySample(1.0, "device", {"odd": 5})] * 2),
    ],
)
def test_small_traces_are_drawn(events: Sequence[Event], samples: Sequence[MemorySample]) -> None:
    trace = Trace.of(events, samples)
    columns = Columns.of(trace)
    for svg in (draw_memory(columns), draw_memory(columns, before=columns, now_s=0.0, in_core_bytes=5)):
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg
    assert memory_table(trace).rows[-1][0] == "all"


def test_names_are_escaped() -> None:
    event = Event("compute", "forward", 0.0, 1.0, "<script>", 0, 0, 0)
    svg = draw_memory(Columns.of(Trace.of([event], [MemorySample(1.0, "device", {"weights": 7})])))
    assert "<script>" not in svg and any("<script>" in line for line in words(svg))


def test_same_input_same_picture() -> None:
    assert draw_memory(Columns.of(step())) == draw_memory(Columns.of(step()))


def test_the_table_matches_the_picture() -> None:
    trace = step()
    rows = {row[0]: row[1:] for row in memory_table(trace, in_core_bytes=123_000).rows}
    peak = trace.peak_sample("device")
    assert peak is not None and rows["all"] == (format_bytes(peak.total), format_bytes(trace.peak_bytes("host")))
    assert rows["stash"] == (format_bytes(peak.bytes_by_category["stash"]), "0 B")
    assert rows["budget"][0] == "9 kB" and rows["in core (estimate)"][0] == "123 kB"
    picture = show_memory(trace, in_core_bytes=123_000)
    assert "budget 9 kB" in words(picture.svg) and "123 kB" in picture.table.to_text()
