"""The relay at one moment, as a picture: the EPS with its layers, the link, the device with its slots, the algorithm.

Everything has a fixed place: only fillings and words change from one moment to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from l2l_core.trace import LANES, Trace, format_bytes
from workbench.pictures import svg
from workbench.pictures.algorithm import draw_algorithm
from workbench.pictures.device_box import draw_device
from workbench.pictures.eps_box import draw_eps
from workbench.pictures.picture import Picture, Table
from workbench.pictures.relay_drawing import micro_batch_label, shortened, sized_text
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import (
    BLUE,
    GREY,
    LANE_NAMES,
    PURPLE,
    VERMILION,
)
from workbench.readings import (
    LayerNumbers,
    SlotState,
    StateTimeline,
    StepState,
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
_SEAM = 728.0  # left of it memory and link, right of it the algorithm


@dataclass(frozen=True, kw_only=True)
class RelayScene:
    """Says what a relay picture shows beside the moment.

    Attributes:
        keys: the stack, in order, which says the layers' numbers.
        names: dotted names of the layers by key.
        versions: number of updates of every layer.
        frozen: keys of layers of which nothing is trained.
        device: name of the device.
        budget_bytes: its memory, None if it has no limit.
        idle: whether no step is under way: layers rest, whatever the moment says.
    """

    keys: Sequence[str]
    names: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    frozen: Collection[str] = ()
    device: str = ""
    budget_bytes: int | None = None
    idle: bool = False


def draw_relay(state: StepState, keys: Sequence[str], **scene: Any) -> str:
    """Draw the picture as an SVG string.

    Args:
        moment: from `Moments`; `Moment()` if there is no step yet.
        keys: the stack, in order.
        scene: further fields of `Scene`.
    """
    state, left, right = _draw_halves(state, RelayScene(keys=keys, **scene))
    return svg.document(WIDTH, HEIGHT, "Relay", describe_state(state, keys), [*left, *right])


def relay_html(state: StepState, scene: RelayScene) -> str:
    """Write the same as HTML in two halves, memory with link, and algorithm; a narrow page puts one below the other."""
    state, left, right = _draw_halves(state, scene)
    halves = (
        svg.document(_SEAM, HEIGHT, "Relay", describe_state(state, scene.keys), left),
        svg.document(WIDTH - _SEAM, HEIGHT, "Algorithm", "The line that runs, and what every lane does.", right, _SEAM),
    )
    return '<div class="l2l-halves">' + "".join(f"<div>{half}</div>" for half in halves) + "</div>"


def _draw_halves(state: StepState, scene: RelayScene) -> tuple[StepState, list[str], list[str]]:
    """The moment as it is shown, and the parts of the picture on both sides of the seam."""
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
    return state, left, draw_algorithm(*_ALGORITHM, state, numbers)


STYLE = """
.l2l-halves{display:flex;align-items:flex-start}
.l2l-halves>div:first-child{flex:728 1 0;min-width:0}
.l2l-halves>div:last-child{flex:232 1 0;min-width:0}
@container l2l (max-width:899px){.l2l-halves{flex-direction:column}
.l2l-halves>div:first-child{flex:none;width:100%}
.l2l-halves>div:last-child{flex:none;width:320px;max-width:100%}}
""".replace("\n", "")


def describe_state(state: StepState, keys: Sequence[str]) -> str:
    """Say the moment in a sentence or two; `keys` are those of `draw_relay`."""
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
    at = f"{event_label(state).capitalize()}, {format_seconds(state.t_s)}, {state.phase}. "
    return at + "; ".join(words) + "."


def event_label(state: StepState) -> str:
    """Say which event it is, counted from 1: "event 143 of 528"."""
    of = f" of {state.num_events}" if state.num_events else ""
    return f"event {state.event + 1}{of}"


# -- the link ------------------------------------------------------------------------------------------------------------


def _draw_link(state: StepState, numbers: LayerNumbers) -> list[str]:
    x, width = _LINK
    h2d, d2h = state.lanes.get("h2d"), state.lanes.get("d2h")
    loading = next((slot for slot in state.slots if slot.layer is not None and slot.share < 1), None)
    leaving = state.pushing[0] if state.pushing else None
    parts = [sized_text(x + width / 2, 20, "link", size=15, strong=True, anchor="middle")]
    depth_first = state.schedule == "depth_first"
    shown = [
        ("load", h2d, loading.layer if loading else None, BLUE, 1),
        ("push", d2h, leaving.layer if leaving else None, VERMILION, -1),
        ("batch" if depth_first or (h2d is not None and h2d.kind == "batch") else "fetch", h2d, None, PURPLE, 1),
    ]
    if not depth_first:  # otherwise nothing is stashed
        shown.append(("stash", d2h, None, PURPLE, -1))
    for row, (kind, work, under_way, colour, way) in enumerate(shown):
        y = _TOP + 46 + row * 62
        moves = work is not None and work.kind == kind
        layer = work.layer if moves and work is not None else under_way
        # in between: under way, but the lane does not carry it at this moment
        strength = 1.0 if moves else 0.55 if under_way is not None else 0.16
        words = kind if layer in (None, "") else f"{kind} {short_name(layer or '', numbers)}"
        if kind in ("stash", "fetch", "batch") and moves and work is not None and work.k >= 0:
            words = f"{kind} {micro_batch_label(work.k, state.micro_batches)}"
        parts.append(_arrow(x + 4, y, width - 8, way, colour, strength))
        parts.append(
            sized_text(
                x + width / 2,
                y - 12,
                shortened(words, 13),
                size=14,
                strong=moves,
                anchor="middle",
                style="" if moves or under_way else "dim",
            )
        )
        if moves and work is not None:
            parts.append(
                sized_text(x + width / 2, y + 22, format_bytes(work.nbytes), size=11, anchor="middle", style="dim")
            )
    return parts


def _arrow(x: float, y: float, width: float, direction: int, colour: str, strength: float) -> str:
    """A broad arrow to the right (`way` 1) or to the left (-1)."""
    tail, tip = (x, x + width) if direction > 0 else (x + width, x)
    neck = tip - direction * 13
    d = f"M{tail:.1f} {y - 4:.1f}H{neck:.1f}V{y - 9:.1f}L{tip:.1f} {y:.1f}L{neck:.1f} {y + 9:.1f}V{y + 4:.1f}H{tail:.1f}z"
    return f'<path d="{d}" fill="{colour}" fill-opacity="{strength:g}"/>'


# -- the foot ----------------------------------------------------------------------------------------------------------


def _draw_foot(state: StepState, layers: int) -> list[str]:
    y = 306.0
    width = _SEAM - 24
    parts = [svg.rect(16, y, width, 3, style="well")]
    if state.phase == "idle":
        return [*parts, sized_text(16, y + 20, f"no step is under way: {layers} layers rest in the EPS", size=13)]
    if state.num_events:
        parts.append(svg.rect(16, y, width * (state.event + 1) / state.num_events, 3, fill=GREY))
    parts.append(sized_text(16, y + 20, event_label(state), size=13))
    parts.append(sized_text(352 + 56, y + 20, format_seconds(state.t_s), size=13, anchor="middle"))
    parts.append(sized_text(474, y + 20, state.phase, size=13, strong=True))
    return parts


# -- in words ------------------------------------------------------------------------------------------------------------


def relay_table(state: StepState, keys: Sequence[str]) -> Table:
    """Say the same in words: what lanes do, what slots hold, where gradients and inputs are."""
    numbers = number_layers(keys)

    def call(key: str | None) -> str:
        return full_name(key, numbers) if key else ""

    rows: list[tuple[str, str]] = [("phase", state.phase)]
    for lane in LANES:
        work = state.lanes.get(lane)
        words = (
            "at rest"
            if work is None
            else " ".join(
                word for word in (work.kind, call(work.layer), micro_batch_label(work.k, state.micro_batches)) if word
            )
        )
        rows.append((LANE_NAMES.get(lane, lane), words))
    rows.append(
        ("computes", call(state.layer) or (f"waits for {call(state.waits_for)}" if state.waits_for else "nothing"))
    )
    for j, slot in enumerate(state.slots):
        share = "" if slot.share >= 1 else f", loading {100 * slot.share:.0f} %"
        rows.append(
            (f"slot {chr(ord('A') + j) if j < 26 else j}", f"{call(slot.layer)}{share}" if slot.layer else "empty")
        )
    rows.append(("gradient adds up", call(state.accumulating) or "none"))
    if state.waiting_gradients:
        rows.append(("gradient waits for further micro-batches", ", ".join(map(call, state.waiting_gradients))))
    rows.append(
        ("gradient leaves", ", ".join(f"{call(g.layer)} {100 * g.share:.0f} %" for g in state.pushing) or "none")
    )
    rows.append(("updated", f"{len(state.updated)} of {len(keys)}"))
    of_graphs = ("layers with a graph", f"{state.num_graphs} of {len(keys)}")
    rows.append(("stashed inputs", str(state.num_stashed)) if state.schedule == "breadth_first" else of_graphs)
    for place, used in (("device", state.device), ("host", state.host)):
        stash = f", stash {format_bytes(used['stash'])}" if used.get("stash") else ""
        rows.append((f"{place} memory", f"{format_bytes(sum(used.values()))}{stash}"))
    if state.line is not None:
        rows.append(("algorithm", line_text(state.line, state.graph_kept, state.schedule)))
    title = f"{event_label(state)}, {format_seconds(state.t_s)}" if state.phase != "idle" else "no step"
    return Table(title, ("what", "state"), rows)


def show_relay(trace: Trace, i: int | None = None) -> Picture:
    """Show a step at event `i`, by time of start; default is a moment in mid-backward at which every lane works."""
    moments = StateTimeline.of(trace)
    if not moments.count:
        moment = StepState()
    else:
        moment = moments.at_event(moments.busiest_event() if i is None else i)
    budget_bytes = trace.settings.get("memory_bytes")
    drawn = draw_relay(moment, moments.keys, names=trace.names, device=trace.device, budget_bytes=budget_bytes)
    table = relay_table(moment, moments.keys)
    if trace.failed is not None:
        table = replace(table, title=f"{table.title}, of a step that {trace.failed}")
    return Picture(drawn, table)
