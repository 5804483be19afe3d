"""The card of a layer: what it is, what it is made of, and what was found out about it, in HTML and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import prod

from l2l_core.trace import format_bytes
from workbench.pictures.picture import Table
from workbench.pictures.shades import show_figure
from workbench.readings import Numbers, full_name
from workbench.session import How, LayerFacts, LayerRow, Moment, Trial

PARTS_UP_TO = 12  # parameters that are listed
_COLUMN = 4  # of them, one below the other
TRIAL_WORDS: Mapping[How, str] = {"without": "loss without it", "twice": "loss with it twice"}

STYLE = """
.l2l-card-facts{font-size:12.5px;line-height:1.5;font-variant-numeric:tabular-nums}
.l2l-card-facts strong{font-size:14px}
.l2l-card-parts{display:flex;flex-wrap:wrap;gap:0 20px;max-height:80px;overflow:auto;align-items:flex-start}
.l2l-card-parts table{margin:2px 0;font-size:12px;line-height:18px;border-spacing:0}
.l2l-card-facts td,.l2l-card-facts th{padding:0 14px 0 0;text-align:left;font-weight:inherit}
.l2l-code code{user-select:all;font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px}
""".replace("\n", "")


def moment_words(moment: Moment, now: Moment) -> str:
    """Say when something was measured; of another moment than `now`, that it is old."""
    where = f" of {moment.branch}" if moment.branch != now.branch else ""
    if moment == now:
        return f"after step {moment.step}"
    # the same branch and step: only changes lie between
    since = " and edits or settings since" if moment[:2] == now[:2] else f", now it is step {now.step}"
    return f"old: after step {moment.step}{where}{since}"


def facts_html(row: LayerRow, numbers: Numbers, facts: LayerFacts | None) -> str:
    """Write what a layer is, as HTML; `facts` are None as long as nobody has looked."""
    said = " · ".join(escape(words) for words in _facts(row, facts))
    parts = [] if facts is None else [_part_row(*cells) for cells in _parts(facts)]
    more = 0 if facts is None else len(facts.parts) - PARTS_UP_TO
    parts += [f"<tr><td>… {more} more</td></tr>"] if more > 0 else []
    tables = "".join(f"<table>{''.join(parts[i : i + _COLUMN])}</table>" for i in range(0, len(parts), _COLUMN))
    # it scrolls where it is narrow or long, from the keyboard too
    box = (
        f'<div class="l2l-card-parts" tabindex="0" role="region" aria-label="Parameters">{tables}</div>'
        if parts
        else ""
    )
    name = f"<strong>{escape(full_name(row.key, numbers))}</strong> {escape(row.name)}"
    return f'<div class="l2l-card-facts"><div>{name} · {said}</div>{box}</div>'


def code_line(code: str) -> str:
    """Write a line of code as HTML, which a click selects as a whole."""
    return f'<span class="l2l-code"><code>{escape(code)}</code></span>'


def trial_html(trial: Trial | None, waits: str, now: Moment) -> str:
    """Write what was found, and when, as HTML; or what it waits for."""
    if waits:
        return f'<span class="l2l-caption" role="status">{escape(waits)}</span>'
    if trial is None:
        return ""
    when = f' <span class="l2l-caption">({escape(moment_words(trial.moment, now))})</span>'
    return f"<strong>{escape(trial.words)}</strong>{when}"


def card_table(row: LayerRow, numbers: Numbers, facts: LayerFacts | None, found: Sequence[Trial], now: Moment) -> Table:
    """Make a table of what the card says."""
    rows = [("name", row.name), *(("fact", words) for words in _facts(row, facts))]
    if facts is not None:
        rows += [("parameter", " ".join(cells)) for cells in _parts(facts)]
        rows.append(("spread of weights", spread_words(facts)))
    for name, figure in (("gradient norm", row.grad_norm), ("update / weight", row.update_ratio)):
        rows.append((name, "–" if figure is None else show_figure(figure)))
    rows.append(("influence", "–" if row.influence is None else show_figure(row.influence)))
    rows += [(TRIAL_WORDS[one.how], f"{one.words} ({moment_words(one.moment, now)})") for one in found]
    return Table(f"Layer {full_name(row.key, numbers)}", ("of the layer", "is"), rows)


def spread_words(facts: LayerFacts) -> str:
    """Say mean, deviation and ends of the weights, and when they were looked at."""
    broken = f"{facts.broken:,} weights are not finite; " if facts.broken else ""
    if not facts.counts:
        return f"{broken}no finite weights, after step {facts.step}"
    ends = f"from {show_figure(facts.low)} to {show_figure(facts.high)}"
    return f"{broken}{show_figure(facts.mean)} ± {show_figure(facts.deviation)}, {ends}, after step {facts.step}"


def _facts(row: LayerRow, facts: LayerFacts | None) -> list[str]:
    kind = [facts.module] if facts is not None else []
    trained = "frozen" if row.frozen else "trained"
    sizes = [f"{row.num_params:,} weights", format_bytes(row.nbytes), f"version {row.version}", trained]
    return [
        *kind,
        *sizes,
        *(["not in a ModuleList or Sequential, so it cannot be edited"] if row.stack is None else []),
    ]


def _parts(facts: LayerFacts) -> list[tuple[str, str, str, str]]:
    return [
        (
            part.name,
            " × ".join(map(str, part.shape)) or "one number",
            part.dtype,
            f"{prod(part.shape):,}{'' if part.trained else ', frozen'}",
        )
        for part in facts.parts[:PARTS_UP_TO]
    ]


def _part_row(name: str, *cells: str) -> str:
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
