"""Ways to train a large model over ranks as picture and table, a row per way.

Bytes of a rank and seconds of a step are bars; the table has all figures. Bytes are by formula, seconds simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape

from l2l_core.pipelines import (
    MEGATRON_ROWS,
    MESSAGES,
    PARTS,
    SCHEDULES,
    LayoutCost,
    LayoutSearch,
    LayoutWay,
    WayTable,
    relay_over_ranks,
    simulate_pipeline,
)
from l2l_core.trace import format_bytes
from workbench.pictures import picture, svg
from workbench.pictures.memory_areas import draw_category_legend, texture
from workbench.pictures.picture import Picture
from workbench.pictures.scale import Scale, format_prefixed, format_seconds, round_up, ticks
from workbench.pictures.theme import BLUE, GREEN, ORANGE, VERMILION, category_colour

WIDTH, TOP, PITCH, HEIGHT = 960, 58, 20, 13  # px: view box, top of the first row, distance of rows, height of a bar
BYTES_LEFT, BYTES_RIGHT, SECONDS_LEFT, SECONDS_RIGHT = 150, 432, 550, 862  # px
CATEGORIES = ("weights", "optimizer", "gradients", "activations")
PART_COLOURS = {"compute": GREEN, "recompute": ORANGE, "bubble": "", "wire": VERMILION, "host": BLUE}
_PART_TEXTURES = {"recompute": "activations", "wire": "gradients", "host": "optimizer"}
_CLIPPED = "▸"  # behind the figure of a bar that is longer than the axis
HEADER = ("way", "layout", "per rank", "sent", "host link", "step", "bubble", "tokens/s", "verdict")

STYLE = """
.l2l-layouts{overflow-x:auto}
.l2l-layouts .widget-html-content{min-width:0}
.l2l-layouts table{font-size:12px;line-height:1.3;border-collapse:collapse;width:100%}
.l2l-layouts :is(th,td){padding:2px 10px 2px 0;text-align:left!important;vertical-align:top;white-space:nowrap}
.l2l-layouts tbody tr{border-top:1px solid color-mix(in srgb,currentColor 18%,transparent)}
.l2l-layouts th:first-child{padding-left:8px}
.l2l-layouts tbody th{font-weight:600}
.l2l-layouts :is(td:nth-child(2),td:last-child){white-space:normal;min-width:9em}
.l2l-layouts tr.l2l-lacks>:not(th,:last-child){opacity:.6}
.l2l-layouts tr[data-key]{cursor:pointer}
.l2l-layouts tr.l2l-chosen>*{background:color-mix(in srgb,currentColor 10%,transparent)}
.l2l-layout-title{font-size:14px;font-weight:600;margin:4px 0}
.l2l-layout{font-size:13px;line-height:1.45}
.l2l-layout p{margin:4px 0}
.l2l-layout pre{font-size:11.5px;line-height:1.3;overflow-x:auto;margin:4px 0}
""".replace("\n", "")


def layout_key(at: int) -> str:
    """Return the key of the row at a position of the table."""
    return f"layout-{at}"


def show_layouts(table: WayTable, title: str, chosen: int | None = None) -> Picture:
    """Return the picture of all ways with its table; `chosen` is the position of the marked row."""
    return Picture(draw_layouts(table, chosen), layouts_table(table, title))


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_layouts(table: WayTable, chosen: int | None = None) -> str:
    """Draw a row per way as an SVG: bytes of the fullest rank, and seconds of a step, by part."""
    bottom = TOP + PITCH * len(table.ways)
    budget, best = table.search.cluster.memory_bytes, table.search.best
    fastest_s = best.step_s if best else min((cost.step_s for cost in table.search.costs), default=1.0)
    across = Scale(0.0, round_up(1.6 * budget), BYTES_LEFT, BYTES_RIGHT)
    along = Scale(0.0, round_up(2.2 * fastest_s), SECONDS_LEFT, SECONDS_RIGHT)
    parts = [svg.text(BYTES_LEFT, 14, "bytes of the fullest rank, by formula", style="small strong")]
    parts.append(svg.text(SECONDS_LEFT, 14, "seconds of a step, simulated", style="small strong"))
    parts += draw_category_legend(CATEGORIES, BYTES_LEFT, 22, {"optimizer": "optimizer"}, small=True)
    parts += _part_legend(SECONDS_LEFT, 22)
    parts += _axis(across, bottom, format_bytes)
    parts += _axis(along, bottom, format_seconds)
    for at, (way, cost) in enumerate(zip(table.ways, table.costs, strict=True)):
        parts += _row(table, at, way, cost, across, along, at == chosen)
    x = across(budget)
    parts.append(svg.path(f"M{x:.1f} {TOP - 6}V{bottom}", stroke=VERMILION, width=2))
    words = svg.text(x + 4, TOP - 8, f"budget {format_bytes(budget)}", style="small")
    parts.append(svg.outlined_text(words))
    return svg.document(WIDTH, bottom + 24, "Ways to train over ranks: bytes and seconds", _describe(table), parts)


def _axis(scale: Scale, bottom: float, label: Callable[[float], str]) -> Iterator[str]:
    marks = ticks(0.0, scale.high, 6)
    yield svg.path("".join(f"M{scale(mark):.1f} {TOP - 4}V{bottom}" for mark in marks), style="rule")
    for mark in marks:
        yield svg.text(scale(mark), bottom + 14, label(mark) if mark else "0", style="small dim", anchor="middle")


def _row(
    table: WayTable, at: int, way: LayoutWay, cost: LayoutCost | None, across: Scale, along: Scale, is_chosen: bool
) -> Iterator[str]:
    y, key = TOP + PITCH * at, layout_key(at)
    if is_chosen:
        yield svg.rect(0, y - 1, WIDTH, PITCH, style="well", r=3)
        yield svg.path(f"M1 {y - 1}v{PITCH}", style="axis", width=3)
    name = svg.text(BYTES_LEFT - 10, y + 12, way.name, style="strong" if is_chosen else "", anchor="end")
    verdict = table.verdict(at)
    if cost is None:
        yield name + svg.text(BYTES_LEFT + 6, y + 12, verdict, style="small dim")
    else:
        fits = table.search.fits(cost)
        memory = {category: (cost.memory[category], category_colour(category), category) for category in CATEGORIES}
        seconds = {part: (cost.seconds[part], PART_COLOURS[part], _PART_TEXTURES.get(part, "")) for part in PARTS}
        bars = [*_bar(across, memory, y + 3), *_bar(along, seconds, y + 3)]
        nbytes, step = format_bytes(cost.device_bytes), format_seconds(cost.step_s)
        budget_px = across(table.search.cluster.memory_bytes)
        bars.append(_figure(across, cost.device_bytes, nbytes if fits else f"× {nbytes}", y, fits, budget_px))
        bars.append(_figure(along, cost.step_s, step, y, fits))
        yield name + (svg.group(bars) if fits else f'<g opacity=".6">{"".join(bars)}</g>')
    tip = f"{way.name}: {verdict}" if cost is None else f"{way.name}, {cost.layout}: {verdict}"
    box = f'x="0" y="{y - 1:g}" width="{WIDTH}" height="{PITCH}"'
    yield f'<rect {box} fill="transparent"{svg.layer_attribute(key)}><title>{escape(tip)}</title></rect>'


def _bar(scale: Scale, pieces: Mapping[str, tuple[float, str, str]], y: float) -> Iterator[str]:
    below = 0.0
    for value, colour, like in pieces.values():
        left, right = (min(scale(edge), scale.last) for edge in (below, below + value))
        below += value
        if right - left < 0.05:  # px
            continue
        if colour:
            yield svg.rect(left, y, right - left, HEIGHT, fill=colour) + texture(like, left, right, y, HEIGHT)
        else:  # waiting: an empty box
            yield svg.path(f"M{left:.1f} {y}H{right:.1f}v{HEIGHT}H{left:.1f}z", style="axis")


def _figure(scale: Scale, value: float, words: str, y: float, fits: bool, line_px: float = 0.0) -> str:
    """Return the figure behind a bar, or behind a line that would cross it."""
    clipped = value > scale.high
    x = min(scale(value), scale.last) + 6
    x = line_px + 6 if x - 4 < line_px < x + 6.4 * len(words) else x
    label = f"{words} {_CLIPPED}" if clipped else words
    return svg.outlined_text(svg.text(x, y + 13, label, style="small strong" if fits else "small"))


def _part_legend(x: float, y: float) -> Iterator[str]:
    for part in PARTS:
        if PART_COLOURS[part]:
            yield svg.rect(x, y, 16, 12, fill=PART_COLOURS[part])
            yield texture(_PART_TEXTURES.get(part, ""), x, x + 16, y, 12)
        else:
            yield svg.path(f"M{x} {y}h16v12h-16z", style="axis")
        yield svg.text(x + 21, y + 10, part, style="small")
        x += 34 + 6.2 * len(part)


def _describe(table: WayTable) -> str:
    figures = [
        f"{way.name}: {table.verdict(at)}"
        if cost is None
        else f"{way.name}: {format_bytes(cost.device_bytes)}, {format_seconds(cost.step_s)}"
        for at, (way, cost) in enumerate(zip(table.ways, table.costs, strict=True))
    ]
    return f"{describe_best_layout(table)} {'; '.join(figures)}."


# -- tables ------------------------------------------------------------------------------------------------------------


def describe_best_layout(table: WayTable) -> str:
    """Return a sentence on the best way."""
    best = table.search.best
    if best is None:
        smallest = min(table.search.costs, key=lambda cost: cost.device_bytes)
        return f"None of these ways fits. The smallest, {smallest.layout}, {table.search.why(smallest)}."
    name = next(way.name for way, cost in zip(table.ways, table.costs, strict=True) if cost is best)
    return f"Fastest of these ways that fits: {name}, {format_seconds(best.step_s)} a step (simulated)."


def layouts_table(table: WayTable, title: str) -> picture.Table:
    """Return the table of all ways."""
    rows = [(way.name, *_cells(table, at)) for at, way in enumerate(table.ways)]
    return picture.Table(title, HEADER, rows, f"{describe_best_layout(table)} {METHOD_NOTE}")


METHOD_NOTE = (
    "Nothing here was run. Bytes and messages are formulas of the model's shape; seconds are simulated from stated figures. "
    "Sent, host link: bytes of a rank in a step."
)


def layouts_html(table: WayTable, title: str, chosen: int | None = None) -> str:
    """Return title, sentence and table as HTML, with a key per row."""
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADER)
    body = ""
    for at, way in enumerate(table.ways):
        cost = table.costs[at]
        classes = ["l2l-lacks"] * (cost is None or not table.search.fits(cost)) + ["l2l-chosen"] * (at == chosen)
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(table, at))
        if cost is None:
            cells = f'<td colspan="7">–</td><td>{escape(table.verdict(at))}</td>'
        name = f'<th scope="row">{escape(way.name)}</th>'
        body += f'<tr data-key="{layout_key(at)}" class="{" ".join(classes)}">{name}{cells}</tr>'
    return (
        f'<div class="l2l-caption">{escape(title)}</div>'
        f'<div class="l2l-layouts"><table class="l2l-table" aria-label="Ways to train over ranks"><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><div class="l2l-caption">{escape(METHOD_NOTE)}</div>'
    )


def _cells(table: WayTable, at: int) -> tuple[str, ...]:
    cost = table.costs[at]
    if cost is None:
        return ("–",) * 7 + (table.verdict(at),)
    return (
        str(cost.layout),
        format_bytes(cost.device_bytes),
        _moved(sum(cost.wire.values())),
        _moved(sum(cost.copies.values())),
        format_seconds(cost.step_s),
        f"{cost.bubble:.1%}" if cost.layout.pipeline > 1 else "–",
        format_prefixed(cost.tokens_per_s),
        table.verdict(at),
    )


def _moved(nbytes: float) -> str:
    return format_bytes(nbytes) if nbytes else "–"


def finder_table(found: LayoutSearch) -> picture.Table:
    """Return the finder's layout and, below it, why the best with another setting loses."""
    rows = [
        (str(cost.layout), format_bytes(cost.device_bytes), format_seconds(cost.step_s), found.why(cost))
        for cost in found.costs
    ]
    note = (
        f"Of all layouts of tensor x pipeline x data, recompute, offload and relays: {found.too_large} more do not fit even with "
        f"the fewest activations, and {found.too_slow} more are slower by a lower bound of their seconds."
    )
    return picture.Table(
        "The finder: the fastest layout, and others", ("layout", "per rank", "step", "why"), rows, note
    )


def published_table() -> picture.Table:
    """Return Megatron-LM's table with the simulated speed of each row, and the error."""
    rows: list[tuple[str, ...]] = []
    for row in MEGATRON_ROWS:
        shape, found = row.shape, row.simulated_teraflop_per_s()
        sizes = (shape.width, shape.layers, row.model_ranks, row.ranks, row.rows)
        speeds = (f"{row.teraflop_per_s:g}", f"{found:.0f}", f"{found / row.teraflop_per_s - 1:+.0%}")
        rows.append((f"{row.billions:g} B", f"{shape.parameters / 1e9:.1f}", *map(str, sizes), *speeds))
    header = ("parameters", "by formula", "width", "layers", "ranks of a model", "ranks", "rows")
    note = (
        "From two figures for all rows: matrix products at 53 % of 312 TFLOP/s, all-reduces within a node at 200 GB/s. "
        "Gradients are reduced, and messages between stages sent, in no time. Source: arXiv 2104.04473, table 1."
    )
    speeds = ("TFLOP/s per rank, printed", "simulated", "error")
    return picture.Table("Megatron-LM's table, simulated", (*header, *speeds), rows, note)


# -- one way -----------------------------------------------------------------------------------------------------------


def layout_html(table: WayTable, at: int) -> str:
    """Return the explanation of a way: method, seconds by part, messages by kind, and its schedule in slots."""
    way, cost = table.ways[at], table.costs[at]
    lines = [f"<p><strong>{escape(way.name)}</strong> ({escape(way.method)}). {escape(way.explanation)}</p>"]
    if cost is None:
        return f'<div class="l2l-layout">{lines[0]}<p>{escape(table.verdict(at))}.</p></div>'
    seconds = ", ".join(f"{part} {format_seconds(value)}" for part, value in cost.seconds.items() if value > 0)
    host = f"; on its host {format_bytes(cost.host_bytes)}" if cost.host_bytes else ""
    memory = ", ".join(f"{name} {format_bytes(value)}" for name, value in cost.memory.items() if value)
    lines.append(f"<p>{escape(f'{cost.layout}. Seconds: {seconds}. Bytes: {memory}{host}.')}</p>")
    lines.append(_messages(cost))
    schedule = _slots(cost)
    if schedule:
        words = "Its schedule on a few ranks (stage, F, B or R, micro-batch); a column is a slot, and B takes two:"
        lines.append(f"<p>{words}</p><pre>{schedule}</pre>")
    return f'<div class="l2l-layout">{"".join(lines)}</div>'


def _messages(cost: LayoutCost) -> str:
    head = "".join(f'<th scope="col">{kind}</th>' for kind in MESSAGES)
    rows = ""
    for name, moved in (("to other ranks", cost.wire), ("to the host and back", cost.copies)):
        if any(moved.values()):
            cells = "".join(f"<td>{_moved(moved[kind])}</td>" for kind in MESSAGES)
            rows += f'<tr><th scope="row">{name}</th>{cells}</tr>'
    if not rows:
        return "<p>It sends nothing.</p>"
    return (
        '<div class="l2l-layouts"><table class="l2l-table" aria-label="Messages of a rank in a step"><thead><tr><th></th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _slots(cost: LayoutCost) -> str:
    """Return the schedule of a pipeline of four ranks, or of a relay on two, as text."""
    layout = cost.layout
    if layout.is_relay:
        plan = relay_over_ranks(min(layout.pipeline, 2), 3, 4)
    elif layout.pipeline == 1:
        return ""
    else:
        plan = SCHEDULES[layout.schedule](min(layout.pipeline, 4), 4, min(layout.stages, 2))
    return escape(simulate_pipeline(plan).diagram())
