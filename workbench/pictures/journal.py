"""The journal of edits as a table: when, what, the loss before and after, and what became of weights and optimizer.

HTML, not SVG: text of a page can be selected, searched and scrolled under a fixed header. A page needs `STYLE` once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from l2l_core.edits import Entry
from l2l_core.trace import format_bytes
from workbench.pictures.picture import Table
from workbench.pictures.theme import GREEN, VERMILION
from workbench.session import entry_words, turns_of

MOST = 100  # newest entries that are shown

STYLE = """
.l2l-journal{height:13.5em;overflow:auto;border:1px solid var(--jp-border-color2,#8886);
color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color1,Canvas);
font:12px var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums}
.l2l-journal table{border-collapse:separate;border-spacing:0;width:100%;min-width:76em;margin:0;table-layout:fixed;
font-size:inherit}
.l2l-journal th,.l2l-journal td{box-sizing:border-box;padding:3px 10px;text-align:right;white-space:nowrap;
overflow:hidden;text-overflow:ellipsis;font-weight:inherit;border-bottom:1px solid var(--jp-border-color3,#8883);background:none}
.l2l-journal thead th{position:sticky;top:0;z-index:1;background:var(--jp-layout-color2,Canvas);font-weight:600;
border-bottom:1px solid var(--jp-border-color1,#888a)}
.l2l-journal .l2l-words{text-align:left}
.l2l-journal tbody th{font-weight:600}
.l2l-journal .l2l-gone{opacity:.6}
.l2l-journal .l2l-gone .l2l-words span{text-decoration:line-through}
.l2l-journal i{font-style:normal;display:inline-block;width:5.8em;margin-left:4px;text-align:left}
.l2l-journal .l2l-none{text-align:center;opacity:.65;padding:2.6em 0;border:0}
""".replace("\n", "")

_COLUMNS = (  # em; 0: what is left
    ("", 3),
    ("step", 4.5),
    ("edit", 0),
    ("loss before → after", 17),
    ("layers", 5.5),
    ("weights", 7.5),
    ("bytes", 7),
    ("function", 7),
    ("optimizer state", 13),
)
_LEFT = ("edit", "optimizer state")
_EMPTY = "No edit yet. What is applied appears here, with the loss before and after."


def draw_journal(journal: Sequence[Entry]) -> str:
    """An HTML table in a box that scrolls, newest entry first; edits that are undone are struck through."""
    head = "".join(
        f'<th scope="col"{_class(name)} style="{f"width:{width}em" if width else ""}">{name}</th>'
        for name, width in _COLUMNS
    )
    gone = _gone(journal)
    rows = [_row(entry, journal, entry.number in gone) for entry in journal[: -MOST - 1 : -1]]
    if not rows:
        rows = [f'<tr><td class="l2l-none" colspan="{len(_COLUMNS)}">{_EMPTY}</td></tr>']
    if len(journal) > MOST:
        rows.append(f'<tr><td class="l2l-words" colspan="{len(_COLUMNS)}">… {len(journal) - MOST} earlier</td></tr>')
    return (
        f'<div class="l2l-journal" role="region" aria-label="Journal of edits" tabindex="0"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def journal_table(journal: Sequence[Entry]) -> Table:
    """The same in text, newest entry first."""
    gone = _gone(journal)
    shown = journal[: -MOST - 1 : -1]
    rows = [
        (str(entry.number), *_cells(entry, journal), "undone" if entry.number in gone else "in force")
        for entry in shown
    ]
    note = f"… {len(journal) - len(shown)} earlier" if len(shown) < len(journal) else ""
    header = ("no.", *(name for name, _ in _COLUMNS[1:]), "state")
    return Table("Journal of edits", header, rows, note)


def _gone(journal: Sequence[Entry]) -> set[int]:
    """Numbers of edits that are not in force."""
    return {entry.number for entry in journal if entry.kind == "edit"} - {e.number for e in turns_of(journal).in_force}


def _cells(entry: Entry, journal: Sequence[Entry]) -> Iterator[str]:
    """Words of a line, but for its number."""
    yield str(entry.step)
    yield entry_words(entry, journal)
    yield f"{_loss(entry.loss_before)} → {_loss(entry.loss_after)}"
    yield str(entry.layers)
    yield f"{entry.params:+,}" if entry.params else "0"
    yield ("−" if entry.nbytes < 0 else "+" if entry.nbytes else "") + format_bytes(abs(entry.nbytes))
    yield "= same" if entry.preserves_function else "≠ other"
    yield entry.optimizer


def _row(entry: Entry, journal: Sequence[Entry], gone: bool) -> str:
    step, words, loss, layers, params, nbytes, computes, optimizer = map(escape, _cells(entry, journal))
    cells = [
        f"<td>{entry.number}</td>",
        f"<td>{step}</td>",
        f'<th scope="row" class="l2l-words" title="{escape(entry.what)}">{"undone: " if gone else ""}<span>{words}</span></th>',
        f"<td>{loss} {_trend(entry)}</td>",
        *(f"<td>{cell}</td>" for cell in (layers, params.replace("-", "−"), nbytes, computes)),
        f'<td class="l2l-words" title="{optimizer}">{optimizer}</td>',
    ]
    return f'<tr class="{"l2l-gone" if gone else ""}">{"".join(cells)}</tr>'


def _trend(entry: Entry) -> str:
    """By how much the loss went up or down, with a sign."""
    before, after = entry.loss_before, entry.loss_after
    if before is None or after is None or not math.isfinite(before) or not math.isfinite(after):
        return "<i></i>"
    colour, arrow, sign = (VERMILION, "▲", "+") if after > before else (GREEN, "▼", "−")
    return f'<i><b style="color:{colour}">{arrow}</b> {sign}{abs(after - before):.3g}</i>'


def _class(name: str) -> str:
    return ' class="l2l-words"' if name in _LEFT else ""


def _loss(loss: float | None) -> str:
    return "…" if loss is None else f"{loss:.4g}"
