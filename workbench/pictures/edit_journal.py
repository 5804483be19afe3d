"""Journal of edits as an HTML table with probe losses, the probe in words, and the table of branches.

A page needs `STYLE` once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from l2l_core.edits import Branch, JournalEntry
from l2l_core.trace import format_bytes
from workbench.pictures.picture import Table
from workbench.pictures.scale import format_seconds
from workbench.pictures.theme import GREEN, VERMILION
from workbench.session import NOT_MEASURED, Change, LossChange, ProbeRow, describe_entry, journal_state_of

MAX_ENTRIES = 100  # the newest ones are shown

# The height is fixed, so that new entries do not move the page below.
STYLE = """
.l2l-journal{height:9.5em;overflow:auto;border:1px solid var(--jp-border-color2,#8886);
color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color1,Canvas);
font:12px var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums}
.l2l-journal table{border-collapse:separate;border-spacing:0;width:100%;margin:0;font-size:inherit}
.l2l-journal th,.l2l-journal td{box-sizing:border-box;padding:3px 10px;text-align:right;white-space:nowrap;
overflow:hidden;text-overflow:ellipsis;font-weight:inherit;border-bottom:1px solid var(--jp-border-color3,#8883);background:none}
.l2l-journal thead th{position:sticky;top:0;z-index:1;background:var(--jp-layout-color2,Canvas);font-weight:600;
border-bottom:1px solid var(--jp-border-color1,#888a)}
.l2l-journal .l2l-words{text-align:left}
.l2l-journal tbody :is(.l2l-words,td:nth-child(4)){white-space:normal}
.l2l-journal tbody th.l2l-words{min-width:11em}
.l2l-journal tbody th{font-weight:600}
.l2l-journal .l2l-gone{opacity:.6}
.l2l-journal .l2l-gone .l2l-words span{text-decoration:line-through}
.l2l-journal .l2l-unknown{opacity:.65}
.l2l-journal .l2l-none{text-align:center;opacity:.65;padding:2.6em 0;border:0}
""".replace("\n", "")

PROBE_COLUMN = "probe: before → after"
_MEANINGS: Mapping[str, str] = {
    PROBE_COLUMN: "Mean loss of the same few batches before and after the edit, in evaluation mode. The change is the mean over "
    "the batches, ± its standard deviation over them, of this one run: it is no spread over seeds. ▲ worse and ▼ better by more "
    "than that.",
    "function": "Whether the model computes the same as just before the edit.",
    "optimizer state": "State of the optimizer for the new or changed weights; parked is kept in memory for undo.",
}
_COLOURS: Mapping[str, str] = {"▲": VERMILION, "▼": GREEN}

_COLUMNS = ("", "step", "edit", PROBE_COLUMN, "layers", "weights", "bytes", "function", "optimizer state")
_LEFT = ("edit", "optimizer state")
_EMPTY = "No edit yet. Applied edits appear here, with the loss of the probe before and after."


def draw_journal(journal: Sequence[JournalEntry], changes: Sequence[Change] = ()) -> str:
    """Return the journal as an HTML table in a scrolling box, newest entry first; undone edits are struck through.

    Args:
        journal: journal of a relay.
        changes: changes of a session, with the probe's verdicts.
    """
    head = ""
    for name in _COLUMNS:
        aligned = ' class="l2l-words"' if name in _LEFT else ""
        head += f'<th scope="col"{aligned} title="{_MEANINGS.get(name, "")}">{name}</th>'
    undone, by_entry = _undone_entries(journal), _changes_by_entry(changes)
    shown = journal[: -MAX_ENTRIES - 1 : -1]
    rows = [_row(entry, journal, entry.number in undone, by_entry.get(entry.number)) for entry in shown]
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
    """Return the journal as a table of text, newest entry first."""
    undone, by_entry = _undone_entries(journal), _changes_by_entry(changes)
    shown, rows = journal[: -MAX_ENTRIES - 1 : -1], []
    for entry in shown:
        cells = _cells(entry, journal, by_entry.get(entry.number))
        rows.append((str(entry.number), *cells, "undone" if entry.number in undone else "in force"))
    note = f"… {len(journal) - len(shown)} earlier" if len(shown) < len(journal) else ""
    header = ("no.", *_COLUMNS[1:], "state")
    return Table("Journal of edits", header, rows, note)


def _undone_entries(journal: Sequence[JournalEntry]) -> set[int]:
    in_force = {entry.number for entry in journal_state_of(journal).in_force}
    return {entry.number for entry in journal if entry.kind == "edit"} - in_force


def _changes_by_entry(changes: Sequence[Change]) -> dict[int, Change]:
    return {change.entry: change for change in changes if change.entry is not None}


def _cells(entry: JournalEntry, journal: Sequence[JournalEntry], change: Change | None) -> Iterator[str]:
    """Yield the cells of a row after its number."""
    yield str(entry.step)
    yield describe_entry(entry, journal)
    yield NOT_MEASURED if change is None else change.verdict
    yield str(entry.layers)
    yield f"{entry.params:+,}" if entry.params else "0"
    yield ("−" if entry.nbytes < 0 else "+" if entry.nbytes else "") + format_bytes(abs(entry.nbytes))
    yield "the same" if entry.preserves_function else "another"
    yield entry.optimizer


def _row(entry: JournalEntry, journal: Sequence[JournalEntry], undone: bool, change: Change | None) -> str:
    step, words, verdict, layers, params, nbytes, function, optimizer = map(escape, _cells(entry, journal, change))
    cells = [
        f"<td>{entry.number}</td>",
        f"<td>{step}</td>",
        f'<th scope="row" class="l2l-words" title="{escape(entry.what)}">{"undone: " if undone else ""}<span>{words}</span></th>',
        _verdict_cell(verdict, None if change is None else change.judged),
        *(f"<td>{cell}</td>" for cell in (layers, params.replace("-", "−"), nbytes, function)),
        f'<td class="l2l-words" title="{optimizer}">{optimizer}</td>',
    ]
    return f'<tr class="{"l2l-gone" if undone else ""}">{"".join(cells)}</tr>'


def _verdict_cell(verdict: str, change: LossChange | None) -> str:
    """Return the probe's cell: grey with a tooltip if not measured, else with a coloured mark."""
    if change is None:
        return f'<td class="l2l-unknown" title="{verdict}">{verdict}</td>'
    # `verdict` is already escaped
    for mark, colour in _COLOURS.items():
        verdict = verdict.replace(mark, f'<b style="color:{colour}">{mark}</b>')
    return f"<td>{verdict}</td>"


def describe_probe(probe: ProbeRow) -> str:
    """Return the probe's batches, cost and source, as in "4 batches, 0.8 s per measurement: ..."."""
    cost = "cost not measured yet" if probe.seconds is None else f"{format_seconds(probe.seconds)} per measurement"
    count = f"up to {probe.most}" if probe.batches is None else str(probe.batches)
    source = "the batches given as probe=[...]"
    if not probe.is_given:
        since = "the next step" if probe.first_step is None else f"step {probe.first_step}"
        source = f"the training batches from {since} on; give probe=[...] for held-out ones"
    return f"{count} batch{'' if probe.batches == 1 else 'es'}, {cost}: {source}"


def branches_table(branches: Sequence[Branch]) -> Table:
    """Return a table with one row per branch; bytes are in addition to those of the active branch."""
    rows = [
        (
            branch.name,
            "present" if branch.active else "",
            str(branch.steps),
            str(branch.layers),
            "–" if branch.loss is None else f"{branch.loss:.4g}",
            "–" if branch.active else format_bytes(branch.nbytes),  # the active branch is the live state
        )
        for branch in branches
    ]
    return Table("Branches", ("branch", "", "step", "layers", "loss", "host bytes"), rows)
