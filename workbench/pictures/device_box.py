"""The device of the relay picture: its weight slots, gradients, stash and memory."""

from __future__ import annotations

from collections.abc import Sequence

from l2l_core.trace import CATEGORIES, format_bytes
from workbench.pictures import svg
from workbench.pictures.relay_drawing import draw_stash, shortened, sized_text
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
    """Draw the device in a box of at least 250 pixels height, with a title above it; sizes are in pixels."""
    parts = [
        sized_text(x, y - 10, "device", size=15, strong=True),
        sized_text(x + 58, y - 10, shortened(device, 30), style="dim"),
        svg.rect(x, y, width, height, style="card", r=6),
    ]
    slots = state.slots or (SlotState(None, 0.0),) * 2  # before the first step: as many as the default settings have
    shown = _visible_slots(slots, state)
    columns = 1 if len(shown) <= 5 else 2
    rows = -(-len(shown) // columns)
    pitch, wide = 128.0 / rows, (width - 16) / columns
    for place, (j, slot) in enumerate(shown):
        column, row = divmod(place, rows)
        parts += _draw_slot(
            x + 8 + column * wide, y + 8 + row * pitch, wide - 4 * (columns - 1), pitch - 5, j, slot, state, numbers
        )
    if len(slots) > len(shown):
        parts.append(
            sized_text(
                x + width - 10, y + 136, f"and {len(slots) - len(shown)} more", size=9, anchor="end", style="dim"
            )
        )
    parts += _draw_gradients(x + 10, y + 138, width - 20, state, numbers)
    if state.schedule == "depth_first":
        parts += _draw_graphs(x + 10, y + 176, width - 20, state, len(numbers))
    else:
        parts += draw_stash(x + 10, y + 176, width - 20, state, "device")
    parts += _draw_memory(x + 10, y + 217, width - 20, state, budget_bytes)
    work = state.lanes.get("compute")
    runs = work is not None and work.layer == "shell"
    box = svg.rect(x + 10, y + 242, 9, 9, fill=GREY) if state.device else svg.rect(x + 10, y + 242, 9, 9, style="well")
    words = f"shell {work.kind if work.kind == 'loss' else 'runs'}" if work is not None and runs else "shell"
    parts += [box, sized_text(x + 24, y + 250, words, size=11, strong=runs, style="" if runs else "dim")]
    return parts


def _visible_slots(slots: Sequence[SlotState], state: StepState) -> Sequence[tuple[int, SlotState]]:
    """The slots that there is room for, with their numbers: the first ones; the one at work comes last if it is none of them."""
    shown = list(enumerate(slots[:_MAX_SLOTS]))
    rest = [(j, slot) for j, slot in enumerate(slots) if j >= _MAX_SLOTS]
    at_work = [one for one in rest if one[1].layer is not None and one[1].layer in (state.layer, state.waits_for)]
    return [*shown[: _MAX_SLOTS - 1], *at_work[:1]] if at_work else shown


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
    """One weight slot: its letter, the layer in it, and what that layer does."""
    narrow, low = width < 160, height < 50
    middle = y + height / 2
    letter = chr(ord("A") + number) if number < 26 else str(number)
    parts = [svg.rect(x, y, width, height, style="well", r=4)]
    computes = slot.layer is not None and slot.layer == state.layer
    colour = kind_colour("backward" if state.kind == "backward" else "forward") if computes else BLUE
    if slot.layer is not None:
        parts.append(svg.rect(x, y, 30, height, fill=colour, r=4))
    parts.append(
        sized_text(
            x + 15,
            middle + 5,
            letter,
            size=14,
            strong=True,
            anchor="middle",
            fill=text_colour_on(colour) if slot.layer is not None else "",
        )
    )
    if slot.layer is None:
        return [*parts, sized_text(x + 40, middle + 5, "empty", size=13, style="dim")]
    size = 15.0 if narrow or low else 30.0
    big = shortened(short_name(slot.layer, numbers), 6)
    at = state.k + 1
    verb = {"backward": "back", "loss": "loss"}.get(state.kind, "runs")
    if computes:
        words = f"{verb} all {state.micro_batches}" if at < 1 else f"{verb} k = {at} of {state.micro_batches}"
        words = words.removeprefix(f"{verb} ") if low else words
        brief, share = f"{at}/{state.micro_batches}" if at else verb, at / state.micro_batches if at else 1.0
    elif slot.share < 1.0:
        verb = "awaited" if slot.layer == state.waits_for else "loading"
        words, brief, share = f"{verb} {100 * slot.share:.0f} %", f"{100 * slot.share:.0f} %", slot.share
    else:
        words, brief, share = "ready", "ready", 1.0
    busy = computes or slot.share < 1.0
    parts.append(
        sized_text(
            x + 38,
            middle + size * 0.36,
            big,
            size=min(size, 78.0 / max(3, len(big))) if size > 20 and len(big) > 2 else size,
            strong=True,
        )
    )
    # transparent and last: a pointer meets only what is painted, and of that what is on top
    touched = svg.rect(x, y, width, height, fill="transparent", r=4, key=slot.layer)
    if narrow:
        return [*parts, sized_text(x + width - 4, middle + 4, brief, size=10.5, strong=busy, anchor="end"), touched]
    bar = (x + width - 66, middle - 4, 60.0) if low else (x + 102, middle - 4, width - 110)
    if low:
        parts.append(sized_text(x + 78, middle + 4, words, size=11, strong=busy))
    else:
        parts.append(sized_text(x + 102, middle - 11, words, size=12.5, strong=busy))
        if slot.layer in numbers:
            parts.append(sized_text(x + 102, middle + 21, f"key {shortened(slot.layer, 18)}", size=10, style="dim"))
    if computes:
        return [*parts, *_draw_turns(*bar, state, colour), touched]
    filled = [svg.rect(bar[0], bar[1], bar[2] * share, 9, fill=colour)] if share > 0 else []
    return [*parts, svg.rect(*bar, 9, style="well"), *filled, touched]


def _draw_turns(x: float, y: float, width: float, state: StepState, colour: str) -> list[str]:
    """The micro-batches of a visit as segments; those that are over or at work are filled."""
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
    """Two places: the gradient that is being added up, with those that wait for more, and the one that leaves."""
    parts = [sized_text(x, y + 16, "gradient", size=11, style="dim")]
    wide = (width - 56) / 2 - 3
    leaving = state.pushing[0] if state.pushing else None
    more = f" +{len(state.pushing) - 1}" if len(state.pushing) > 1 else ""
    others = len(state.waiting_gradients)
    adding = f"{others} wait" if others else ""
    if state.accumulating:
        name = short_name(state.accumulating, numbers)
        adding = f"adds {name} +{others}" if others else f"adds up {name}"
    for j, (words, share) in enumerate(
        (
            (adding, 1.0),
            (
                f"{short_name(leaving.layer, numbers)} leaves{more}" if leaving else "",
                1 - leaving.share if leaving else 0.0,
            ),
        )
    ):
        left = x + 56 + j * (wide + 6)
        parts.append(svg.rect(left, y, wide, 24, style="well", r=4))
        if words:
            parts.append(svg.rect(left, y + 19, wide * share, 5, fill=VERMILION))
            parts.append(
                sized_text(left + wide / 2, y + 14, shortened(words, 14), size=12, strong=True, anchor="middle")
            )
    return parts


def _draw_graphs(x: float, y: float, width: float, state: StepState, layers: int) -> list[str]:
    """How many layers have the graph of the micro-batch at work."""
    wide = width - 56 - 96
    share = min(1.0, state.num_graphs / max(1, layers))
    return [
        sized_text(x, y + 10, "graphs", size=11, style="dim"),
        svg.rect(x + 56, y, wide, 12, style="well"),
        *([svg.rect(x + 56, y, wide * share, 12, fill=CATEGORY_COLOURS["activations"])] if share else []),
        sized_text(x + width, y + 10, f"{state.num_graphs} of {layers} layers", size=11, anchor="end"),
    ]


def _draw_memory(x: float, y: float, width: float, state: StepState, budget_bytes: int | None) -> list[str]:
    """Bytes on the device by category, against the budget or the highest known."""
    used = state.device
    total = sum(used.values())
    whole = max(budget_bytes or 0, state.device_peak_bytes, total, 1)  # 1: before the first step all of them are 0
    limit = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
    parts = [
        sized_text(x, y - 6, "memory", size=11, style="dim"),
        sized_text(x + width, y - 6, f"{format_bytes(total)}{limit}", size=13, strong=True, anchor="end"),
        svg.rect(x, y, width, 14, style="well"),
    ]
    at = x
    for category in CATEGORIES:
        if wide := width * used.get(category, 0) / whole:
            parts.append(
                svg.rect(
                    at, y, wide, 14, fill=CATEGORY_COLOURS[category], tip=f"{category} {format_bytes(used[category])}"
                )
            )
            at += wide
    if budget_bytes:
        edge = x + width * budget_bytes / whole
        parts.append(svg.path(f"M{edge:.1f} {y - 3:.1f}V{y + 17:.1f}", style="axis", width=2))
    return parts
