"""The device in the relay picture: weight slots, gradients, stash and memory."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core.trace import CATEGORIES, format_bytes
from workbench.pictures import svg
from workbench.pictures.relay_drawing import draw_stash, shortened
from workbench.pictures.theme import BLUE, CATEGORY_COLOURS, GREY, VERMILION, kind_colour, text_colour_on
from workbench.readings import LayerNumbers, SlotState, StepState, short_name

_MAX_SLOTS = 8


def draw_device(
    x: float,
    y: float,
    width: float,
    height: float,
    state: StepState,
    numbers: LayerNumbers,
    device: str,
    budget_bytes: int | None,
) -> list[str]:
    """Draw the device in a box at least 250 px high, with a title above; sizes are in px."""
    parts = [
        svg.text(x, y - 10, "device", size=15, strong=True),
        svg.text(x + 58, y - 10, shortened(device, 30), style="dim"),
        svg.rect(x, y, width, height, style="card", r=6),
    ]
    slots = state.slots or (SlotState(None, 0.0),) * 2  # before the first step: the default number of slots
    shown = _visible_slots(slots, state)
    columns = 1 if len(shown) <= 5 else 2
    rows = -(-len(shown) // columns)
    pitch, wide = 128.0 / rows, (width - 16) / columns
    for place, (j, slot) in enumerate(shown):
        column, row = divmod(place, rows)
        left, top = x + 8 + column * wide, y + 8 + row * pitch
        parts += _draw_slot(left, top, wide - 4 * (columns - 1), pitch - 5, j, slot, state, numbers)
    if len(slots) > len(shown):
        words = f"and {len(slots) - len(shown)} more"
        parts.append(svg.text(x + width - 10, y + 136, words, size=9, anchor="end", style="dim"))
    parts += _draw_gradients(x + 10, y + 138, width - 20, state, numbers)
    if state.schedule == "depth_first":
        parts += _draw_graphs(x + 10, y + 176, width - 20, state, len(numbers))
    else:
        parts += draw_stash(x + 10, y + 176, width - 20, state, "device")
    parts += _draw_memory(x + 10, y + 217, width - 20, state, budget_bytes)
    work = state.lanes.get("compute")
    box = svg.rect(x + 10, y + 242, 9, 9, fill=GREY if state.device else "", style="" if state.device else "well")
    if work is not None and work.layer == "shell":
        words = f"shell {work.kind if work.kind == 'loss' else 'runs'}"
        return [*parts, box, svg.text(x + 24, y + 250, words, size=11, strong=True)]
    return [*parts, box, svg.text(x + 24, y + 250, "shell", size=11, style="dim")]


def _visible_slots(slots: Sequence[SlotState], state: StepState) -> Sequence[tuple[int, SlotState]]:
    """Return the first slots with their numbers; an active slot beyond them takes the last place."""
    numbered = list(enumerate(slots))
    shown, rest = numbered[:_MAX_SLOTS], numbered[_MAX_SLOTS:]
    active = [one for one in rest if one[1].layer is not None and one[1].layer in (state.layer, state.waits_for)]
    return [*shown[:-1], active[0]] if active else shown


def _draw_slot(
    x: float,
    y: float,
    width: float,
    height: float,
    number: int,
    slot: SlotState,
    state: StepState,
    numbers: LayerNumbers,
) -> list[str]:
    """Draw one weight slot: its letter, its layer, and the layer's activity."""
    narrow, low = width < 160, height < 50
    middle = y + height / 2
    letter = chr(ord("A") + number) if number < 26 else str(number)
    parts = [svg.rect(x, y, width, height, style="well", r=4)]
    computes = slot.layer is not None and slot.layer == state.layer
    colour = kind_colour("backward" if state.kind == "backward" else "forward") if computes else BLUE
    if slot.layer is not None:
        parts.append(svg.rect(x, y, 30, height, fill=colour, r=4))
    ink = text_colour_on(colour) if slot.layer is not None else ""
    parts.append(svg.text(x + 15, middle + 5, letter, size=14, strong=True, anchor="middle", fill=ink))
    if slot.layer is None:
        return [*parts, svg.text(x + 40, middle + 5, "empty", size=13, style="dim")]
    size = 15.0 if narrow or low else 30.0
    big = shortened(short_name(slot.layer, numbers), 6)
    turn = state.k + 1
    verb = {"backward": "back", "loss": "loss"}.get(state.kind, "runs")
    if computes:
        words = f"all {state.micro_batches}" if turn < 1 else f"k = {turn} of {state.micro_batches}"
        words = words if low else f"{verb} {words}"
        brief, share = f"{turn}/{state.micro_batches}" if turn else verb, turn / state.micro_batches if turn else 1.0
    elif slot.share < 1.0:
        verb = "awaited" if slot.layer == state.waits_for else "loading"
        words, brief, share = f"{verb} {100 * slot.share:.0f} %", f"{100 * slot.share:.0f} %", slot.share
    else:
        words, brief, share = "ready", "ready", 1.0
    busy = computes or slot.share < 1.0
    fitted = min(size, 78.0 / max(3, len(big))) if size > 20 and len(big) > 2 else size
    parts.append(svg.text(x + 38, middle + size * 0.36, big, size=fitted, strong=True))
    # Only the topmost painted element receives pointer events, so this one is transparent and drawn last.
    target = svg.rect(x, y, width, height, fill="transparent", r=4, key=slot.layer)
    if narrow:
        return [*parts, svg.text(x + width - 4, middle + 4, brief, size=10.5, strong=busy, anchor="end"), target]
    bar = (x + width - 66, middle - 4, 60.0) if low else (x + 102, middle - 4, width - 110)
    if low:
        parts.append(svg.text(x + 78, middle + 4, words, size=11, strong=busy))
    else:
        parts.append(svg.text(x + 102, middle - 11, words, size=12.5, strong=busy))
        if slot.layer in numbers:
            parts.append(svg.text(x + 102, middle + 21, f"key {shortened(slot.layer, 18)}", size=10, style="dim"))
    if computes:
        return [*parts, *_draw_turns(*bar, state, colour), target]
    filled = [svg.rect(bar[0], bar[1], bar[2] * share, 9, fill=colour)] if share > 0 else []
    return [*parts, svg.rect(*bar, 9, style="well"), *filled, target]


def _draw_turns(x: float, y: float, width: float, state: StepState, colour: str) -> list[str]:
    """Draw the micro-batches of a visit as segments; finished and running ones are filled."""
    count = state.micro_batches
    if state.k < 0 or count > 32:
        share = 1.0 if state.k < 0 else (state.k + 1) / count
        return [svg.rect(x, y, width, 9, style="well"), svg.rect(x, y, width * share, 9, fill=colour)]
    pitch = min(16.0, width / count)
    gap = min(3.0, pitch * 0.25)
    boxes = [f"M{x + i * pitch:.1f} {y:.1f}h{pitch - gap:.1f}v9h-{pitch - gap:.1f}z" for i in range(count)]
    parts = [svg.path("".join(boxes), style="rule")]
    if state.k:
        parts.append(f'<path d="{"".join(boxes[: state.k])}" fill="{colour}" fill-opacity="0.5"/>')
    return [*parts, svg.path(boxes[min(state.k, count - 1)], fill=colour, stroke="currentColor", width=1)]


def _draw_gradients(x: float, y: float, width: float, state: StepState, numbers: LayerNumbers) -> list[str]:
    """Draw the accumulating gradient, with the number of waiting ones, and the gradient being pushed."""
    parts = [svg.text(x, y + 16, "gradient", size=11, style="dim")]
    wide = (width - 56) / 2 - 3
    pushed_words, pushed_share = "", 0.0
    for pushed in state.pushing[:1]:
        more = f" +{len(state.pushing) - 1}" if len(state.pushing) > 1 else ""
        pushed_words, pushed_share = f"{short_name(pushed.layer, numbers)} leaves{more}", 1 - pushed.share
    others = len(state.waiting_gradients)
    adding = f"{others} wait" if others else ""
    if state.accumulating:
        name = short_name(state.accumulating, numbers)
        adding = f"adds {name} +{others}" if others else f"adds up {name}"
    for left, words, share in ((x + 56, adding, 1.0), (x + 62 + wide, pushed_words, pushed_share)):
        parts.append(svg.rect(left, y, wide, 24, style="well", r=4))
        if words:
            parts.append(svg.rect(left, y + 19, wide * share, 5, fill=VERMILION))
            parts.append(svg.text(left + wide / 2, y + 14, shortened(words, 14), size=12, strong=True, anchor="middle"))
    return parts


def _draw_graphs(x: float, y: float, width: float, state: StepState, layers: int) -> list[str]:
    """Draw the number of layers that keep a graph of the running micro-batch."""
    wide = width - 56 - 96
    share = min(1.0, state.num_graphs / max(1, layers))
    return [
        svg.text(x, y + 10, "graphs", size=11, style="dim"),
        svg.rect(x + 56, y, wide, 12, style="well"),
        *([svg.rect(x + 56, y, wide * share, 12, fill=CATEGORY_COLOURS["activations"])] if share else []),
        svg.text(x + width, y + 10, f"{state.num_graphs} of {layers} layers", size=11, anchor="end"),
    ]


def _draw_memory(x: float, y: float, width: float, state: StepState, budget_bytes: int | None) -> list[str]:
    """Draw the bytes on the device by category, against the budget or the peak."""
    used = state.device
    total = sum(used.values())
    whole = max(budget_bytes or 0, state.device_peak_bytes, total, 1)  # all are 0 before the first step
    limit = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
    parts = [
        svg.text(x, y - 6, "memory", size=11, style="dim"),
        svg.text(x + width, y - 6, f"{format_bytes(total)}{limit}", size=13, strong=True, anchor="end"),
        svg.rect(x, y, width, 14, style="well"),
    ]
    at = x
    for category in CATEGORIES:
        if wide := width * used.get(category, 0) / whole:
            tip = f"{category} {format_bytes(used[category])}"
            parts.append(svg.rect(at, y, wide, 14, fill=CATEGORY_COLOURS[category], tip=tip))
            at += wide
    if budget_bytes:
        edge = x + width * budget_bytes / whole
        parts.append(svg.path(f"M{edge:.1f} {y - 3:.1f}V{y + 17:.1f}", style="axis", width=2))
    return parts
