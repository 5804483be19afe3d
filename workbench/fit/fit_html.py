"""The table of ways as HTML: a row per way, and figures above their origin."""

from __future__ import annotations

from html import escape

from l2l_core.trace import format_bytes
from workbench.fit.cards import cards_table
from workbench.fit.fit_table import FitTable, FitWay, Measure, seconds_text
from workbench.pictures import Table

_COLUMNS = ("way", "micro-batches", "device", "host", "disk", "a step", "binds", "fits?")

STYLE = """
.l2l-fit-table{overflow-x:auto}
.l2l-fit-table table{font-size:12px;line-height:1.3;border-collapse:collapse;width:100%}
.l2l-fit-table :is(th,td){padding:4px 12px 4px 0;text-align:left!important;vertical-align:top;white-space:nowrap}
.l2l-fit-table tbody tr{border-top:1px solid color-mix(in srgb,currentColor 18%,transparent)}
.l2l-fit-table th:first-child{padding-left:10px}
.l2l-fit-table tbody th{font-weight:600}
.l2l-workbench .l2l-fit-controls{flex-flow:row wrap}
.l2l-fit-table td:last-child{white-space:normal;min-width:11em}
.l2l-fit-table .l2l-origin{display:block;font-size:11px;opacity:.7}
.l2l-fit-table tr.l2l-lacks>:not(th,:last-child){opacity:.55}
.l2l-fit-table tr.l2l-lacks>:last-child::before{content:"× "}
.l2l-fit-table tr.l2l-fitting>:last-child::before{content:"✓ "}
.l2l-fit-table tr[data-key]{cursor:pointer}
.l2l-fit-table tr.l2l-chosen>*{background:color-mix(in srgb,currentColor 10%,transparent)}
.l2l-fit-old{opacity:.5}
.l2l-fit-title{font-size:13px;opacity:.8;margin:2px 0}
.l2l-fit-summary{font-size:14px;font-weight:600;margin:4px 0 8px}
.l2l-fit-code{white-space:pre;overflow-x:auto;font-size:12px;line-height:1.35;padding:8px 10px;margin:4px 0;
border:1px solid color-mix(in srgb,currentColor 25%,transparent);border-radius:4px}
""".replace("\n", "")


def way_key(name: str) -> str:
    """Return the key of a way's row."""
    return f"fit-{name.replace(' ', '-')}"


def fit_html(table: FitTable, chosen: str | None = None) -> str:
    """Return title, summary, table and notes; `chosen` is the name of the marked way."""
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    rows = "".join(_row(table, way, way.name == chosen) for way in table.ways)
    notes = "<br>".join(map(escape, table.notes))
    return (
        f'<div class="l2l-fit-title">{escape(table.title)}</div><div class="l2l-fit-summary">{escape(table.summary)}</div>'
        f'<div class="l2l-fit-table"><table class="l2l-table" aria-label="Ways to train"><thead><tr>{head}</tr></thead>'
        f'<tbody>{rows}</tbody></table></div><div class="l2l-caption">{notes}</div>'
    )


def _row(table: FitTable, way: FitWay, is_chosen: bool) -> str:
    name = f'<th scope="row">{escape(way.name)}</th>'
    classes = ["l2l-fitting" if table.fits(way) else "l2l-lacks", *["l2l-chosen"] * is_chosen]
    opening = f'<tr data-key="{way_key(way.name)}" class="{" ".join(classes)}">{name}'
    if way.reason:
        return f'{opening}<td colspan="6">–</td><td>{escape(way.reason)}</td></tr>'
    batches, *_, binds, verdict = table.cells(way)
    bytes_cells = "".join(map(_bytes_cell, (way.device, way.host, way.disk)))
    seconds = _with_origin(seconds_text(way.seconds), way.seconds)
    return (
        f"{opening}<td>{escape(batches)}</td>{bytes_cells}<td>{seconds}</td><td>{escape(binds)}</td>"
        f"<td>{escape(verdict)}</td></tr>"
    )


def _bytes_cell(figure: Measure) -> str:
    return f"<td>{_with_origin(format_bytes(figure.value), figure) if figure.value else '–'}</td>"


def _with_origin(text: str, figure: Measure) -> str:
    return f'{escape(text)}<span class="l2l-origin">{figure.origin}</span>'


def card_table() -> Table:
    """Return the table of cards with the source of each row."""
    header = ("card", "memory", "TFLOP/s, bf16", "TFLOP/s, fp32", "memory speed", "link", "source")
    note = "Peaks: dense matrix products; the link in one direction, 16 lanes of PCI Express 4 or 5."
    return Table("Cards", header, cards_table(), note)
