"""Comparison of strategies: seconds of a step over peak device bytes, a mark per strategy, and the table.

Bytes are measured, seconds simulated. The line is the Pareto front: no strategy on it is beaten in both figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from l2l_core.strategies import StrategyResult, StrategyTable
from l2l_core.trace import format_bytes
from workbench.pictures import picture, svg
from workbench.pictures.picture import Picture
from workbench.pictures.scale import Scale, format_seconds, ticks
from workbench.pictures.theme import BLUE, VERMILION

WIDTH, HEIGHT = 620, 372
LEFT, RIGHT, TOP, BOTTOM = 70, 606, 34, 306  # px
_FAR_BUDGET = 4.0  # a budget beyond this multiple of the largest peak is named at the edge
_LETTER, _LINE = 6.3, 13.0  # px of a label
HEADER = ("way", "device, measured", "host, measured", "layer forwards", "step, simulated", "")

STYLE = """
.l2l-ways{display:flex;flex-flow:row wrap;gap:4px 20px;align-items:flex-start}
.l2l-ways>*{flex:1 1 460px;min-width:0}
.l2l-ways>:first-child{flex:1 1 430px;max-width:700px}
.l2l-ways .widget-html-content{min-width:0}
.l2l-way{overflow-x:auto}
.l2l-way svg{min-width:680px}
.l2l-ways-table{overflow-x:auto}
.l2l-ways .l2l-ways-table table{font-size:12px;line-height:1.35}
.l2l-ways-table th,.l2l-ways-table td{white-space:nowrap;vertical-align:top}
.l2l-ways .l2l-ways-table :is(th,td){padding-right:9px}
.l2l-ways-table tbody th{white-space:normal;min-width:9em}
.l2l-ways-table td:last-child{white-space:normal;min-width:6em;text-align:left}
.l2l-ways-table thead th{font-weight:600;vertical-align:bottom;white-space:normal}
.l2l-ways-table .l2l-how{font-weight:400;opacity:.75;border-bottom:1px solid;text-align:center!important}
.l2l-ways-table tr.l2l-chosen>*{font-weight:700}
.l2l-ways .l2l-caption{font-size:12px;opacity:.75}
.l2l-ways p{font-size:13px;margin:2px 0 6px;line-height:1.45}
""".replace("\n", "")


def row_key(at: int) -> str:
    """Return the key of the row at a position of the table."""
    return f"way-{at}"


def show_strategies(table: StrategyTable, chosen: int | None = None) -> Picture:
    """Return the comparison as a picture with its table; `chosen` is the position of the marked row."""
    return Picture(draw_strategies(table, chosen), strategies_table(table))


def best_strategy(table: StrategyTable) -> int | None:
    """Return the position of the fastest row that fits, else of the smallest; None without any step."""
    made = [i for i, row in enumerate(table.rows) if not row.why]
    fitting = [i for i in made if table.fits(table.rows[i])]
    if fitting:
        return min(fitting, key=lambda i: (table.rows[i].seconds, table.rows[i].peak_device_bytes))
    return min(made, key=lambda i: table.rows[i].peak_device_bytes, default=None)


def describe_best_strategy(table: StrategyTable) -> str:
    """Return a sentence on the best strategy."""
    best = best_strategy(table)
    if best is None:
        return "None of these ways has a step for this device; the table gives the reasons."
    row, budget = table.rows[best], table.memory_bytes
    needs = f"{format_bytes(row.peak_device_bytes)} of the device (measured)"
    if not table.fits(row):
        return f"None of these ways fits into {format_bytes(budget or 0)}. The smallest is {row.name}: {needs}."
    within = "" if budget is None else f" of those that fit into {format_bytes(budget)}"
    return f"Fastest{within}: {row.name}, {format_seconds(row.seconds)} a step (simulated), {needs}."


def strategies_table(table: StrategyTable) -> picture.Table:
    """Return a table of all strategies, in the given order."""
    rows = [(row.name, *(["–"] * 4 + ["no plan"] if row.why else _cells(table, row))) for row in table.rows]
    why = [f"{row.why}." for row in table.rows if row.why]
    note = " ".join([describe_best_strategy(table), *why, _METHOD_NOTE])
    return picture.Table("Ways to train, side by side", HEADER, rows, note)


_METHOD_NOTE = (
    "Measured: metered in a real step on a copy, without a budget. Simulated: from measured operations and the stated link; "
    "updates on the device are left out."
)


def strategies_html(table: StrategyTable, chosen: int | None = None) -> str:
    """Return the table as HTML, with a key per row and the columns grouped: measured, counted, simulated."""
    rows = []
    for i, row in enumerate(table.rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(table, row))
        if row.why:
            cells = f'<td colspan="5">{escape(row.why)}</td>'
        marked = ' class="l2l-chosen"' if i == chosen else ""
        name = f'<th scope="row">{i + 1} {escape(row.name)}</th>'
        rows.append(f'<tr data-key="{row_key(i)}"{marked}>{name}{cells}</tr>')
    groups = (
        '<tr><td></td><th scope="colgroup" colspan="2" class="l2l-how">measured</th><th class="l2l-how">counted</th>'
        '<th class="l2l-how">simulated</th><td></td></tr>'
    )
    names = "".join(f'<th scope="col">{name}</th>' for name in ("way", "device", "host", "layer forwards", "step", ""))
    return (
        f'<p>{escape(describe_best_strategy(table))}</p><div class="l2l-ways-table"><table class="l2l-table" '
        f'aria-label="Ways to train"><thead>{groups}<tr>{names}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        f'<div class="l2l-caption">{escape(_METHOD_NOTE)}</div>'
    )


def _cells(table: StrategyTable, row: StrategyResult) -> Sequence[str]:
    notes = ["front"] if _is_in_front(row, table.pareto()) else []
    notes += [] if table.fits(row) else ["does not fit"]
    host = format_bytes(row.peak_host_bytes) if row.peak_host_bytes else "–"
    costs = str(row.layer_forwards), format_seconds(row.seconds)
    return format_bytes(row.peak_device_bytes), host, *costs, ", ".join(notes)


def _is_in_front(row: StrategyResult, front: Sequence[StrategyResult]) -> bool:
    return any(row is one for one in front)  # by identity: two strategies may have equal figures


class _StrategyMark(NamedTuple):
    at: int  # position in the table
    row: StrategyResult
    x: float
    y: float
    in_front: bool


def draw_strategies(table: StrategyTable, chosen: int | None = None) -> str:
    """Draw a mark per strategy, the front and the budget, as an SVG; strategies without a step are left out."""
    made = [(i, row) for i, row in enumerate(table.rows) if not row.why]
    across, up = _scales(table, [row for _, row in made])
    front = table.pareto()
    marks = [
        _StrategyMark(i, row, across(row.peak_device_bytes), up(row.seconds), _is_in_front(row, front))
        for i, row in made
    ]
    parts = [svg.rect(LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP, style="well"), *_axes(across, up)]
    parts += _budget(table, across)
    parts += _front([mark for mark in marks if mark.in_front])
    if not marks:
        x, y = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
        parts.append(svg.text(x, y, "no way has a step", style="dim", anchor="middle"))
    parts += _labels(marks)
    for mark in sorted(marks, key=lambda mark: mark.x):  # arrow keys move from left to right
        parts += _mark(mark, table.fits(mark.row), mark.at == chosen)
    parts += _legend()
    return svg.document(WIDTH, HEIGHT, "Ways to train: seconds of a step against bytes", _describe(table), parts)


def _scales(table: StrategyTable, rows: Sequence[StrategyResult]) -> tuple[Scale, Scale]:
    """Return scales that fit all strategies, and the budget unless it is far above."""
    nbytes = [float(row.peak_device_bytes) for row in rows] or [0.0]
    if table.memory_bytes is not None and table.memory_bytes <= _FAR_BUDGET * max(nbytes):
        nbytes.append(float(table.memory_bytes))
    seconds = [row.seconds for row in rows] or [0.0]
    return Scale(*_padded(nbytes, 0.08), LEFT, RIGHT), Scale(*_padded(seconds, 0.1), BOTTOM, TOP)


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = share * (high - low) or 0.1 * high or 1.0
    return max(0.0, low - room), high + room


def _axes(across: Scale, up: Scale) -> Iterator[str]:
    marks_x, marks_y = ticks(across.low, across.high, 7), ticks(up.low, up.high, 6)
    lines = [f"M{across(m):.1f} {TOP}V{BOTTOM}" for m in marks_x] + [f"M{LEFT} {up(m):.1f}H{RIGHT}" for m in marks_y]
    yield svg.path("".join(lines), style="rule")
    yield svg.path(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}", style="axis")
    for mark in marks_x:
        words = format_bytes(mark) if mark else "0"
        yield svg.text(across(mark), BOTTOM + 16, words, style="small dim", anchor="middle")
    for mark in marks_y:
        yield svg.text(LEFT - 8, up(mark) + 4, format_seconds(mark) if mark else "0", style="small dim", anchor="end")
    yield svg.text(0, 14, "seconds of a step, simulated", style="small strong")
    words = "highest bytes on the device, measured"
    yield svg.text(RIGHT, BOTTOM + 34, words, style="small strong", anchor="end")


def _budget(table: StrategyTable, across: Scale) -> Iterator[str]:
    if table.memory_bytes is None:
        return
    words, x = f"budget {format_bytes(table.memory_bytes)}", across(table.memory_bytes)
    if table.memory_bytes > across.high:
        yield svg.text(RIGHT, TOP - 8, f"{words}, far above ▸", style="strong small", anchor="end")
        return
    if table.memory_bytes > across.low:
        yield svg.path(svg.hatch(x, TOP, RIGHT - x, BOTTOM - TOP, 9), style="rule")
    x = max(x, LEFT)
    yield svg.path(f"M{x:.1f} {TOP - 4}V{BOTTOM}", stroke=VERMILION, width=2)
    anchor = "end" if x > (LEFT + RIGHT) / 2 else "start"
    yield svg.text(x, TOP - 8, f"{words}; right of it nothing fits", style="strong small", anchor=anchor)


def _front(marks: Sequence[_StrategyMark]) -> Iterator[str]:
    """Draw a staircase through the marks of the front: up from the smallest strategy, right from the fastest."""
    if not marks:
        return
    first, *others = sorted(marks, key=lambda mark: mark.x)
    steps = "".join(f"H{mark.x:.1f}V{mark.y:.1f}" for mark in others)
    yield svg.path(f"M{first.x:.1f} {TOP}V{first.y:.1f}{steps}H{RIGHT}", stroke=BLUE, width=1.8, fill="none")


def _mark(mark: _StrategyMark, fits: bool, is_chosen: bool) -> Iterator[str]:
    x, y, row, key = mark.x, mark.y, mark.row, svg.layer_attribute(row_key(mark.at))
    circle, diamond = f"M{x - 6:.1f} {y:.1f}a6 6 0 1 0 12 0a6 6 0 1 0 -12 0z", f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"
    d = circle if fits else diamond
    if is_chosen:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11" class="axis" stroke-width="2.5" style="stroke-opacity:1"/>'
    fill = BLUE if mark.in_front else svg.PAGE
    tip = f"{row.name}: device {format_bytes(row.peak_device_bytes)} measured, step {format_seconds(row.seconds)} simulated"
    yield f'<path d="{d}" fill="{fill}" stroke="{BLUE}" stroke-width="2"{key}><title>{escape(tip)}</title></path>'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="12" fill="transparent"{key}><title>{escape(tip)}</title></circle>'


class _LabelBox(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _LabelBox) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def _labels(marks: Sequence[_StrategyMark]) -> Iterator[str]:
    """Draw number and name near every mark without overlaps, or the number alone if there is no room."""
    taken = [_LabelBox(mark.x - 7, mark.y - 7, mark.x + 7, mark.y + 7) for mark in marks]
    for mark in sorted(marks, key=lambda mark: (mark.x, mark.y)):
        for words in (f"{mark.at + 1} {mark.row.name}", f"{mark.at + 1}"):
            places = _label_places(mark, _LETTER * len(words))
            box = next((box for box in places if not any(map(box.overlaps, taken))), None)
            if box is not None:
                taken.append(box)
                if abs((box.top + box.bottom) / 2 - mark.y) > 1.6 * _LINE:
                    end = min(max(mark.x, box.left), box.right)
                    edge = box.top if box.top > mark.y else box.bottom
                    yield svg.path(f"M{mark.x:.1f} {mark.y:.1f}L{end:.1f} {edge:.1f}", style="axis", width=0.8)
                label = svg.outlined_text(svg.text(box.left, box.bottom - 3, words, style="small"))
                yield f"<g{svg.layer_attribute(row_key(mark.at))}>{label}</g>"
                break


def _label_places(mark: _StrategyMark, width: float) -> Iterator[_LabelBox]:
    """Yield places for a label within the axes, nearest first, above or below the mark."""
    for far in range(7):
        for below in (False, True):
            top = mark.y + 3 + far * _LINE if below else mark.y - 3 - (far + 1) * _LINE
            for left in (mark.x + 9, mark.x - 9 - width):
                box = _LabelBox(left, top, left + width, top + _LINE)
                if box.left >= LEFT and box.right <= RIGHT and box.top >= TOP and box.bottom <= BOTTOM:
                    yield box


def _legend() -> Iterator[str]:
    y, x = HEIGHT - 12, LEFT + 176
    yield svg.path(f"M{LEFT} {y - 4}h22", stroke=BLUE, width=1.8)
    yield f'<circle cx="{LEFT + 11}" cy="{y - 4}" r="5" fill="{BLUE}"/>'
    yield svg.text(LEFT + 28, y, "front: no other beats it", style="small")
    yield f'<circle cx="{x}" cy="{y - 4}" r="5" fill="none" stroke="{BLUE}" stroke-width="2"/>'
    yield svg.text(x + 12, y, "another beats it", style="small")
    x += 118
    yield f'<path d="M{x} {y - 10}l6 6l-6 6l-6 -6z" fill="none" stroke="{BLUE}" stroke-width="2"/>'
    yield svg.text(x + 12, y, "does not fit", style="small")


def _describe(table: StrategyTable) -> str:
    rows = [row for row in table.rows if not row.why]
    figures = "; ".join(f"{r.name}: {format_bytes(r.peak_device_bytes)}, {format_seconds(r.seconds)}" for r in rows)
    return f"{describe_best_strategy(table)} {figures}."
