"""The relay at one moment, as a picture: the EPS with its layers, the link, the device with its slots, the algorithm.

Everything has a fixed place. States differ in shape as well as in colour: what computes is solid and framed, what loads
fills from below, a gradient fills from above and is hatched, an updated layer carries a bar at its foot.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape

from l2l_core.memory import CATEGORIES, format_bytes
from l2l_core.trace import LANES, Trace
from workbench.pictures import svg
from workbench.pictures.algorithm import LINES
from workbench.pictures.moments import Moment, Moments, Slot
from workbench.pictures.picture import Picture, Table
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import (
    BLUE,
    CATEGORY_COLOURS,
    GREEN,
    GREY,
    LANE_NAMES,
    PURPLE,
    SKY,
    VERMILION,
    ink_on,
    kind_colour,
)

WIDTH, HEIGHT = 960.0, 336.0
_TOP, _BOTTOM = 30.0, 288.0  # of the panels
_SHELF = (16.0, 326.0)  # x and width of each panel
_LINK = (352.0, 112.0)
_DEVICE = (474.0, 246.0)
_ALGORITHM = (736.0, 208.0)
_MOST_SLOTS = 8


def draw_relay(
    moment: Moment,
    keys: Sequence[str],
    *,
    names: Mapping[str, str] | None = None,
    versions: Mapping[str, int] | None = None,
    frozen: Collection[str] = (),
    device: str = "",
    budget_bytes: int | None = None,
    idle: bool = False,
) -> str:
    """The picture as an SVG string.

    Args:
        moment: from `Moments`; `Moment()` if there is no step yet.
        keys: the stack, in order.
        names: dotted names of the layers by key.
        versions: number of updates of every layer.
        frozen: keys of layers of which nothing is trained.
        device: name of the device.
        budget_bytes: its memory, None if it has no limit.
        idle: whether no step is under way: layers rest, whatever the moment says.
    """
    if idle:
        moment = Moment(
            micro_batches=moment.micro_batches,
            slots=(Slot(None, 0.0),) * len(moment.slots),
            host=moment.host,
            device_peak_bytes=moment.device_peak_bytes,
            stash_peak_bytes=moment.stash_peak_bytes,
        )
    parts = [
        *_draw_shelf(moment, keys, names or {}, versions or {}, frozenset(frozen)),
        *_draw_link(moment),
        *_draw_device(moment, names or {}, device, budget_bytes),
        *_draw_algorithm(moment),
        *_draw_foot(moment, len(keys)),
    ]
    return svg.document(WIDTH, HEIGHT, "Relay", describe(moment), parts)


def describe(moment: Moment) -> str:
    """The moment in a sentence or two."""
    if moment.phase == "idle":
        return "No step is under way; all layers rest in the EPS."
    words = []
    if moment.layer is not None:
        words.append(f"Layer {number_of(moment.layer)} computes ({moment.kind or moment.phase})")
    elif moment.waits_for is not None:
        words.append(f"Compute waits for layer {number_of(moment.waits_for)}")
    words += [f"layer {number_of(s.layer)} is loading" for s in moment.slots if s.layer is not None and s.share < 1]
    words += [f"the gradient of layer {number_of(g.layer)} leaves" for g in moment.leaving]
    if moment.eps_layer:
        words.append(f"the EPS works on layer {number_of(moment.eps_layer)} ({moment.eps_kind})")
    words.append(f"{len(moment.updated)} layers are updated")
    return (
        f"Event {moment.i + 1} of {moment.count}, {format_seconds(moment.t_s)}, {moment.phase}. "
        + "; ".join(words)
        + "."
    )


def number_of(key: str) -> str:
    """A layer's number for people: the digits of its key without leading zeros; the key itself if there are none."""
    digits = "".join(character for character in key if character.isdigit())
    return str(int(digits)) if digits else key


# -- the shelf -----------------------------------------------------------------------------------------------------------


def _draw_shelf(
    moment: Moment, keys: Sequence[str], names: Mapping[str, str], versions: Mapping[str, int], frozen: frozenset[str]
) -> list[str]:
    x, width = _SHELF
    still = f", {len(frozen)} frozen" if frozen else ""
    parts = [
        _say(x, 20, "EPS", size=15, strong=True),
        _say(x + 36, 20, f"keeps {len(keys)} layers on the host{still}", style="dim"),
        _say(x + width, 20, format_bytes(sum(moment.host.values())) if moment.host else "", anchor="end", style="dim"),
        svg.rect(x, _TOP, width, _BOTTOM - _TOP, style="card", r=6),
    ]
    parts += _draw_cells(moment, keys, names, versions, frozen)
    work = f"{'updates' if moment.eps_kind == 'update' else moment.eps_kind + 's'} {number_of(moment.eps_layer or '')}"
    y = 232.0
    if moment.eps_kind:
        parts += [
            svg.rect(x + 10, y - 15, 104, 22, fill=SKY, r=4),
            _say(x + 62, y + 1, _short(work, 13), size=14, strong=True, anchor="middle", fill=ink_on(SKY)),
        ]
    else:
        parts += [
            svg.rect(x + 10, y - 15, 104, 22, style="well", r=4),
            _say(x + 62, y, "at rest", style="dim", anchor="middle"),
        ]
    parts.append(_say(x + width - 10, y, f"{len(moment.updated)} of {len(keys)} updated", size=13, anchor="end"))
    parts += _draw_stash(x + 10, 244, width - 20, moment, "host")
    parts += _draw_legend(x + 10, 278)
    return parts


def _draw_cells(
    moment: Moment, keys: Sequence[str], names: Mapping[str, str], versions: Mapping[str, int], frozen: frozenset[str]
) -> list[str]:
    """The layers, drawn state by state, so that a thousand of them stay a few thousand characters."""
    if not keys:
        return []
    grid = Grid(len(keys), _SHELF[0] + 10, _TOP + 10, _SHELF[1] - 20, 168)
    place = {key: i for i, key in enumerate(keys)}
    solid = {moment.eps_layer: SKY} if moment.eps_layer in place else {}
    if moment.layer in place:
        solid[moment.layer] = kind_colour("backward" if moment.kind == "backward" else "forward")
    parts = [f'<path d="{grid.all_boxes()}" class="well" stroke="currentColor" stroke-opacity="0.25"/>']
    if frozen:
        parts.append(svg.path(grid.hatch([place[key] for key in frozen if key in place]), style="axis", width=0.7))
    parts.append(svg.path(grid.boxes([place[key] for key in moment.updated if key in place], high=grid.mark), fill=SKY))
    filled = {}
    for slot in moment.slots:
        if slot.layer in place and slot.layer not in solid:
            i, filled[slot.layer] = [place[slot.layer]], slot.share
            parts.append(svg.path(grid.boxes(i, high=slot.share), fill=BLUE))
            parts.append(svg.path(grid.boxes(i), stroke=BLUE, fill="none", width=grid.frame))
    arriving = [(travel.share, [place[travel.layer]]) for travel in moment.leaving if travel.layer in place]
    arriving.append((1.0, [place[key] for key in moment.arrived if key in place]))
    for share, cells in arriving:
        cells = [i for i in cells if keys[i] not in solid]
        high = max(0.12, 0.55 * share)
        parts.append(svg.path(grid.boxes(cells, high=high), fill=VERMILION))
        parts.append(svg.path(grid.hatch(cells, high=high), style="hatch"))
        parts.append(svg.path(grid.boxes(cells), stroke=VERMILION, fill="none", width=grid.frame))
    for key, colour in solid.items():
        box = grid.boxes([place[key]], grow=0.0 if grid.legible else 2.0)
        parts.append(svg.path(box, fill=colour, stroke="currentColor", width=grid.frame))
    parts = [part for part in parts if ' d=""' not in part]
    inks = {key: ink_on(colour) for key, colour in solid.items()}
    inks |= {key: "#fff" for key, share in filled.items() if share > 0.66}
    low_inks = inks | {key: "#fff" for key, share in filled.items() if share > 0.45}
    parts += grid.numbers(keys, inks, moment.layer)
    parts += grid.versions(keys, low_inks, versions)
    if len(keys) <= 64:
        parts += [grid.tip(i, _tip(key, names, versions, key in frozen)) for i, key in enumerate(keys)]
    return parts


def _tip(key: str, names: Mapping[str, str], versions: Mapping[str, int], frozen: bool) -> str:
    words = [key, names.get(key, "")] + ([f"version {versions[key]}"] if key in versions else [])
    return ", ".join(word for word in [*words, "frozen" if frozen else ""] if word)


class Grid:
    """Places of `count` cells in a box: few large ones in one or two rows, many narrow ones in more."""

    def __init__(self, count: int, x: float, y: float, width: float, height: float) -> None:
        rows = 1 if count <= 8 else 2 if count <= 32 else max(2, round(math.sqrt(count * height / width / 1.5)))
        self.columns = -(-count // rows)
        rows = -(-count // self.columns)
        self.count, self.x, self.y = count, x, y
        self.pitch_x = min(76.0, width / self.columns)
        self.legible = self.pitch_x >= 6.4 * len(str(count - 1)) + 4
        if not self.legible:  # the number of a row's first layer stands before it
            self.x += 24.0
            self.pitch_x = (width - 24.0) / self.columns
        self.pitch_y = min(84.0, height / rows)
        if count <= 32:
            self.x += (width - self.pitch_x * self.columns) / 2
            self.y += (height - self.pitch_y * rows) / 2
        self.gap = min(4.0, self.pitch_x * 0.2)
        self.frame = 2.5 if self.pitch_x > 12 else 1.4
        self.mark = min(0.3, max(4.0, self.pitch_y * 0.1) / self.pitch_y)

    def all_boxes(self) -> str:
        """Commands of all cells."""
        wide, high = f"{self.pitch_x - self.gap:.1f}", f"{self.pitch_y - self.gap:.1f}"
        box = f"h{wide}v{high}h-{wide}z"
        return "".join(
            f"M{self.x:.1f} {self.y + first // self.columns * self.pitch_y:.1f}{box}"
            + f"m{self.pitch_x:.3f} 0{box}" * (min(self.columns, self.count - first) - 1)
            for first in range(0, self.count, self.columns)
        )

    def boxes(self, cells: Sequence[int], high: float = 1.0, grow: float = 0.0) -> str:
        """Commands of some cells, each up to a share of its height, `grow` larger on each side."""
        return "".join(
            f"M{x - grow:.1f} {y + height * (1 - high) - grow:.1f}h{width + 2 * grow:.1f}v{height * high + 2 * grow:.1f}"
            f"h-{width + 2 * grow:.1f}z"
            for x, y, width, height in self._spans(cells)
        )

    def hatch(self, cells: Sequence[int], high: float = 1.0) -> str:
        """Commands of slanted lines over some cells, each up to a share of its height."""
        pitch = max(3.0, min(6.0, self.pitch_x / 3))
        return "".join(
            svg.hatch(x, y + height * (1 - high), width, height * high, pitch)
            for x, y, width, height in self._spans(cells)
        )

    def _spans(self, cells: Sequence[int]) -> list[tuple[float, float, float, float]]:
        """x, y, width and height of cells; neighbours that are too small for numbers are drawn as one."""
        runs: list[list[int]] = []
        for i in sorted(cells):
            if runs and not self.legible and i == runs[-1][1] + 1 and i % self.columns:
                runs[-1][1] = i
            else:
                runs.append([i, i])
        return [
            (*self._at(first), (last - first) * self.pitch_x + self.pitch_x - self.gap, self.pitch_y - self.gap)
            for first, last in runs
        ]

    def _at(self, i: int) -> tuple[float, float]:
        row, column = divmod(i, self.columns)
        return self.x + column * self.pitch_x, self.y + row * self.pitch_y

    def numbers(self, keys: Sequence[str], inks: Mapping[str | None, str], strong: str | None) -> list[str]:
        """Numbers in cells that have room for them, or one before each row."""
        if not self.legible:
            step = -(-11 // int(self.pitch_y + 1))  # rows that are too low for a number each
            return [
                _say(
                    self.x - 4,
                    self._at(i)[1] + self.pitch_y / 2 + 3,
                    _short(number_of(keys[i]), 5),
                    size=9,
                    style="dim",
                    anchor="end",
                )
                for j, i in enumerate(range(0, self.count, self.columns))
                if j % step == 0
            ]
        size = max(8.5, min(20.0, self.pitch_x * 0.46))
        places = [self._head(i) for i in range(self.count)]
        return [
            _say(
                x,
                y + size * 0.36,
                _short(number_of(key), 4),
                size=size,
                anchor="middle",
                strong=key == strong,
                fill=inks.get(key, ""),
            )
            for key, (x, y) in zip(keys, places, strict=True)
        ]

    def versions(self, keys: Sequence[str], inks: Mapping[str | None, str], versions: Mapping[str, int]) -> list[str]:
        """How often each layer was updated, in cells that have room for it below the number."""
        longest = max((len(str(version)) for version in versions.values()), default=99) + 1
        if self.pitch_y <= 50 or self.pitch_x < 5.4 * longest + 3:
            return []
        parts = []
        for i, key in enumerate(keys):
            if key in versions:
                (x, y), ink = self._head(i), inks.get(key, "")
                words, style = f"v{versions[key]}", "" if ink else "dim"
                parts.append(_say(x, y + 22, words, size=8.5, anchor="middle", style=style, fill=ink))
        return parts

    def _head(self, i: int) -> tuple[float, float]:
        """Where the middle of a cell's number is."""
        x, y = self._at(i)
        up = 0.36 if self.pitch_y > 40 else 0.5
        return x + (self.pitch_x - self.gap) / 2, y + (self.pitch_y - self.gap) * up

    def tip(self, i: int, words: str) -> str:
        """Words under the pointer, over a whole cell."""
        return f'<path d="{self.boxes([i])}" fill-opacity="0"><title>{escape(words)}</title></path>'


def _draw_legend(x: float, y: float) -> list[str]:
    parts, at = [], x
    for words, wide in (("computes", 65), ("loads", 45), ("gradient", 60), ("updates", 58), ("updated", 58)):
        box = f"M{at:.1f} {y - 8:.1f}h8v9h-8z"
        low = f"M{at:.1f} {y - 4:.1f}h8v5h-8z"
        if words == "computes":
            half = f"M{at:.1f} {y - 8:.1f}h4v9h-4z"
            parts += [svg.path(box, fill=kind_colour("backward")), svg.path(half, fill=GREEN)]
            parts.append(svg.path(box, fill="none", stroke="currentColor", width=1.2))
        elif words == "loads":
            parts += [svg.path(low, fill=BLUE), svg.path(box, stroke=BLUE, fill="none", width=1.2)]
        elif words == "gradient":
            parts += [svg.path(low, fill=VERMILION), svg.path(svg.hatch(at, y - 4, 8, 5, 4), style="hatch")]
            parts.append(svg.path(box, stroke=VERMILION, fill="none", width=1.2))
        elif words == "updates":
            parts.append(svg.path(box, fill=SKY, stroke="currentColor", width=1.2))
        else:
            parts += [svg.path(box, style="rule"), svg.path(f"M{at:.1f} {y - 2:.1f}h8v3h-8z", fill=SKY)]
        parts.append(_say(at + 12, y, words, size=10, style="dim"))
        at += wide + 4
    return parts


# -- the link ------------------------------------------------------------------------------------------------------------


def _draw_link(moment: Moment) -> list[str]:
    x, width = _LINK
    h2d, d2h = (moment.lanes or {}).get("h2d"), (moment.lanes or {}).get("d2h")
    loading = next((slot for slot in moment.slots if slot.layer is not None and slot.share < 1), None)
    leaving = moment.leaving[0] if moment.leaving else None
    parts = [_say(x + width / 2, 20, "link", size=15, strong=True, anchor="middle")]
    shown = (
        ("load", h2d, loading.layer if loading else None, BLUE, 1),
        ("push", d2h, leaving.layer if leaving else None, VERMILION, -1),
        ("batch" if h2d is not None and h2d.kind == "batch" else "fetch", h2d, None, PURPLE, 1),
        ("stash", d2h, None, PURPLE, -1),
    )
    for row, (kind, work, under_way, colour, way) in enumerate(shown):
        y = _TOP + 46 + row * 62
        moves = work is not None and work.kind == kind
        layer = work.layer if moves and work is not None else under_way
        strength = 1.0 if moves else 0.55 if under_way is not None else 0.16
        words = kind if layer in (None, "") else f"{kind} {number_of(layer or '')}"
        if kind in ("stash", "fetch", "batch") and moves and work is not None and work.k >= 0:
            words = f"{kind} k = {work.k + 1}"
        parts.append(_arrow(x + 4, y, width - 8, way, colour, strength))
        parts.append(
            _say(
                x + width / 2,
                y - 12,
                _short(words, 13),
                size=14,
                strong=moves,
                anchor="middle",
                style="" if moves or under_way else "dim",
            )
        )
        if moves and work is not None:
            parts.append(_say(x + width / 2, y + 22, format_bytes(work.nbytes), size=11, anchor="middle", style="dim"))
    return parts


def _arrow(x: float, y: float, width: float, way: int, colour: str, strength: float) -> str:
    """A broad arrow to the right (`way` 1) or to the left (-1)."""
    tail, tip = (x, x + width) if way > 0 else (x + width, x)
    neck = tip - way * 13
    d = f"M{tail:.1f} {y - 4:.1f}H{neck:.1f}V{y - 9:.1f}L{tip:.1f} {y:.1f}L{neck:.1f} {y + 9:.1f}V{y + 4:.1f}H{tail:.1f}z"
    return f'<path d="{d}" fill="{colour}" fill-opacity="{strength:g}"/>'


# -- the device ----------------------------------------------------------------------------------------------------------


def _draw_device(moment: Moment, names: Mapping[str, str], device: str, budget_bytes: int | None) -> list[str]:
    x, width = _DEVICE
    parts = [
        _say(x, 20, "device", size=15, strong=True),
        _say(x + 58, 20, _short(device, 30), style="dim"),
        svg.rect(x, _TOP, width, _BOTTOM - _TOP, style="card", r=6),
    ]
    slots = moment.slots or (Slot(None, 0.0),) * 2
    shown = slots[:_MOST_SLOTS]
    columns = 1 if len(shown) <= 5 else 2
    rows = -(-len(shown) // columns)
    pitch, wide = 128.0 / rows, (width - 16) / columns
    for j, slot in enumerate(shown):
        column, row = divmod(j, rows)
        parts += _draw_slot(
            x + 8 + column * wide, _TOP + 8 + row * pitch, wide - 4 * (columns - 1), pitch - 5, j, slot, moment, names
        )
    if len(slots) > len(shown):
        parts.append(
            _say(x + width - 10, 164, f"and {len(slots) - len(shown)} more", size=9, anchor="end", style="dim")
        )
    parts += _draw_gradients(x + 10, 168, width - 20, moment)
    parts += _draw_stash(x + 10, 206, width - 20, moment, "device")
    parts += _draw_memory(x + 10, 247, width - 20, moment, budget_bytes)
    work = (moment.lanes or {}).get("compute")
    runs = work is not None and work.layer == "shell"
    box = svg.rect(x + 10, 272, 9, 9, fill=GREY) if moment.device else svg.rect(x + 10, 272, 9, 9, style="well")
    words = f"shell {work.kind if work.kind == 'loss' else 'runs'}" if work is not None and runs else "shell"
    parts += [box, _say(x + 24, 280, words, size=11, strong=runs, style="" if runs else "dim")]
    return parts


def _draw_slot(
    x: float, y: float, width: float, height: float, number: int, slot: Slot, moment: Moment, names: Mapping[str, str]
) -> list[str]:
    """One weight slot: its letter, the layer in it, and what that layer does."""
    narrow, low = width < 160, height < 50
    middle = y + height / 2
    letter = chr(ord("A") + number)
    parts = [svg.rect(x, y, width, height, style="well", r=4)]
    computes = slot.layer is not None and slot.layer == moment.layer
    colour = kind_colour("backward" if moment.kind == "backward" else "forward") if computes else BLUE
    if slot.layer is not None:
        parts.append(svg.rect(x, y, 30, height, fill=colour, r=4))
    parts.append(
        _say(
            x + 15,
            middle + 5,
            letter,
            size=14,
            strong=True,
            anchor="middle",
            fill=ink_on(colour) if slot.layer is not None else "",
        )
    )
    if slot.layer is None:
        return [*parts, _say(x + 40, middle + 5, "empty", size=13, style="dim")]
    size = 15.0 if narrow or low else 30.0
    big = _short(number_of(slot.layer), 6)
    at = moment.k + 1
    verb = {"backward": "back", "loss": "loss"}.get(moment.kind, "runs")
    if computes:
        words = f"{verb} all {moment.micro_batches}" if at < 1 else f"{verb} k = {at} of {moment.micro_batches}"
        words = words.removeprefix(f"{verb} ") if low else words
        brief, share = f"{at}/{moment.micro_batches}" if at else verb, at / moment.micro_batches if at else 1.0
    elif slot.share < 1.0:
        words, brief, share = f"loading {100 * slot.share:.0f} %", f"{100 * slot.share:.0f} %", slot.share
    else:
        words, brief, share = "ready", "ready", 1.0
    busy = computes or slot.share < 1.0
    parts.append(
        _say(
            x + 38,
            middle + size * 0.36,
            big,
            size=min(size, 78.0 / max(3, len(big))) if size > 20 and len(big) > 2 else size,
            strong=True,
        )
    )
    if narrow:
        return [*parts, _say(x + width - 4, middle + 4, brief, size=10.5, strong=busy, anchor="end")]
    bar = (x + width - 66, middle - 4, 60.0) if low else (x + 102, middle - 4, width - 110)
    if low:
        parts.append(_say(x + 78, middle + 4, words, size=11, strong=busy))
    else:
        parts.append(_say(x + 102, middle - 11, words, size=12.5, strong=busy))
        if (name := names.get(slot.layer, "")) and name != slot.layer:
            parts.append(_say(x + 102, middle + 21, _short(name, 22), size=10, style="dim"))
    if computes:
        return [*parts, *_draw_turns(*bar, moment, colour)]
    filled = [svg.rect(bar[0], bar[1], bar[2] * share, 9, fill=colour)] if share > 0 else []
    return [*parts, svg.rect(*bar, 9, style="well"), *filled]


def _draw_turns(x: float, y: float, width: float, moment: Moment, colour: str) -> list[str]:
    """The micro-batches of a visit as segments; those that are over or at work are filled."""
    count = moment.micro_batches
    if moment.k < 0 or count > 32:
        share = 1.0 if moment.k < 0 else (moment.k + 1) / count
        return [svg.rect(x, y, width, 9, style="well"), svg.rect(x, y, width * share, 9, fill=colour)]
    pitch = min(16.0, width / count)
    gap = min(3.0, pitch * 0.25)
    boxes = [f"M{x + i * pitch:.1f} {y:.1f}h{pitch - gap:.1f}v9h-{pitch - gap:.1f}z" for i in range(count)]
    parts = [svg.path("".join(boxes), style="rule")]
    if moment.k:
        parts.append(f'<path d="{"".join(boxes[: moment.k])}" fill="{colour}" fill-opacity="0.5"/>')
    return [*parts, svg.path(boxes[min(moment.k, count - 1)], fill=colour, stroke="currentColor", width=1)]


def _draw_gradients(x: float, y: float, width: float, moment: Moment) -> list[str]:
    """Two places: the gradient that is being added up, and the one that leaves."""
    parts = [_say(x, y + 16, "gradient", size=11, style="dim")]
    wide = (width - 56) / 2 - 3
    leaving = moment.leaving[0] if moment.leaving else None
    more = f" +{len(moment.leaving) - 1}" if len(moment.leaving) > 1 else ""
    for j, (words, share) in enumerate(
        (
            (f"adds up {number_of(moment.adding)}" if moment.adding else "", 1.0),
            (f"{number_of(leaving.layer)} leaves{more}" if leaving else "", 1 - leaving.share if leaving else 0.0),
        )
    ):
        left = x + 56 + j * (wide + 6)
        parts.append(svg.rect(left, y, wide, 24, style="well", r=4))
        if words:
            parts.append(svg.rect(left, y + 19, wide * share, 5, fill=VERMILION))
            parts.append(_say(left + wide / 2, y + 14, _short(words, 14), size=12, strong=True, anchor="middle"))
    return parts


def _draw_stash(x: float, y: float, width: float, moment: Moment, place: str) -> list[str]:
    """Stash bytes at one place; the number of inputs stands where they are kept."""
    nbytes = ((moment.device if place == "device" else moment.host) or {}).get("stash", 0)
    share = nbytes / moment.stash_peak_bytes if moment.stash_peak_bytes else 0.0
    words = [f"{moment.stashed} inputs"] if moment.stash == place and moment.stashed else []
    words += [format_bytes(nbytes)] if nbytes else []
    wide = width - 56 - 134
    return [
        _say(x, y + 10, "stash", size=11, style="dim"),
        svg.rect(x + 56, y, wide, 12, style="well"),
        *([svg.rect(x + 56, y, wide * share, 12, fill=PURPLE)] if share > 0 else []),
        _say(x + width, y + 10, ", ".join(words) or "empty", size=11, anchor="end"),
    ]


def _draw_memory(x: float, y: float, width: float, moment: Moment, budget_bytes: int | None) -> list[str]:
    """Bytes on the device by category, against the budget or the highest known."""
    used = moment.device or {}
    total = sum(used.values())
    whole = max(budget_bytes or 0, moment.device_peak_bytes, total, 1)
    limit = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
    parts = [
        _say(x, y - 6, "memory", size=11, style="dim"),
        _say(x + width, y - 6, f"{format_bytes(total)}{limit}", size=13, strong=True, anchor="end"),
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


# -- the algorithm and the foot ------------------------------------------------------------------------------------------


def _draw_algorithm(moment: Moment) -> list[str]:
    x, width = _ALGORITHM
    parts = [_say(x, 20, "algorithm", size=15, strong=True)]
    beside = dict(moment.beside)
    for number, line in enumerate(LINES):
        y = _TOP + 4 + number * 16.6
        here = number == moment.line
        if here:
            parts += [svg.rect(x, y, width, 16.6, style="well"), svg.rect(x, y, 4, 16.6, fill="currentColor")]
        elif number in beside:
            parts.append(svg.rect(x, y + 3, 4, 10.6, fill=_lane_colour(moment, beside[number])))
        style = "code strong" if here else "code" if number in beside else "code dim"
        parts.append(_say(x + 9 + line.depth * 13, y + 12, line.words, size=11, style=style))
    for row, lane in enumerate(LANES):
        y = 234.0 + row * 17
        work = (moment.lanes or {}).get(lane)
        parts.append(_say(x, y, LANE_NAMES.get(lane, lane), size=11, style="dim"))
        parts.append(svg.rect(x + 84, y - 9, 9, 9, **({"fill": kind_colour(work.kind)} if work else {"style": "well"})))
        if work:
            words = work.kind if work.layer in ("", work.kind) else f"{work.kind} {number_of(work.layer)}"
            words = _short(words + (f" k = {work.k + 1}" if work.k >= 0 else ""), 19)
        else:
            words = f"waits for {number_of(moment.waits_for)}" if lane == "compute" and moment.waits_for else ""
        if words:
            parts.append(_say(x + 97, y, words, size=11, style="" if work else "dim"))
    return parts


def _lane_colour(moment: Moment, lane: str) -> str:
    work = (moment.lanes or {}).get(lane)
    return kind_colour(work.kind) if work is not None else GREY


def _draw_foot(moment: Moment, layers: int) -> list[str]:
    y = 306.0
    width = WIDTH - 32
    parts = [svg.rect(16, y, width, 3, style="well")]
    if moment.phase == "idle":
        return [*parts, _say(16, y + 20, f"no step is under way: {layers} layers rest in the EPS", size=13)]
    if moment.count:
        parts.append(svg.rect(16, y, width * (moment.i + 1) / moment.count, 3, fill=GREY))
    parts.append(_say(16, y + 20, f"event {moment.i + 1} of {moment.count}", size=13))
    parts.append(_say(352 + 56, y + 20, format_seconds(moment.t_s), size=13, anchor="middle"))
    parts.append(_say(474, y + 20, moment.phase, size=13, strong=True))
    return parts


def _say(
    x: float,
    y: float,
    words: str,
    *,
    size: float = 12,
    strong: bool = False,
    style: str = "",
    anchor: str = "start",
    fill: str = "",
) -> str:
    """Words of a size; `svg.text` has the sizes of the theme only."""
    named = f' class="{style}"' if style else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    heavy = ' font-weight="600"' if strong else ""
    filled = f' fill="{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{heavy}{named}{placed}{filled}>{escape(words)}</text>'


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


# -- in words ------------------------------------------------------------------------------------------------------------


def relay_table(moment: Moment, keys: Sequence[str], names: Mapping[str, str] | None = None) -> Table:
    """The same in words: what lanes do, what slots hold, where gradients and inputs are."""
    known = names or {}

    def call(key: str | None) -> str:
        return "" if not key else f"{key} {known[key]}" if known.get(key, key) != key else key

    rows: list[tuple[str, str]] = [("phase", moment.phase)]
    for lane in LANES:
        work = (moment.lanes or {}).get(lane)
        words = (
            "at rest"
            if work is None
            else " ".join(
                word for word in (work.kind, call(work.layer), f"k = {work.k + 1}" if work.k >= 0 else "") if word
            )
        )
        rows.append((LANE_NAMES.get(lane, lane), words))
    rows.append(
        ("computes", call(moment.layer) or (f"waits for {call(moment.waits_for)}" if moment.waits_for else "nothing"))
    )
    for j, slot in enumerate(moment.slots):
        share = "" if slot.share >= 1 else f", loading {100 * slot.share:.0f} %"
        rows.append(
            (f"slot {chr(ord('A') + j) if j < 26 else j}", f"{call(slot.layer)}{share}" if slot.layer else "empty")
        )
    rows.append(("gradient adds up", call(moment.adding) or "none"))
    rows.append(
        ("gradient leaves", ", ".join(f"{call(g.layer)} {100 * g.share:.0f} %" for g in moment.leaving) or "none")
    )
    rows.append(("updated", f"{len(moment.updated)} of {len(keys)}"))
    rows.append(("stashed inputs", str(moment.stashed)))
    for place, used in (("device", moment.device or {}), ("host", moment.host or {})):
        stash = f", stash {format_bytes(used['stash'])}" if used.get("stash") else ""
        rows.append((f"{place} memory", f"{format_bytes(sum(used.values()))}{stash}"))
    if moment.line is not None:
        rows.append(("algorithm", LINES[moment.line].words))
    title = f"event {moment.i + 1} of {moment.count}, {format_seconds(moment.t_s)}" if moment.count else "no step"
    return Table(title, ("what", "state"), rows)


def show_relay(trace: Trace, i: int | None = None) -> Picture:
    """A finished step at event `i`, by time of start; default: a moment in mid-backward at which every lane works."""
    moments = Moments.of(trace)
    if not moments.count:
        moment = Moment()
    else:
        moment = moments.at(moments.telling() if i is None else i)
    budget_bytes = trace.settings.get("memory_bytes")
    drawn = draw_relay(moment, moments.keys, names=trace.names, device=trace.device, budget_bytes=budget_bytes)
    return Picture(drawn, relay_table(moment, moments.keys, trace.names))
