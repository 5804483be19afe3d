"""Picture of the relay at one moment: EPS, link, device and algorithm.

All parts have fixed positions; only fillings and texts change between moments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from l2l_core.trace import LANES, Trace, format_bytes
from workbench.pictures import svg
from workbench.pictures.device_box import draw_device
from workbench.pictures.eps_box import draw_eps
from workbench.pictures.picture import Picture, Table
from workbench.pictures.relay_drawing import micro_batch_label, shortened
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import BLUE, GREY, LANE_NAMES, PURPLE, VERMILION, kind_colour
from workbench.readings import (
    LayerNumbers,
    SlotState,
    StateTimeline,
    StepState,
    algorithm_lines,
    full_name,
    line_text,
    number_layers,
    short_name,
)

WIDTH, HEIGHT = 960.0, 336.0
_TOP = 30.0
_SHELF = (16.0, _TOP, 326.0, 258.0)  # x, y, width, height
_DEVICE = (474.0, _TOP, 246.0, 258.0)
_LINK = (352.0, 112.0)  # x, width
_ALGORITHM = (736.0, _TOP, 208.0)  # x, y, width
_SEAM = 728.0  # px, left edge of the algorithm's half
_LINE_HEIGHT, _TEXT_SIZE = 16.6, 11.0  # px
_CHARACTER_WIDTH = 0.6  # width of a fixed-width character as a share of the text size


@dataclass(frozen=True, kw_only=True)
class RelayScene:
    """Contents of a relay picture that do not depend on the moment.

    Attributes:
        keys: keys of the layers, in order.
        names: dotted names of the layers by key.
        versions: number of updates of each layer.
        frozen: keys of fully frozen layers.
        device: name of the device.
        budget_bytes: memory of the device; None if it has no limit.
        idle: True if no step is under way; the state is then ignored.
    """

    keys: Sequence[str]
    names: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    frozen: Collection[str] = ()
    device: str = ""
    budget_bytes: int | None = None
    idle: bool = False


def draw_relay(state: StepState, keys: Sequence[str], **scene: Any) -> str:
    """Draw the relay picture as an SVG.

    Args:
        state: state from a `StateTimeline`; `StepState()` before the first step.
        keys: keys of the layers, in order.
        scene: further fields of `RelayScene`.
    """
    state, left, right = _draw_halves(state, RelayScene(keys=keys, **scene))
    return svg.document(WIDTH, HEIGHT, "Relay", describe_state(state, keys), [*left, *right])


def relay_html(state: StepState, scene: RelayScene) -> str:
    """Return the relay picture as HTML in two halves, which a narrow page stacks vertically."""
    state, left, right = _draw_halves(state, scene)
    halves = (
        svg.document(_SEAM, HEIGHT, "Relay", describe_state(state, scene.keys), left),
        svg.document(WIDTH - _SEAM, HEIGHT, "Algorithm", "The running line, and the work of every lane.", right, _SEAM),
    )
    return '<div class="l2l-halves">' + "".join(f"<div>{half}</div>" for half in halves) + "</div>"


def _draw_halves(state: StepState, scene: RelayScene) -> tuple[StepState, list[str], list[str]]:
    """Return the state that is drawn, and the parts of both halves of the picture."""
    if scene.idle:
        state = StepState(
            micro_batches=state.micro_batches,
            schedule=state.schedule,
            slots=(SlotState(None, 0.0),) * len(state.slots),
            host=state.host,
            device_peak_bytes=state.device_peak_bytes,
            stash_peak_bytes=state.stash_peak_bytes,
        )
    numbers = number_layers(scene.keys)
    left = [
        *draw_eps(*_SHELF, state, scene.keys, scene.names, scene.versions, frozenset(scene.frozen)),
        *_draw_link(state, numbers),
        *draw_device(*_DEVICE, state, numbers, scene.device, scene.budget_bytes),
        *_draw_foot(state, len(scene.keys)),
    ]
    return state, left, _draw_algorithm(*_ALGORITHM, state, numbers)


STYLE = """
.l2l-halves{display:flex;align-items:flex-start}
.l2l-halves>div:first-child{flex:728 1 0;min-width:0}
.l2l-halves>div:last-child{flex:232 1 0;min-width:0}
@container l2l (max-width:899px){.l2l-halves{flex-direction:column}
.l2l-halves>div:first-child{flex:none;width:100%}
.l2l-halves>div:last-child{flex:none;width:320px;max-width:100%}}
""".replace("\n", "")


def describe_state(state: StepState, keys: Sequence[str]) -> str:
    """Return a description of the moment; `keys` are those of `draw_relay`."""
    numbers = number_layers(keys)
    if state.phase == "idle":
        return "No step is under way; all layers rest in the EPS."
    words = []
    if state.layer is not None:
        kept = ", nothing is recomputed" if state.graph_kept else ""
        words.append(f"Layer {short_name(state.layer, numbers)} computes ({state.kind or state.phase}{kept})")
    elif state.waits_for is not None:
        words.append(f"Compute waits for layer {short_name(state.waits_for, numbers)}")
    words += [
        f"layer {short_name(s.layer, numbers)} is loading" for s in state.slots if s.layer is not None and s.share < 1
    ]
    words += [f"the gradient of layer {short_name(g.layer, numbers)} leaves" for g in state.pushing]
    if state.eps_layer:
        words.append(f"the EPS works on layer {short_name(state.eps_layer, numbers)} ({state.eps_kind})")
    words.append(f"{len(state.updated)} layers are updated")
    return f"{event_label(state).capitalize()}, {format_seconds(state.t_s)}, {state.phase}. {'; '.join(words)}."


def event_label(state: StepState) -> str:
    """Return the number of the event, counted from 1: "event 143 of 528"."""
    total = f" of {state.num_events}" if state.num_events else ""
    return f"event {state.event + 1}{total}"


def _draw_link(state: StepState, numbers: LayerNumbers) -> list[str]:
    x, width = _LINK
    h2d, d2h = state.lanes.get("h2d"), state.lanes.get("d2h")
    loading = next((slot.layer for slot in state.slots if slot.layer is not None and slot.share < 1), None)
    pushing = state.pushing[0].layer if state.pushing else None
    middle = x + width / 2
    parts = [svg.text(middle, 20, "link", size=15, strong=True, anchor="middle")]
    depth_first = state.schedule == "depth_first"
    shown = [
        ("load", h2d, loading, BLUE, 1),
        ("push", d2h, pushing, VERMILION, -1),
        ("batch" if depth_first or (h2d is not None and h2d.kind == "batch") else "fetch", h2d, None, PURPLE, 1),
    ]
    if not depth_first:  # depth first has no stash
        shown.append(("stash", d2h, None, PURPLE, -1))
    for row, (kind, lane_work, pending, colour, direction) in enumerate(shown):
        y = _TOP + 46 + row * 62
        work = lane_work if lane_work is not None and lane_work.kind == kind else None
        layer = pending if work is None else work.layer
        # pale: the copy has begun, but the lane carries another one at the moment
        strength = 1.0 if work is not None else 0.55 if pending is not None else 0.16
        words = f"{kind} {short_name(layer, numbers)}" if layer else kind
        if kind in ("stash", "fetch", "batch") and work is not None and work.k >= 0:
            words = f"{kind} {micro_batch_label(work.k, state.micro_batches)}"
        words, style = shortened(words, 13), "" if work is not None or pending else "dim"
        parts.append(_arrow(x + 4, y, width - 8, direction, colour, strength))
        parts.append(svg.text(middle, y - 12, words, size=14, strong=work is not None, anchor="middle", style=style))
        if work is not None:
            parts.append(svg.text(middle, y + 22, format_bytes(work.nbytes), size=11, anchor="middle", style="dim"))
    return parts


def _arrow(x: float, y: float, width: float, direction: int, colour: str, strength: float) -> str:
    """Return a broad arrow to the right (`direction` 1) or to the left (-1)."""
    tail, tip = (x, x + width) if direction > 0 else (x + width, x)
    neck = tip - direction * 13
    d = f"M{tail:.1f} {y - 4:.1f}H{neck:.1f}V{y - 9:.1f}L{tip:.1f} {y:.1f}L{neck:.1f} {y + 9:.1f}V{y + 4:.1f}H{tail:.1f}z"
    return f'<path d="{d}" fill="{colour}" fill-opacity="{strength:g}"/>'


def _draw_foot(state: StepState, layers: int) -> list[str]:
    y = 306.0
    width = _SEAM - 24
    parts = [svg.rect(16, y, width, 3, style="well")]
    if state.phase == "idle":
        return [*parts, svg.text(16, y + 20, f"no step is under way: {layers} layers rest in the EPS", size=13)]
    if state.num_events:
        parts.append(svg.rect(16, y, width * (state.event + 1) / state.num_events, 3, fill=GREY))
    parts.append(svg.text(16, y + 20, event_label(state), size=13))
    parts.append(svg.text(352 + 56, y + 20, format_seconds(state.t_s), size=13, anchor="middle"))
    parts.append(svg.text(474, y + 20, state.phase, size=13, strong=True))
    return parts


def _draw_algorithm(x: float, top: float, width: float, state: StepState, numbers: LayerNumbers) -> list[str]:
    """Draw the pseudocode with a bar behind the running line, and the lanes below it."""
    parts = [svg.text(x, 20, "algorithm", size=15, strong=True)]
    other_lines = dict(state.other_lines)
    for number, line in enumerate(algorithm_lines(state.schedule)):
        y = top + 4 + number * _LINE_HEIGHT
        if number == state.line:
            style = "code strong"
            parts += [
                svg.rect(x, y, width, _LINE_HEIGHT, style="well"),
                svg.rect(x, y, 4, _LINE_HEIGHT, fill="currentColor"),
            ]
        elif number in other_lines:
            style, work = "code", state.lanes.get(other_lines[number])
            parts.append(svg.rect(x, y + 3, 4, 10.6, fill=GREY if work is None else kind_colour(work.kind)))
        else:
            style = "code dim"
        words, left = line_text(number, state.graph_kept, state.schedule), x + 9 + line.depth * 13
        size = min(_TEXT_SIZE, (x + width - left) / (_CHARACTER_WIDTH * len(words)))
        parts.append(svg.text(left, y + 12, words, size=round(size, 1), style=style))
    return [*parts, *_draw_lanes(x, state, numbers)]


def _draw_lanes(x: float, state: StepState, numbers: LayerNumbers) -> Iterator[str]:
    for row, lane in enumerate(LANES):
        y = 234.0 + row * 17
        work = state.lanes.get(lane)
        yield svg.text(x, y, LANE_NAMES.get(lane, lane), size=11, style="dim")
        yield svg.rect(x + 84, y - 9, 9, 9, fill=kind_colour(work.kind) if work else "", style="" if work else "well")
        if work:
            words = work.kind if work.layer in ("", work.kind) else f"{work.kind} {short_name(work.layer, numbers)}"
            words = shortened(f"{words}  {micro_batch_label(work.k, state.micro_batches)}".rstrip(), 19)
        else:
            words = _describe_waiting(state, numbers) if lane == "compute" else ""
        if words:
            yield svg.text(x + 97, y, words, size=11, style="" if work else "dim")


def _describe_waiting(state: StepState, numbers: LayerNumbers) -> str:
    if state.waits_for:
        return shortened(f"waits for {short_name(state.waits_for, numbers)}", 19)
    return "waits" if state.layer else ""


def relay_table(state: StepState, keys: Sequence[str]) -> Table:
    """Return the moment as a table: lanes, slots, gradients, stash and memory."""
    numbers = number_layers(keys)

    def name(key: str | None) -> str:
        return full_name(key, numbers) if key else ""

    rows: list[tuple[str, str]] = [("phase", state.phase)]
    for lane in LANES:
        work = state.lanes.get(lane)
        words = "at rest"
        if work is not None:
            parts = work.kind, name(work.layer), micro_batch_label(work.k, state.micro_batches)
            words = " ".join(filter(None, parts))
        rows.append((LANE_NAMES.get(lane, lane), words))
    idle = f"waits for {name(state.waits_for)}" if state.waits_for else "nothing"
    rows.append(("computes", name(state.layer) or idle))
    for j, slot in enumerate(state.slots):
        share = "" if slot.share >= 1 else f", loading {100 * slot.share:.0f} %"
        letter = chr(ord("A") + j) if j < 26 else j
        rows.append((f"slot {letter}", f"{name(slot.layer)}{share}" if slot.layer else "empty"))
    rows.append(("gradient adds up", name(state.accumulating) or "none"))
    if state.waiting_gradients:
        rows.append(("gradient waits for further micro-batches", ", ".join(map(name, state.waiting_gradients))))
    pushing = ", ".join(f"{name(push.layer)} {100 * push.share:.0f} %" for push in state.pushing)
    rows.append(("gradient leaves", pushing or "none"))
    rows.append(("updated", f"{len(state.updated)} of {len(keys)}"))
    if state.schedule != "depth_first":
        rows.append(("stashed inputs", str(state.num_stashed)))
    else:
        rows.append(("layers with a graph", f"{state.num_graphs} of {len(keys)}"))
    for place, used in (("device", state.device), ("host", state.host)):
        stash = f", stash {format_bytes(used['stash'])}" if used.get("stash") else ""
        rows.append((f"{place} memory", f"{format_bytes(sum(used.values()))}{stash}"))
    if state.line is not None:
        rows.append(("algorithm", line_text(state.line, state.graph_kept, state.schedule)))
    title = f"{event_label(state)}, {format_seconds(state.t_s)}" if state.phase != "idle" else "no step"
    return Table(title, ("part", "state"), rows)


def show_relay(trace: Trace, i: int | None = None) -> Picture:
    """Return the relay at event `i` of a step, by start; default a moment in mid-backward with every lane busy."""
    moments, moment = StateTimeline.of(trace), StepState()
    if moments.count:
        moment = moments.at_event(moments.busiest_event() if i is None else i)
    budget_bytes = trace.settings.get("memory_bytes")
    drawn = draw_relay(moment, moments.keys, names=trace.names, device=trace.device, budget_bytes=budget_bytes)
    table = relay_table(moment, moments.keys)
    if trace.failed is not None:
        table = replace(table, title=f"{table.title}, of a step that {trace.failed}")
    return Picture(drawn, table)
