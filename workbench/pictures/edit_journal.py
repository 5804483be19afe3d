"""The journal of edits as a table: when, what, what the probe says of it, and what became of weights and optimizer.

HTML, not SVG: text of a page can be selected, searched and scrolled under a fixed header. A page needs `STYLE` once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from l2l_core.edits import JournalEntry
from l2l_core.trace import format_bytes
from workbench.pictures.picture import Table
from workbench.pictures.theme import GREEN, VERMILION
from workbench.session import NOT_MEASURED, Change, LossChange, describe_entry, journal_state_of

MAX_ENTRIES = 100  # newest entries that are shown

# A height of its own, so that what is below does not move as entries come.
STYLE = """
.l2l-journal{height:9.5em;overflow:auto;border:1px solid var(--jp-border-color2,#8886);
color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color1,Canvas);
font:12px var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums}
.l2l-journal table{border-collapse:separate;border-spacing:0;width:100%;min-width:81em;margin:0;table-layout:fixed;
font-size:inherit}
.l2l-journal th,.l2l-journal td{box-sizing:border-box;padding:3px 10px;text-align:right;white-space:nowrap;
overflow:hidden;text-overflow:ellipsis;font-weight:inherit;border-bottom:1px solid var(--jp-border-color3,#8883);background:none}
.l2l-journal thead th{position:sticky;top:0;z-index:1;background:var(--jp-layout-color2,Canvas);font-weight:600;
border-bottom:1px solid var(--jp-border-color1,#888a)}
.l2l-journal .l2l-words{text-align:left}
.l2l-journal tbody th{font-weight:600}
.l2l-journal .l2l-gone{opacity:.6}
.l2l-journal .l2l-gone .l2l-words span{text-decoration:line-through}
.l2l-journal .l2l-unknown{opacity:.65}
.l2l-journal .l2l-none{text-align:center;opacity:.65;padding:2.6em 0;border:0}
""".replace("\n", "")

PROBE_COLUMN = "probe: before → after"
_MEANINGS: Mapping[str, str] = {
    PROBE_COLUMN: "Mean loss of the same few batches before and after the edit, in evaluation mode. The change is the mean over "
    "the batches, ± its standard deviation over them; ▲ worse and ▼ better by more than that."
}
_COLOURS: Mapping[str, str] = {"▲": VERMILION, "▼": GREEN}

_COLUMNS = (  # em; 0: what is left
    ("", 3),
    ("step", 4.5),
    ("edit", 0),
    (PROBE_COLUMN, 22),
    ("layers", 5.5),
    ("weights", 7.5),
    ("bytes", 7),
    ("function", 7),
    ("optimizer state", 13),
)
_LEFT = ("edit", "optimizer state")
_EMPTY = "No edit yet. What is applied appears here, with the loss of the probe before and after."


def draw_journal(journal: Sequence[JournalEntry], changes: Sequence[Change] = ()) -> str:
    """Write an HTML table in a box that scrolls, newest entry first; edits that are undone are struck through.

    Args:
        journal: of a relay.
        changes: of a session, which know what the probe says of edits.
    """
    head = "".join(
        f'<th scope="col"{_class(name)} style="{f"width:{width}em" if width else ""}" title="{_MEANINGS.get(name, "")}">'
        f"{name}</th>"
        for name, width in _COLUMNS
    )
    gone, known = _undone_entries(journal), _changes_by_entry(changes)
    rows = [
        _row(entry, journal, entry.number in gone, known.get(entry.number))
        for entry in journal[: -MAX_ENTRIES - 1 : -1]
    ]
    if not rows:
        rows = [f'<tr><td class="l2l-none" colspan="{len(_COLUMNS)}">{_EMPTY}</td></tr>']
    if len(journal) > MAX_ENTRIES:
        rows.append(
            f'<tr><td class="l2l-words" colspan="{len(_COLUMNS)}">… {len(journal) - MAX_ENTRIES} earlier</td></tr>'
        )
    return (
        f'<div class="l2l-journal" role="region" aria-label="Journal of edits" tabindex="0"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def journal_table(journal: Sequence[JournalEntry], changes: Sequence[Change] = ()) -> Table:
    """Make a table of the same in text, newest entry first."""
    gone, known = _undone_entries(journal), _changes_by_entry(changes)
    shown = journal[: -MAX_ENTRIES - 1 : -1]
    rows = [
        (
            str(entry.number),
            *_cells(entry, journal, known.get(entry.number)),
            "undone" if entry.number in gone else "in force",
        )
        for entry in shown
    ]
    note = f"… {len(journal) - len(shown)} earlier" if len(shown) < len(journal) else ""
    header = ("no.", *(name for name, _ in _COLUMNS[1:]), "state")
    return Table("Journal of edits", header, rows, note)


def _undone_entries(journal: Sequence[JournalEntry]) -> set[int]:
    """Numbers of edits that are not in force."""
    return {entry.number for entry in journal if entry.kind == "edit"} - {
        e.number for e in journal_state_of(journal).in_force
    }


def _changes_by_entry(changes: Sequence[Change]) -> dict[int, Change]:
    """Edits of a session by their line in the journal."""
    return {change.entry: change for change in changes if change.entry is not None}


def _cells(entry: JournalEntry, journal: Sequence[JournalEntry], change: Change | None) -> Iterator[str]:
    """Words of a line, but for its number."""
    yield str(entry.step)
    yield describe_entry(entry, journal)
    yield NOT_MEASURED if change is None else change.verdict
    yield str(entry.layers)
    yield f"{entry.params:+,}" if entry.params else "0"
    yield ("−" if entry.nbytes < 0 else "+" if entry.nbytes else "") + format_bytes(abs(entry.nbytes))
    yield "= same" if entry.preserves_function else "≠ other"
    yield entry.optimizer


def _row(entry: JournalEntry, journal: Sequence[JournalEntry], gone: bool, change: Change | None) -> str:
    step, words, said, layers, params, nbytes, computes, optimizer = map(escape, _cells(entry, journal, change))
    cells = [
        f"<td>{entry.number}</td>",
        f"<td>{step}</td>",
        f'<th scope="row" class="l2l-words" title="{escape(entry.what)}">{"undone: " if gone else ""}<span>{words}</span></th>',
        _verdict_cell(said, None if change is None else change.judged),
        *(f"<td>{cell}</td>" for cell in (layers, params.replace("-", "−"), nbytes, computes)),
        f'<td class="l2l-words" title="{optimizer}">{optimizer}</td>',
    ]
    return f'<tr class="{"l2l-gone" if gone else ""}">{"".join(cells)}</tr>'


def _verdict_cell(verdict: str, change: LossChange | None) -> str:
    """The cell of the probe, with a mark in colour where there is a verdict; what was not measured is grey, and told whole."""
    if change is None:
        return f'<td class="l2l-unknown" title="{verdict}">{verdict}</td>'
    # the words are escaped already, so the mark may become markup
    for mark, colour in _COLOURS.items():
        verdict = verdict.replace(mark, f'<b style="color:{colour}">{mark}</b>')
    return f"<td>{verdict}</td>"


def _class(name: str) -> str:
    return ' class="l2l-words"' if name in _LEFT else ""
